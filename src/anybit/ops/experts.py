"""Mixtures of experts: both products of a token's experts and the sum over them, as one op, ``anybit::experts``."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.codes import reference
from anybit.errors import KernelError, dtype_name
from anybit.jit import Slot
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Gate, Problem
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.packed.packed_layout import round_up
from anybit.ops.backend import backends
from anybit.ops.checks import copy_of, dense_bias
from anybit.ops.library import calls, define, under_autocast
from anybit.ops.plans import PLANS, OpPlan, Rows, key_of, new_plan
from anybit.ops.prepared_experts import ExpertsSpec as ExpertsSpec
from anybit.ops.prepared_experts import PreparedExperts as PreparedExperts
from anybit.ops.prepared_experts import prepare_experts as prepare_experts


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, prepared: PreparedExperts, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over a token's experts of weight * down(join(gate_up(x))): x [T, H] -> [T, H] in x's dtype.

    ids: int32 or int64 [T, k]; an id out of range (-1) adds nothing, one twice in a token counts twice.  weights: float
    [T, k].  gate_up_bias: [count, 2 I], rows as gate_up's.  down_bias: [count, H].  Kernels take float16 and bfloat16.
    ids are read on the device alone.  Raises KernelError, before any launch, for operands that do not fit.
    """
    y: Tensor = calls.experts(
        x, ids, weights, prepared.gate_up.tensors, prepared.down.tensors, gate_up_bias, down_bias, prepared.spec_text
    )
    return y


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, spec: ExpertsSpec
) -> None:
    hidden, inner = spec.gate_up.k, spec.down.k
    if x.ndim != 2 or x.shape[1] != hidden:
        raise KernelError(f"x has shape {tuple(x.shape)}, and the experts take [tokens, {hidden}]")
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or len(ids) != len(x):
        raise KernelError(f"ids must be int32 or int64 [{len(x)}, k], not {dtype_name(ids.dtype)} {tuple(ids.shape)}")
    if not weights.is_floating_point() or weights.shape != ids.shape:
        raise KernelError(
            f"weights must be floats of ids' shape {tuple(ids.shape)}, not {dtype_name(weights.dtype)} "
            f"{tuple(weights.shape)}"
        )
    for name, bias, n in (("gate_up_bias", gate_up_bias, 2 * inner), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (spec.count, n):
            raise KernelError(f"{name} must have shape {(spec.count, n)}, not {tuple(bias.shape)}")
    for name, one in (("ids", ids), ("weights", weights), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if one is not None and one.device != x.device:
            raise KernelError(f"{name} is on {one.device}, and x is on {x.device}: move one of them")


def _reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor], gate_up_bias: Tensor | None,
    down_bias: Tensor | None, spec: str,
) -> Tensor:  # fmt: skip
    parsed = ExpertsSpec.parse(spec)
    _check(x, ids, weights, gate_up_bias, down_bias, parsed)
    first, second = backends[parsed.gate_up.backend], backends[parsed.down.backend]
    return reference.experts(
        x, ids, weights, first.restore(gate_up, parsed.gate_up), second.restore(down, parsed.down), parsed.rows,
        parsed.count, parsed.gate_up.activations, parsed.gate, gate_up_bias, down_bias,
        (first.decoded(gate_up), second.decoded(down)),
    )  # fmt: skip


_SLOTS = (
    "ids", "weights", "gate_up bias", "down bias", "gate_up 0", "gate_up 1", "gate_up 2", "down 0", "down 1", "down 2"
)  # fmt: skip


def _cuda(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor], gate_up_bias: Tensor | None,
    down_bias: Tensor | None, spec: str,
) -> Tensor:  # fmt: skip
    key = key_of(("experts", spec), (x, ids, weights, gate_up_bias, down_bias), gate_up)
    plan = PLANS.get(key)
    if plan is None:
        parsed = ExpertsSpec.parse(spec)
        if not backends[parsed.gate_up.backend].codes:
            return _reference(x, ids, weights, gate_up, down, gate_up_bias, down_bias, spec)
        _check(x, ids, weights, gate_up_bias, down_bias, parsed)
        if x.dtype not in (torch.float16, torch.bfloat16) or x.device != gate_up[0].device:
            raise KernelError(
                f"x is {dtype_name(x.dtype)} on {x.device}, and the experts take float16 or bfloat16 on "
                f"{gate_up[0].device}"
            )
        biased = gate_up_bias is not None, down_bias is not None
        plan = PLANS[key] = experts_plan(parsed, Rows.of(x), ids.shape[1], ids.dtype, biased)
    return plan.call(x, ids, weights, gate_up_bias, down_bias, *gate_up[:3], *down[:3])


def experts_plan(
    spec: ExpertsSpec, rows: Rows, top: int, ids: torch.dtype, biased: tuple[bool, bool] = (False, False)
) -> OpPlan:
    """The plan of a layer's experts for rows, ``top`` experts a token. ids: their dtype.  biased: gate_up, down."""
    plan = new_plan((rows.m, spec.gate_up.k), rows.device, *_SLOTS)
    asked = sm90_grouped_gemm.Problem(
        rows.m, top, spec.count, spec.gate_up.k, spec.down.k, spec.gate_up.weights, spec.down.weights,
        spec.gate_up.activations, rows.dtype, rows.gpu, id_words=ids.itemsize // 4, gate=Gate(spec.gate),
    )  # fmt: skip
    biases = Slot("gate_up bias") if biased[0] else None, Slot("down bias") if biased[1] else None
    reason, alone = sm90_grouped_gemm.why_not(asked), asked.activations.quantized
    if alone and reason is not None:
        raise KernelError(f"experts of {rows.m} tokens: {reason}")
    if alone or (reason is None and sm90_grouped_gemm.pays(asked, sm90_experts_gemv.MOST_TOKENS)):
        if not rows.aligned:
            rows = replace(rows, at=Slot("x"), stride=rows.k, aligned=True, copied=True)
        operands = sm90_grouped_gemm.Operands(
            rows.at, rows.stride, Slot("ids"), Slot("weights"), _weight("gate_up"), _weight("down"), Slot("y"),
            plan.room(sm90_grouped_gemm.scratch(asked)), *biases,
        )  # fmt: skip
        plan.launches += sm90_grouped_gemm.launches(asked, operands)
        padded = spec.rows
    else:
        _few_at_a_time(plan, spec, rows, top, ids, biases)
        padded = 0, 0

    def prepare(x: Tensor, more: tuple[Tensor | None, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        chosen, weights, gate_up_bias, down_bias, *others = more
        assert chosen is not None and weights is not None
        found = [dense_bias(bias, rows.dtype) for bias in (gate_up_bias, down_bias)]
        found = [
            bias if bias is None or n <= bias.shape[1] else pad(bias, (0, n - bias.shape[1]))
            for bias, n in zip(found, padded, strict=True)
        ]
        x = copy_of(x) if rows.copied else x
        return x, (chosen.contiguous(), weights.float().contiguous(), *found, *others)

    plan.prepare = prepare
    return plan


def _few_at_a_time(
    plan: OpPlan, spec: ExpertsSpec, rows: Rows, top: int, ids: torch.dtype, biases: tuple[Slot | None, Slot | None]
) -> None:
    """Add gate_up and down of each few tokens."""
    hidden, inner = spec.gate_up.k, spec.down.k
    most = min(rows.m, sm90_experts_gemv.MOST_TOKENS)
    stride = round_up(inner, 8)
    h = plan.room(2 * most * top * stride)
    for first in range(0, rows.m, most):
        behind = partial(_behind, first)
        asked = Problem(
            min(most, rows.m - first), top, spec.count, 2 * inner, hidden, spec.gate_up.weights, False,
            Gate(spec.gate), rows.dtype, rows.gpu, rows.aligned,
        )  # fmt: skip
        chosen = behind("ids", top * ids.itemsize), ids.itemsize // 4
        plan.launches.append(
            sm90_experts_gemv.launch(
                asked, sm90_experts_gemv.default(asked), _weight("gate_up"), behind("x", 2 * rows.stride), rows.stride,
                h, stride, *chosen, bias=biases[0],
            )
        )  # fmt: skip
        asked = replace(asked, n=hidden, k=inner, weights=spec.down.weights, down=True, aligned=True)
        plan.launches.append(
            sm90_experts_gemv.launch(
                asked, sm90_experts_gemv.default(asked), _weight("down"), h, stride, behind("y", 2 * hidden), hidden,
                *chosen, routing=behind("weights", 4 * top), bias=biases[1],
            )
        )  # fmt: skip


def _behind(first: int, name: str, size: int) -> Slot:
    """Where row ``first`` of a tensor begins, whose rows have ``size`` bytes."""
    return Slot(name, first * size)


def _weight(name: str) -> tuple[Slot, Slot, Slot]:
    return Slot(f"{name} 0"), Slot(f"{name} 1"), Slot(f"{name} 2")


_library = torch.library.Library("anybit", "FRAGMENT")
define(
    _library,
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor[] gate_up, Tensor[] down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str spec) -> Tensor",
    lambda x, ids, weights, gate_up, down, gate_up_bias, down_bias, spec: x.new_empty(x.shape),
    _reference,
    _cuda,
)
under_autocast(_library, "experts")
