"""A layer's launches: the norm, SiLU or rotation before its product, the quantization of activations, and the product.

With quantized activations whatever comes first runs inside the quantize-and-pack kernel. With 16-bit activations a norm
is fused into the GEMM at one or two tokens. Otherwise these are launches of their own, with the same result.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybit.choose import heuristics
from anybit.choose.builtin import step
from anybit.choose.dispatch import dispatcher
from anybit.choose.families import FAMILIES, Layout, tiles_of
from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.block import norm_act, quantize_activations
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.kernels.gemm_kernel import GemmKernel, Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import check_input, dense_bias, rows_of
from anybit.ops.plans import Draft, OpPlan, Rows, planned, signature, weight_signature

WEIGHT = ("weight 0", "weight 1", "weight 2", "weight 3")
_WEIGHT = Slot(WEIGHT[0]), Slot(WEIGHT[1]), Slot(WEIGHT[2]), Slot(WEIGHT[3])
SLOTS = ("x", "y", "bias", *WEIGHT, "gamma", "residual", "total")
"""What ``OpPlan.run`` gets for a layer: ``total`` is x + residual."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm(x + residual) before a product. aligned: gamma and the residual begin on 16 bytes."""

    epsilon: float
    residual: bool = True
    aligned: bool = True

    @property
    def slots(self) -> tuple[Slot, Slot | None, Slot | None]:
        """gamma, residual and total."""
        return Slot("gamma"), Slot("residual") if self.residual else None, Slot("total") if self.residual else None


@dataclass(frozen=True)
class Asked:
    """What a layer's launches depend on, besides its rows.

    bias: its dtype, and whether it is dense.  columns: of weights in an activation order; 0: in natural order.
    copies: whether x is no matrix that kernels can read (``rows_of``).
    """

    spec: LinearSpec
    bias: tuple[torch.dtype, bool] | None
    columns: int = 0
    copies: bool = False

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return Layout.planes if backends[self.spec.backend].planes else tiles_of(self.spec.activations)

    def problem(self, rows: Rows) -> LinearProblem:
        """The product of rows as the layer gets them."""
        spec, quantized = self.spec, self.spec.activations.quantized
        k = self.columns if self.columns and quantized else spec.k
        return LinearProblem(
            rows.m, spec.n, k, spec.weights, spec.activations, rows.dtype, rows.gpu, self.columns > 0, self.columns,
            rows.aligned or quantized,  # codes always are
        )  # fmt: skip

    def choice(self, problem: LinearProblem) -> tuple[GemmKernel[Any], Any]:
        """The kernel and config for the problem's bucket of token counts."""
        like = replace(problem, m=step(problem.m))
        chosen = dispatcher(problem.device.name).kept(like, self.layout).candidate
        config = heuristics.limit_occupancy(chosen.config, problem.device)
        if self.spec.fused:
            config = heuristics.among_small(like, config)
        return FAMILIES[chosen.kernel].module, config

    def in_order(self, rows: Rows) -> Rows:
        """Rows after ``packed_layout.in_order``."""
        k = self.columns or rows.k
        return replace(rows, k=k, stride=quantize_activations.pitch(k, rows.dtype.itemsize), aligned=True)


def product(
    draft: Draft, asked: Asked, rows: Rows, y: Slot, silu: bool = False, source: Source = Source.plain,
    norm: Norm | None = None, rotated: bool = False,
) -> None:  # fmt: skip
    """Add a layer's product: y [m, n] = x W^T + bias, or silu(gate) * up of it [m, n / 2].

    With quantized activations x may come from a prologue; the rows of ``Source.silu_mul`` are [m, 2 k].
    """
    spec, m = asked.spec, rows.m
    if not m:
        return
    problem = asked.problem(rows)
    kernel, config = asked.choice(problem)
    quantized, gathers = spec.activations.quantized, kernel.traits.gathers
    if (asked.columns and quantized) or (not (quantized or gathers) and (asked.columns or not rows.aligned)):
        draft.ordered, rows = True, asked.in_order(rows)
    if quantized:
        given = _codes(draft, problem, kernel.traits.target, rows, source, norm, rotated)
    else:
        given = {"x": rows.at, "x_stride": rows.stride}
        if not gathers:
            problem = replace(problem, k=rows.k, act_order=False, columns=0, aligned=True)
    ends = silu and spec.n % packed_layout.UNIT_ROWS == 0 and kernel.traits.silu(config) is not None
    n = spec.n // 2 if ends else spec.n
    out = draft.room(2 * m * n) if silu and not ends else y
    size, zeros = kernel.traits.scratch(problem, config)
    scratch = (draft.room(size), draft.zeros(zeros)) if size else (None, None)
    bias = Slot("bias") if asked.bias else None
    operands = Operands(weight=_WEIGHT, y=out, y_stride=n, bias=bias, scratch=scratch, **given)
    draft.launches += launches(kernel, operands, problem, config, ends)
    if silu and not ends:
        silu_mul(draft, Rows.dense(m, n, rows, out), y, paired=True)


def _codes(
    draft: Draft, problem: LinearProblem, target: Target, rows: Rows, source: Source, norm: Norm | None, rotated: bool
) -> dict[str, Any]:
    """Add the quantization of rows; returns the product's operands."""
    form, k = problem.activations, rows.k // 2 if source is Source.silu_mul else rows.k
    room = draft.room(quantize_activations.offsets(rows.m, k, form, target)[-1])
    codes = quantize_activations.codes_at(room, rows.m, k, form, target)
    aligned = k % quantize_activations.VECTOR == 0 and rows.aligned and (norm is None or norm.aligned)
    asked = quantize_activations.Problem(
        rows.m, k, form, rows.dtype, source, target, aligned, rotated, rows.gpu if rotated else None
    )
    gamma, residual, total = (None, None, None) if norm is None else norm.slots
    draft.launches.append(
        quantize_activations.made(
            asked, quantize_activations.default(asked), codes, rows.at, rows.stride, rows.device,
            gamma=gamma, epsilon=0.0 if norm is None else norm.epsilon, residual=residual, residual_sum=total,
        )
    )  # fmt: skip
    stride = quantize_activations.pitch(k)
    return {"x": codes.codes, "x_stride": stride, "x_scale": codes.scale, "x_sum": codes.sum, "x_zero": codes.zero}


def silu_mul(draft: Draft, rows: Rows, y: Slot, paired: bool) -> None:
    """Add y [m, k] = silu(gate) * up of rows [m, 2 k]."""
    problem = norm_act.Problem(rows.m, rows.k // 2, rows.dtype, rows.aligned and rows.k // 2 % norm_act.VECTOR == 0)
    if rows.m:
        draft.launches.append(norm_act.silu_mul(problem, rows.at, rows.stride, y, paired))


def rms_norm(draft: Draft, rows: Rows, norm: Norm, y: Slot) -> None:
    """Add y = RMSNorm(x + residual) [m, k]."""
    aligned = rows.aligned and norm.aligned and rows.k % norm_act.VECTOR == 0
    problem = norm_act.Problem(rows.m, rows.k, rows.dtype, aligned)
    gamma, residual, total = norm.slots
    if rows.m:
        draft.launches.append(
            norm_act.add_rms_norm(problem, rows.at, rows.stride, residual, gamma, norm.epsilon, y, total)
        )


def normed(draft: Draft, asked: Asked, rows: Rows, norm: Norm, silu: bool = False, rotated: bool = False) -> None:
    """Add RMSNorm(x + residual), and the product of the result (``product``)."""
    y, whole = Slot("y"), not silu or asked.spec.n % packed_layout.UNIT_ROWS == 0
    if asked.spec.activations.quantized:
        product(draft, asked, rows, y, silu, Source.rms_norm, norm, rotated)
    elif (config := norm_config(asked, rows, norm)) is not None and whole:
        problem, arguments = norm_arguments(asked, rows, norm)
        draft.launches.append(sm90_packed_gemv.norm_launch(problem, config, arguments, silu))
    else:
        between = draft.room(2 * rows.m * rows.k)
        rms_norm(draft, rows, norm, between)
        product(draft, asked, Rows.dense(rows.m, rows.k, rows, between), y, silu)


def norm_config(asked: Asked, rows: Rows, norm: Norm) -> sm90_packed_gemv.Config | None:
    """The config of a GEMV with a fused norm; None if there is none."""
    if asked.layout is not Layout.tiles_a16 or not 0 < rows.m <= sm90_packed_gemv.NORM_TOKENS or not norm.aligned:
        return None
    problem = asked.problem(rows)
    if sm90_packed_gemv.norm_why_not(problem) is not None:
        return None
    chosen = dispatcher(rows.gpu.name).choose(problem, asked.layout, "sm90_packed_gemv").candidate
    usual = chosen.config if chosen.kernel == "sm90_packed_gemv" else None
    try:
        return heuristics.limit_occupancy_normed(sm90_packed_gemv.norm_default(problem, usual), rows.gpu)
    except KernelError:
        return None


def norm_arguments(asked: Asked, rows: Rows, norm: Norm) -> tuple[LinearProblem, sm90_packed_gemv.NormParams]:
    """The problem and arguments of a GEMV with a fused norm."""
    problem, (gamma, residual, total) = asked.problem(rows), norm.slots
    bias = Slot("bias") if asked.bias else None
    operands = Operands(rows.at, rows.stride, _WEIGHT, Slot("y"), asked.spec.n, bias)
    return problem, sm90_packed_gemv.norm_arguments(operands, problem, gamma, norm.epsilon, residual, total)


def layer_plan(
    asked: Asked, rows: Rows, silu: bool = False, source: Source = Source.plain, norm: Norm | None = None,
    rotated: bool = False,
) -> OpPlan:  # fmt: skip
    """The plan of a layer, y [m, n], on its own or after what ``product`` and ``normed`` do before it.

    Where x or the bias have to be laid out first, it does that.
    """
    draft, spec = Draft(), asked.spec
    if norm is None:
        product(draft, asked, rows, Slot("y"), silu, source, rotated=rotated)
    else:
        normed(draft, asked, rows, norm, silu, rotated)
    dtype = torch.float32 if backends[spec.backend].planes else rows.dtype

    def prepare(x: Tensor, weight: list[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if draft.ordered:
            x = packed_layout.in_order(weight[3] if asked.columns else None, rows_of(x, spec.k))
        elif asked.copies:
            x = rows_of(x, spec.k)
        return x, dense_bias(bias, dtype)

    direct = asked.bias in (None, (dtype, True)) and not draft.ordered and not asked.copies
    made = draft.done(SLOTS, rows.device)
    return replace(made, shape=(rows.m, spec.n // (1 + silu)), prepare=None if direct else prepare)


# -------- a layer's calls


def asked_of(spec: LinearSpec, weight: list[Tensor], bias: Tensor | None, copies: bool = False) -> Asked:
    """What the launches of a prepared layer depend on."""
    columns = 0 if backends[spec.backend].planes else weight[3].numel()  # of the permutation
    return Asked(spec, None if bias is None else (bias.dtype, bias.is_contiguous()), columns, copies)


def linear_key(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False) -> Hashable:
    """The key of a layer's plan."""
    return spec, silu, signature(x), weight_signature(weight), signature(bias)


def run(plan: OpPlan, x: Tensor, weight: list[Tensor], bias: Tensor | None, *more: Tensor | None) -> Tensor:
    """Run a layer's plan for operands of its signature. more: the tensors of the slots behind the weight's."""
    rows, y = x, x.new_empty(plan.shape)
    if plan.prepare is not None:
        rows, bias = plan.prepare(x, weight, bias)
    plan.run(x, rows, y, bias, *weight[:4], *more)
    return y


def linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False) -> Tensor:
    """Y = x W^T + bias [..., N], or silu(gate) * up of it [..., N / 2], of outputs interleaved eight by eight.

    Raises KernelError, before any launch, for operands that do not fit the layer.
    """

    def make() -> OpPlan:
        check_input(x, weight[0], spec, bias)
        rows = rows_of(x, spec.k)
        asked = asked_of(spec, weight, bias, rows.data_ptr() != x.data_ptr())
        return replace(layer_plan(asked, Rows.of(rows), silu), shape=(*x.shape[:-1], spec.n // (1 + silu)))

    return run(planned(linear_key(x, weight, bias, str(spec), silu), make), x, weight, bias)
