"""A layer's launches: the norm, SiLU or rotation before its product, the quantization of activations, and the product.

With quantized activations whatever comes first runs inside the quantize-and-pack kernel. With 16-bit activations a norm
is fused into the GEMM at one or two tokens. Otherwise these are launches of their own, with the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit.choose import heuristics
from anybit.choose.dispatch import chosen, dispatcher
from anybit.choose.families import Layout, tiles_of
from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.block import norm_act, quantize_activations
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.kernels.gemm_kernel import Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import check_input, copy_of, dense_bias
from anybit.ops.plans import PLANS, OpPlan, Rows, key_of, new_plan

WEIGHT = ("weight 0", "weight 1", "weight 2", "weight 3")
_WEIGHT = Slot(WEIGHT[0]), Slot(WEIGHT[1]), Slot(WEIGHT[2]), Slot(WEIGHT[3])
SLOTS = ("bias", *WEIGHT, "gamma", "residual", "total")
"""What ``OpPlan.call`` gets for a layer besides x: ``total`` is x + residual."""


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
    """

    spec: LinearSpec
    layout: Layout
    bias: tuple[torch.dtype, bool] | None
    columns: int = 0

    def problem(self, rows: Rows) -> LinearProblem:
        """The product of rows as the layer gets them."""
        spec, quantized = self.spec, self.spec.activations.quantized
        k = self.columns if self.columns and quantized else spec.k
        return LinearProblem(
            rows.m, spec.n, k, spec.weights, spec.activations, rows.dtype, rows.gpu, self.columns > 0, self.columns,
            rows.aligned or quantized,  # codes always are
        )  # fmt: skip

    def in_order(self, rows: Rows) -> Rows:
        """Rows after ``packed_layout.in_order``."""
        k = self.columns or rows.k
        return replace(rows, k=k, stride=quantize_activations.pitch(k, rows.dtype.itemsize), aligned=True)


def product(
    plan: OpPlan, asked: Asked, rows: Rows, y: Slot, silu: bool = False, source: Source = Source.plain,
    norm: Norm | None = None, rotated: bool = False,
) -> None:  # fmt: skip
    """Add a layer's product to a plan: y [m, n] = x W^T + bias, or silu(gate) * up of it [m, n / 2].

    With quantized activations x may come from a prologue; the rows of ``Source.silu_mul`` are [m, 2 k].
    """
    spec, m = asked.spec, rows.m
    if not m:
        return
    problem = asked.problem(rows)
    kernel, config = chosen(problem, asked.layout, spec.fused)
    quantized, gathers = spec.activations.quantized, kernel.traits.gathers
    if (asked.columns and quantized) or (not (quantized or gathers) and (asked.columns or not rows.aligned)):
        plan.ordered, rows = True, asked.in_order(rows)
    ends = silu and spec.n % packed_layout.UNIT_ROWS == 0 and kernel.traits.silu(config) is not None
    n = spec.n // 2 if ends else spec.n
    out = plan.room(2 * m * n) if silu and not ends else y
    operands = Operands(rows.at, rows.stride, _WEIGHT, out, n, Slot("bias") if asked.bias else None)
    if quantized:
        codes = _codes(plan, problem, kernel.traits.target, rows, source, norm, rotated)
        operands = replace(
            operands, x=codes.codes, x_stride=quantize_activations.pitch(problem.k), x_scale=codes.scale,
            x_sum=codes.sum, x_zero=codes.zero,
        )  # fmt: skip
    elif not gathers:
        problem = replace(problem, k=rows.k, act_order=False, columns=0, aligned=True)
    size, zeros = kernel.traits.scratch(problem, config)
    if size:
        operands = replace(operands, scratch=(plan.room(size), plan.zeros(zeros)))
    plan.launches += launches(kernel, operands, problem, config, ends)
    if silu and not ends:
        silu_mul(plan, Rows.dense(m, n, rows, out), y, paired=True)


def _codes(
    plan: OpPlan, problem: LinearProblem, target: Target, rows: Rows, source: Source, norm: Norm | None, rotated: bool
) -> quantize_activations.Codes:
    """Add the quantization of rows; returns what the product reads."""
    form, k = problem.activations, rows.k // 2 if source is Source.silu_mul else rows.k
    room = plan.room(quantize_activations.offsets(rows.m, k, form, target)[-1])
    codes = quantize_activations.codes_at(room, rows.m, k, form, target)
    aligned = k % quantize_activations.VECTOR == 0 and rows.aligned and (norm is None or norm.aligned)
    asked = quantize_activations.Problem(
        rows.m, k, form, rows.dtype, source, target, aligned, rotated, rows.gpu if rotated else None
    )
    gamma, residual, total = (None, None, None) if norm is None else norm.slots
    plan.launches.append(
        quantize_activations.made(
            asked, quantize_activations.default(asked), codes, rows.at, rows.stride, rows.device,
            gamma=gamma, epsilon=0.0 if norm is None else norm.epsilon, residual=residual, residual_sum=total,
        )
    )  # fmt: skip
    return codes


def silu_mul(plan: OpPlan, rows: Rows, y: Slot, paired: bool) -> None:
    """Add y [m, k] = silu(gate) * up of rows [m, 2 k]."""
    problem = norm_act.Problem(rows.m, rows.k // 2, rows.dtype, rows.aligned and rows.k // 2 % norm_act.VECTOR == 0)
    if rows.m:
        plan.launches.append(norm_act.silu_mul(problem, rows.at, rows.stride, y, paired))


def rms_norm(plan: OpPlan, rows: Rows, norm: Norm, y: Slot) -> None:
    """Add y = RMSNorm(x + residual) [m, k]."""
    aligned = rows.aligned and norm.aligned and rows.k % norm_act.VECTOR == 0
    problem = norm_act.Problem(rows.m, rows.k, rows.dtype, aligned)
    gamma, residual, total = norm.slots
    if rows.m:
        plan.launches.append(
            norm_act.add_rms_norm(problem, rows.at, rows.stride, residual, gamma, norm.epsilon, y, total)
        )


def normed(plan: OpPlan, asked: Asked, rows: Rows, norm: Norm, silu: bool = False, rotated: bool = False) -> None:
    """Add RMSNorm(x + residual), and the product of the result (``product``)."""
    y, whole = Slot("y"), not silu or asked.spec.n % packed_layout.UNIT_ROWS == 0
    if asked.spec.activations.quantized:
        product(plan, asked, rows, y, silu, Source.rms_norm, norm, rotated)
    elif (config := norm_config(asked, rows, norm)) is not None and whole:
        problem, arguments = norm_arguments(asked, rows, norm)
        plan.launches.append(sm90_packed_gemv.norm_launch(problem, config, arguments, silu))
    else:
        between = plan.room(2 * rows.m * rows.k)
        rms_norm(plan, rows, norm, between)
        product(plan, asked, Rows.dense(rows.m, rows.k, rows, between), y, silu)


def norm_config(asked: Asked, rows: Rows, norm: Norm) -> sm90_packed_gemv.Config | None:
    """The config of a GEMV with a fused norm; None if there is none."""
    if asked.layout is not Layout.tiles_a16 or not 0 < rows.m <= sm90_packed_gemv.NORM_TOKENS or not norm.aligned:
        return None
    problem = asked.problem(rows)
    if sm90_packed_gemv.norm_why_not(problem) is not None:
        return None
    best = dispatcher(rows.gpu.name).choose(problem, asked.layout, "sm90_packed_gemv").candidate
    usual = best.config if isinstance(best.config, sm90_packed_gemv.Config) else None
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
    asked: Asked, rows: Rows, shape: Sequence[int] = (), silu: bool = False, source: Source = Source.plain,
    norm: Norm | None = None, rotated: bool = False,
) -> OpPlan:  # fmt: skip
    """The plan of a layer, on its own or after what ``product`` and ``normed`` do before it. shape: of all x but its
    last dimension.

    Where x or the bias have to be laid out first, it does that.
    """
    spec = asked.spec
    plan = new_plan((*shape, spec.n // (1 + silu)), rows.device, *SLOTS)
    if norm is None:
        product(plan, asked, rows, Slot("y"), silu, source, rotated=rotated)
    else:
        normed(plan, asked, rows, norm, silu, rotated)
    dtype = torch.float32 if asked.layout is Layout.planes else rows.dtype

    def prepare(x: Tensor, more: tuple[Tensor | None, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        bias, *others = more
        if plan.ordered or rows.copied:
            copied = x.reshape(-1, rows.k)
            x = copy_of(x).view(copied.shape) if rows.copied and copied.data_ptr() == x.data_ptr() else copied
        if plan.ordered:
            x = packed_layout.in_order(others[3] if asked.columns else None, x)
        return x, (dense_bias(bias, dtype), *others)

    if plan.ordered or rows.copied or asked.bias not in (None, (dtype, True)):
        plan.prepare = prepare
    return plan


# -------- a layer's calls


def asked_of(spec: LinearSpec, weight: list[Tensor], bias: Tensor | None) -> Asked:
    """What the launches of a prepared layer depend on."""
    of_bias = None if bias is None else (bias.dtype, bias.is_contiguous())
    if backends[spec.backend].planes:
        return Asked(spec, Layout.planes, of_bias)
    return Asked(spec, tiles_of(spec.activations), of_bias, weight[3].numel())  # of the permutation


def linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False) -> Tensor:
    """Y = x W^T + bias [..., N], or silu(gate) * up of it [..., N / 2], of outputs interleaved eight by eight.

    Raises KernelError, before any launch, for operands that do not fit the layer.
    """
    key = key_of((spec, silu), (x, bias), weight)
    plan = PLANS.get(key)
    if plan is None:
        layer = LinearSpec.parse(spec)
        if not backends[layer.backend].codes:
            return backends[layer.backend].linear(x, weight, bias, layer)
        check_input(x, weight[0], layer, bias)
        asked = asked_of(layer, weight, bias)
        plan = PLANS[key] = layer_plan(asked, Rows.of(x), x.shape[:-1], silu)
    return plan.call(x, bias, *weight[:4])
