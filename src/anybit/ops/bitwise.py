"""Layers with integer activations of 1 to 8 bits on the 1-bit tensor cores: quantize-and-pack, then the GEMM."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybit.choose.builtin import step
from anybit.choose.dispatch import dispatcher, forget_with_maps
from anybit.choose.families import Layout, quantizer
from anybit.codes.packing import QuantizedWeight, pack_words
from anybit.device import Device
from anybit.kernels.bitplane import bitplane, bitplane_layout, bitplane_problem
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.ops.backend import Backend, LinearSpec
from anybit.ops.checks import check_input, dense_bias, layouts_of, product_of, rows_of
from anybit.ops.prologue import LinearInput, opened
from anybit.scheme import ActivationFormat

TENSORS = 6
"""Number of tensors that ``prepare`` returns."""
_OUTPUTS = {torch.float16: Output.f16, torch.bfloat16: Output.bf16}


@dataclass(frozen=True, eq=False)
class _Plan:
    """Kernel configs for a layer, a dtype and a bucket of token counts; chosen once."""

    output: Output
    pack_config: quantize_activations.Config
    gemm_config: Any


_plans: dict[tuple[int, int, torch.dtype, bool, int], _Plan] = {}
forget_with_maps(_plans)


class Bitwise(Backend):
    """Weights in bit planes, activations quantized and packed per call; sm_80 to sm_90.

    wgmma on sm_90a, else mma.sync (kernels/bitplane/bitplane.py).
    """

    name = "bitwise"
    unasked = ("cuda",)
    codes = True

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why no kernel runs this layer on its device, as a sentence; None if one does."""
        if not activations.quantized:
            return "it needs quantized activations, and these have 16 bits"
        if weight.device.type != "cuda":
            return f"its kernels need a CUDA device, and the weight is on {weight.device}"
        n, k = weight.shape
        return why_not(n, k, weight, activations, Device.of(weight.words))

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """0 if the policy map (without one: the built-in choice) picks bit planes for this layer, else 2."""
        return 0 if Layout.planes in layouts_of(weight, activations, 1) else 2

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """Planes, float32 scales, corrections and zero points; then the original scale and group index, for restore."""
        ready = bitplane_layout.prepare(weight)
        empty = torch.empty(0, dtype=torch.int32, device=weight.device)
        zero = empty if ready.zero is None else ready.zero
        group_index = empty if weight.group_index is None else weight.group_index
        return [ready.planes, ready.scale, ready.correction, zero, weight.scale, group_index]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        stored, _, _, zero, scale, group_index = tensors
        codes = bitplane_layout.unpack(stored, spec.n, spec.k)
        return QuantizedWeight(
            pack_words(codes, spec.weights.bits),
            scale,
            zero.to(torch.uint8)[:, None] if zero.numel() else None,
            (spec.n, spec.k),
            spec.weights,
            group_index if group_index.numel() else None,
        )

    def linear(self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Two launches: quantize-and-pack, then the GEMM with its epilogue."""
        x, prologue = opened(x)
        check_input(x, tensors[0], spec, bias)
        rows = rows_of(x, spec.k)
        m = rows.shape[0]
        y = torch.empty(m, spec.n, dtype=x.dtype, device=x.device)
        if m:
            plan = _plan(spec, rows)
            packed = Packed(m, spec.k, spec.activations, Target.planes, x.device)
            if prologue is None:
                quantize_activations.launch(
                    quantize_activations.problem_of(rows, spec.activations), plan.pack_config, packed, rows
                )
            else:
                prologue.code(packed, Target.planes)
            stored, scale, correction, zero = tensors[:4]
            weight = bitplane_layout.PlaneWeight(
                stored, scale, correction, zero if zero.numel() else None, (spec.n, spec.k), spec.weights
            )
            bias = dense_bias(bias, torch.float32)
            bitplane.multiply(packed, weight, plan.output, bias=bias, y=y, config=plan.gemm_config)
        return y.view(*x.shape[:-1], spec.n)


def why_not(
    n: int, k: int, weight: QuantizedWeight, activations: ActivationFormat, device: Device, m: int = 1
) -> str | None:
    """Why no bit-plane kernel multiplies m x k activations with an n x k weight on ``device``; None if one does."""
    ordered = weight.group_index is not None and weight.format.group is not None
    problem = LinearProblem(m, n, k, weight.format, activations, device=device, act_order=ordered)
    reason = bitplane_problem.why_not(problem, 80)
    if reason is None and bitplane.family(problem) is None:
        reason = f"no tile of its bit planes fits the shared memory of {device.arch}"
    return reason


def _plan(spec: LinearSpec, rows: Tensor) -> _Plan:
    """Kernels and configs for the rows' token bucket; cached."""
    bucket = step(rows.shape[0])
    aligned = spec.k % quantize_activations.VECTOR == 0 and quantize_activations.rows_aligned(rows)
    # There is one LinearSpec object per text, kept for ever, so its id can be the key.
    key = (id(spec), bucket, rows.dtype, aligned, rows.get_device())
    found = _plans.get(key)
    if found is None:
        product = product_of(spec, bucket, rows)
        chosen = dispatcher(product.device.name).kept(product, Layout.planes).candidate
        found = _plans[key] = _Plan(_OUTPUTS[rows.dtype], quantizer(product, Target.planes, aligned), chosen.config)
    return found
