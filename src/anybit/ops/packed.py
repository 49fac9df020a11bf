"""Layers whose weights are dequantized in registers: 16-bit activations, or 8-bit ones quantized per token.

ADAngel's padding and dequantizing strategies (section 4.3), except that global and shared memory only ever hold packed
weights.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anybit import jit
from anybit.choose import heuristics
from anybit.choose.builtin import step
from anybit.choose.dispatch import dispatcher, forget_with_maps
from anybit.choose.families import FAMILIES, KernelFamily, quantizer, tiles_of
from anybit.codes.packing import QuantizedWeight, pack_words
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed, Source, Target
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout, packed_problem, packed_tiles, sparse_layout
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.kernels.packed.rows import packed_rows
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops import packed_calls
from anybit.ops.backend import Backend, CachedCall, LinearSpec
from anybit.ops.checks import check_input, copy_of, dense_bias, product_of, rows_of
from anybit.ops.elementwise import check_step
from anybit.ops.prologue import ActivationPrologue, LinearInput, opened
from anybit.scheme import ActivationFormat

TENSORS = 8
"""Number of tensors that ``prepare`` returns."""
_EMPTY = 0


@dataclass(eq=False)
class _Plan:
    """Kernel and config for a layer, a dtype and a bucket of token counts; chosen once.

    ready: kernel and grid of a GEMV plan, once a first launch has checked it.
    """

    family: KernelFamily
    config: Any
    quantizer: quantize_activations.Config | None
    ready: tuple[jit.Kernel, tuple[int, int, int]] | None = None

    @property
    def kernel(self) -> ModuleType:
        """The kernel's module."""
        return self.family.module

    def ends_with_silu(self, n: int) -> bool:
        """Whether to use its SiLU epilogue for n outputs; with 16-bit activations, only in the GEMM for many tokens."""
        asked = self.quantizer is not None or self.kernel is sm90_packed_gemm
        return asked and n % packed_layout.UNIT_ROWS == 0 and self.family.ends_with_silu(self.config)


_plans: dict[tuple[int, int, torch.dtype, bool, int, int], _Plan] = {}
forget_with_maps(_plans)


class PackedTiles(Backend):
    """Weights of 1 to 8 bits in tiles, dequantized in registers: `sm90_packed_gemm`, or the kernel `heuristics` picks.

    Without wgmma (all but sm_90a), `sm80_packed_gemm` replaces `sm90_packed_gemm`.
    """

    name = "packed"
    unasked = ("cuda",)
    codes = True
    norm_tokens = sm90_packed_gemv.NORM_TOKENS

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why no kernel runs this layer on its device, as a sentence; None if one does."""
        if weight.device.type != "cuda":
            return f"its kernels need a CUDA device, and the weight is on {weight.device}"
        return why_not(weight, activations, Device.of(weight.words))

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """1: after bit planes where they cost 0, before them where they cost 2."""
        return 1

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """Tiles, row scales, row zeros, permutation; then the original scale, zero, group index and minimum."""
        packed = packed_tiles.prepare(weight, "a8" if activations.quantized else "a16")
        saved = (weight.scale, weight.zero, weight.group_index, weight.minimum)
        tensors = (packed.tiles, packed.row_scale, packed.row_zero, packed.permutation, *saved)
        return [torch.empty(_EMPTY, device=weight.device) if tensor is None else tensor for tensor in tensors]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        packed, indices = _weight(tensors, spec), None
        if spec.weights.sparse:
            words, indices = sparse_layout.words_of(packed.tiles, spec.weights.bits, packed.order, spec.n, spec.k)
        else:
            words = pack_words(packed_tiles.codes(packed), spec.weights.bits)
        scale, (zero, group_index, minimum) = tensors[4], map(_optional, tensors[5:8])
        return QuantizedWeight(words, scale, zero, (spec.n, spec.k), spec.weights, group_index, indices, minimum)

    def linear(self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """One launch, after one that quantizes the activations if they are quantized."""
        y = self._linear(x, tensors, bias, spec, False)
        assert y is not None
        return y

    def ends_with_silu(self, weight: QuantizedWeight) -> bool:
        """On sm_90a, for dense weights: all kernels that are fast with quantized activations have the epilogue."""
        arch, whole = Device.of(weight.words).arch, weight.shape[0] % packed_layout.UNIT_ROWS == 0
        return arch == "sm_90a" and whole and not weight.format.sparse and weight.group_index is None

    def linear_silu(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor | None:
        """``linear`` with a SiLU epilogue; None if the chosen kernel has none."""
        return self._linear(x, tensors, bias, spec, True)

    def _linear(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool
    ) -> Tensor | None:
        x, prologue = opened(x)
        check_input(x, tensors[0], spec, bias)
        bias = dense_bias(bias, x.dtype)
        rows = rows_of(x, spec.k)
        m, n = rows.shape[0], spec.n // 2 if silu else spec.n
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        if m == 0:
            return y.view(*x.shape[:-1], n)
        weight = _weight(tensors, spec)
        plan = _plan(spec, rows, weight)
        if silu and not plan.ends_with_silu(spec.n):
            return None
        if plan.quantizer is not None:
            if weight.permutation is not None:  # before quantizing: a token's scale does not depend on the order
                rows = packed_layout.in_order(weight, rows)
            codes = Packed(m, rows.shape[1], spec.activations, Target.bytes, x.device)
            if prologue is None:
                quantize_activations.launch(
                    quantize_activations.problem_of(rows, spec.activations, Target.bytes), plan.quantizer, codes, rows
                )
            else:
                prologue.code(codes, Target.bytes)
            plan.family.multiply(codes, weight, y, plan.config, bias, silu)
        elif plan.kernel is sm90_packed_gemm:
            plan.family.multiply(packed_layout.in_order(weight, rows), weight, y, plan.config, bias, silu)
        elif plan.kernel is sm80_packed_gemm:
            plan.family.multiply(rows, weight, y, plan.config, bias)
        else:
            _multiply_few(rows, weight, bias, y, plan)
        return y.view(*x.shape[:-1], n)

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """Embedding lookup from the tiles, in one launch. KernelError for tiles of 8-bit activations, and float32."""
        y = torch.empty(ids.numel(), spec.k, dtype=dtype, device=ids.device)
        if y.numel():
            packed_rows.launch(_weight(tensors, spec), ids.reshape(-1).contiguous(), y)
        return y.view(*ids.shape, spec.k)

    def cached_call(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
    ) -> CachedCall | None:
        """Launches with all parameters but addresses precomputed; None for gathered rows, and without wgmma."""
        x, prologue = opened(x)
        check_input(x, tensors[0], spec, bias)
        rows, weight = rows_of(x, spec.k), _weight(tensors, spec)
        if weight.permutation is not None or rows.data_ptr() != x.data_ptr() or not len(rows):
            return None
        plan = _plan(spec, rows, weight)
        if plan.kernel is sm80_packed_gemm or not quantize_activations.rows_aligned(rows):
            return None
        if silu and not plan.ends_with_silu(spec.n):
            return None
        shape = (*x.shape[:-1], spec.n // 2 if silu else spec.n)
        if plan.quantizer is None:
            return packed_calls.call_16bit(rows, shape, weight, bias, plan.kernel, plan.config, silu)
        quantizer = plan.quantizer
        if prologue is None:
            prologue = ActivationPrologue(Source.plain, rows)
        else:
            quantizer = quantize_activations.default(prologue.problem(spec.activations, Target.bytes))
        how = plan.kernel, plan.config, quantizer, spec.activations, silu
        return packed_calls.call_quantized(prologue, shape, weight, bias, *how)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, tensors: list[Tensor],
        bias: Tensor | None, spec: LinearSpec, silu: bool = False,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """(linear of RMSNorm(x + residual), x + residual) in one launch; None if there is no such kernel.

        silu: the first is silu(gate) * up [..., N / 2], of outputs interleaved eight by eight, in the same launch.
        """
        found = self._normed(x, residual, gamma, tensors, spec)
        if found is None:
            return None
        rows, other, total, weight, config = found
        n = spec.n // 2 if silu else spec.n
        y = torch.empty(len(rows), n, dtype=x.dtype, device=x.device)
        bias = dense_bias(bias, x.dtype)
        sm90_packed_gemv.launch_norm(weight, rows, y, gamma, epsilon, other, total, bias, config, silu=silu)
        summed = copy_of(x) if total is None else total.view(x.shape)
        return y.view(*x.shape[:-1], n), summed

    def norm_rotate_store(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, tensors: list[Tensor],
        bias: Tensor | None, spec: LinearSpec, step: RopeStoreArgs | RopePagesArgs,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """(queries after RoPE, x + residual) in one launch, K and V stored; None if there is no such kernel."""
        found = self._normed(x, residual, gamma, tensors, spec)
        if found is None or spec.n % packed_layout.UNIT_ROWS:
            return None
        rows, other, total, weight, config = found
        if isinstance(step, RopeStoreArgs):
            if step.ring.dtype != x.dtype:
                return None
            check_step(rows, spec.n, step)
        q = torch.empty(len(rows), step.query_heads * step.head_dim, dtype=x.dtype, device=x.device)
        bias = dense_bias(bias, x.dtype)
        sm90_packed_gemv.launch_rotary(weight, rows, q, gamma, epsilon, other, total, bias, config, step)
        return q, copy_of(x) if total is None else total.view(x.shape)

    def _normed(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, tensors: list[Tensor], spec: LinearSpec
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PackedWeight, sm90_packed_gemv.Config] | None:
        """(rows, residual, output for their sum, weight, config) of a GEMV with a fused norm; None if there is none."""
        check_input(x, tensors[0], spec)
        rows = rows_of(x, spec.k).contiguous()
        weight = _weight(tensors, spec)
        config = _norm_config(spec, rows, weight)
        other = None if residual is None else residual.reshape(rows.shape).contiguous()
        aligned = gamma.data_ptr() % 16 == 0 and (other is None or other.data_ptr() % 16 == 0)
        if config is None or not aligned or gamma.dtype != x.dtype:
            return None
        return rows, other, None if other is None else torch.empty_like(other), weight, config


def why_not(weight: QuantizedWeight, activations: ActivationFormat, device: Device) -> str | None:
    """Why no kernel on ``device`` runs a weight in tiles at any token count, as a sentence; None if one does."""
    n, k = weight.shape
    ordered = packed_tiles.is_ordered(weight)
    problem = LinearProblem(1, n, k, weight.format, activations, device=device, act_order=ordered)
    reason = sm90_packed_gemm.why_not(problem)
    return reason if reason is None or device.arch == "sm_90a" else sm80_packed_gemm.why_not(problem)


_norm_configs: dict[tuple[int, int, torch.dtype, bool, int], sm90_packed_gemv.Config | None] = {}


def _norm_config(spec: LinearSpec, rows: Tensor, weight: PackedWeight) -> sm90_packed_gemv.Config | None:
    """The config of a GEMV with a fused norm, cached; None if there is none."""
    m = rows.shape[0]
    if not 0 < m <= sm90_packed_gemv.NORM_TOKENS or spec.activations.quantized or weight.permutation is not None:
        return None
    aligned = quantize_activations.rows_aligned(rows)
    key = (id(spec), m, rows.dtype, aligned, rows.get_device())
    if key not in _norm_configs:
        device = Device.of(rows)
        problem = packed_problem.problem_of(weight, m, rows.dtype, rows.dtype, device)
        problem = problem if aligned else replace(problem, aligned=False)
        reason = sm90_packed_gemv.norm_why_not(problem)
        try:
            found = (
                None if reason else heuristics.limit_occupancy_normed(sm90_packed_gemv.norm_default(problem), device)
            )
        except KernelError:
            found = None
        _norm_configs[key] = found
    return _norm_configs[key]


def _multiply_few(rows: Tensor, weight: PackedWeight, bias: Tensor | None, y: Tensor, plan: _Plan) -> None:
    """Launch a kernel for few tokens; operands are checked at a plan's first launch only, as they do not change."""
    fits = bias is None or (bias.dtype == y.dtype and bias.numel() == y.shape[1])
    if plan.ready is None or not fits:
        packed_problem.launch_few(plan.kernel, weight, rows, y, bias=bias, config=plan.config)
        problem = packed_problem.checked_problem(weight, rows, y, None, bias)
        plan.ready = plan.kernel.kernel(plan.config), plan.kernel.grid(problem, plan.config)
    else:
        kernel, grid = plan.ready
        arguments = packed_problem.arguments(weight, rows, y, None, bias)
        jit.launch(kernel, arguments, grid, pdl=True, device=rows.get_device())


def _plan(spec: LinearSpec, rows: Tensor, weight: PackedWeight) -> _Plan:
    """Kernel and config for the rows' token bucket; cached."""
    bucket = step(rows.shape[0])
    aligned = quantize_activations.rows_aligned(rows)
    # There is one LinearSpec object per text, kept for ever, so its id can be the key.
    columns = 0 if weight.permutation is None else weight.permutation.numel()
    key = (id(spec), bucket, rows.dtype, aligned, rows.get_device(), columns)
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = _decide(spec, rows, weight, bucket, aligned)
    return found


def _decide(spec: LinearSpec, rows: Tensor, weight: PackedWeight, bucket: int, aligned: bool) -> _Plan:
    columns = None if weight.permutation is None else weight.permutation.numel()
    product = product_of(spec, bucket, rows, columns, aligned)
    quantized = spec.activations.quantized
    quantize = quantizer(product, Target.bytes, aligned) if quantized else None
    chosen = dispatcher(product.device.name).kept(product, tiles_of(spec.activations)).candidate
    family = FAMILIES[chosen.kernel]
    config = heuristics.limit_occupancy(chosen.config, product.device)
    if spec.fused and family.module is sm90_packed_gemm:
        config = heuristics.among_small(product, config)
    return _Plan(family, config, quantize)


def _weight(tensors: list[Tensor], spec: LinearSpec) -> PackedWeight:
    tiles, row_scale, row_zero, permutation = tensors[:4]
    shape, order = (spec.n, spec.k), "a8" if spec.activations.quantized else "a16"
    return PackedWeight(tiles, row_scale, _optional(row_zero), _optional(permutation), shape, spec.weights, order)  # type: ignore[arg-type]


def _optional(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None
