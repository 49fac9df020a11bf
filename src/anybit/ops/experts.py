"""Mixtures of experts: both products of a token's experts and the sum over them, as one op, ``anybit::experts``.

All experts of a layer are two tall weights, gate_up and down, prepared as layers are, each expert on whole tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight
from anybit.errors import KernelError, dtype_name
from anybit.jit import Slot
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Config, Gate, Problem
from anybit.kernels.packed.packed_layout import TILE_ROWS, round_up
from anybit.ops import Prepared, prepare
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import copy_of, dense_bias
from anybit.ops.library import define
from anybit.ops.plans import PLANS, OpPlan, Rows, key_of, new_plan
from anybit.scheme import ActivationFormat


@dataclass(frozen=True)
class ExpertsSpec:
    """Everything static about prepared experts; the op takes it as a string. gate_up, down: of the tall weights."""

    count: int
    gate: str
    gate_up: LinearSpec
    down: LinearSpec

    def __str__(self) -> str:
        return f"{self.count}|{self.gate}|{self.gate_up}|{self.down}"

    @staticmethod
    def parse(text: str) -> "ExpertsSpec":
        """The inverse of ``str``."""
        count, gate, gate_up, down = text.split("|")
        return ExpertsSpec(int(count), gate, LinearSpec.parse(gate_up), LinearSpec.parse(down))

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of an expert's gate_up and down, padding included."""
        return self.gate_up.n // self.count, self.down.n // self.count


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """All experts of a layer in a backend's layout."""

    gate_up: Prepared
    down: Prepared
    count: int
    gate: str
    spec_text: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "spec_text", str(ExpertsSpec(self.count, self.gate, self.gate_up.spec, self.down.spec))
        )

    def restore(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        """gate_up and down, exactly as they were before ``prepare_experts``."""
        outputs = 2 * self.down.spec.k, self.gate_up.spec.k
        gate_up, down = (
            _rows(one.restore(), self.count, n) for one, n in zip((self.gate_up, self.down), outputs, strict=True)
        )
        return gate_up, down


def prepare_experts(
    gate_up: QuantizedWeight, down: QuantizedWeight, count: int, activations: ActivationFormat, gate: str = "silu",
    backend: str | None = None,
) -> PreparedExperts:  # fmt: skip
    """Convert the experts of a layer to the layout of a backend, on their device.

    gate_up: [count * 2 I, H], down: [count * H, I], expert by expert; gate and up rows of one alternate eight by eight.
    gate: of ``reference.GATES``.  backend: as ``ops.prepare`` takes it.
    Raises KernelError if the shapes do not fit each other, or no kernel runs them.
    """
    inner, hidden = down.shape[1], gate_up.shape[1]
    if gate_up.shape[0] != count * 2 * inner or down.shape[0] != count * hidden:
        raise KernelError(
            f"{count} experts of gate_up {gate_up.shape} and down {down.shape} do not fit: "
            "they are [count * 2 I, H] and [count * H, I]"
        )
    if inner % 8:
        raise KernelError(f"gate and up rows alternate eight by eight, and experts have {inner} of each")
    if gate not in reference.GATES:
        raise KernelError(f"gate {gate!r} is unknown; there are {', '.join(reference.GATES)}")
    if gate_up.device.type == "cuda" and backend in (None, "packed"):
        backend = "packed"
        if activations.quantized or gate_up.group_index is not None or down.group_index is not None:
            raise KernelError("experts run with 16-bit activations and columns in natural order")
        gate_up, down = (_padded(one, count) for one in (gate_up, down))
    return PreparedExperts(prepare(gate_up, activations, backend), prepare(down, activations, backend), count, gate)


def _padded(weight: QuantizedWeight, count: int) -> QuantizedWeight:
    """The weight with each expert's rows padded with zeros to whole tiles."""
    rows = weight.shape[0] // count
    return weight if rows % TILE_ROWS == 0 else _resized(weight, count, rows, round_up(rows, TILE_ROWS))


def _rows(weight: QuantizedWeight, count: int, rows: int) -> QuantizedWeight:
    """The weight with the first rows of each expert alone."""
    return weight if weight.shape[0] == count * rows else _resized(weight, count, weight.shape[0] // count, rows)


def _resized(weight: QuantizedWeight, count: int, rows: int, wanted: int) -> QuantizedWeight:
    def changed(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        by_expert = values.view(count, rows, -1)
        by_expert = torch.nn.functional.pad(by_expert, (0, 0, 0, wanted - rows))
        return by_expert.reshape(count * wanted, -1)

    words, scale = changed(weight.words), changed(weight.scale)
    assert words is not None and scale is not None
    return replace(
        weight, words=words, scale=scale, zero=changed(weight.zero), indices=changed(weight.indices),
        minimum=changed(weight.minimum), shape=(count * wanted, weight.shape[1]),
    )  # fmt: skip


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, prepared: PreparedExperts, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over a token's experts of weight * down(join(gate_up(x))): x [T, H] -> [T, H] in x's dtype.

    ids: int32 or int64 [T, k]; an id out of range (-1) adds nothing, one twice in a token counts twice.  weights: float
    [T, k].  gate_up_bias: [count, 2 I], rows as gate_up's.  down_bias: [count, H].  Kernels take float16 and bfloat16.
    ids are read on the device alone.  Raises KernelError, before any launch, for operands that do not fit.
    """
    y: Tensor = torch.ops.anybit.experts(
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
    first = backends[parsed.gate_up.backend].restore(gate_up, parsed.gate_up)
    second = backends[parsed.down.backend].restore(down, parsed.down)
    return reference.experts(
        x, ids, weights, first, second, parsed.rows, parsed.count, parsed.gate_up.activations, parsed.gate,
        gate_up_bias, down_bias,
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
    spec: ExpertsSpec, rows: Rows, top: int, ids: torch.dtype, biased: tuple[bool, bool] = (False, False),
    choose: Callable[[Problem], Config] = sm90_experts_gemv.default,
) -> OpPlan:  # fmt: skip
    """The plan of a layer's experts for rows, ``top`` experts a token. ids: their dtype.  biased: gate_up, down."""
    hidden, inner = spec.gate_up.k, spec.down.k
    plan = new_plan((rows.m, hidden), rows.device, *_SLOTS)
    most = min(rows.m, sm90_experts_gemv.MOST_TOKENS)
    stride = round_up(inner, 8)
    h = plan.room(2 * most * top * stride)
    for first in range(0, rows.m, most):
        tokens = min(most, rows.m - first)

        def behind(name: str, size: int, before: int = first) -> Slot:
            return Slot(name, before * size)

        asked = Problem(
            tokens, top, spec.count, 2 * inner, hidden, spec.gate_up.weights, False, Gate(spec.gate), rows.dtype,
            rows.gpu, rows.aligned,
        )  # fmt: skip
        chosen = behind("ids", top * ids.itemsize), ids.itemsize // 4
        plan.launches.append(
            sm90_experts_gemv.launch(
                asked, choose(asked), _weight("gate_up"), behind("x", 2 * rows.stride), rows.stride,
                h, stride, *chosen, bias=Slot("gate_up bias") if biased[0] else None,
            )
        )  # fmt: skip
        asked = replace(asked, n=hidden, k=inner, weights=spec.down.weights, down=True, aligned=True)
        plan.launches.append(
            sm90_experts_gemv.launch(
                asked, choose(asked), _weight("down"), h, stride, behind("y", 2 * hidden), hidden,
                *chosen, routing=behind("weights", 4 * top), bias=Slot("down bias") if biased[1] else None,
            )
        )  # fmt: skip

    def prepare(x: Tensor, more: tuple[Tensor | None, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        chosen, weights, gate_up_bias, down_bias, *others = more
        assert chosen is not None and weights is not None
        biases = dense_bias(gate_up_bias, rows.dtype), dense_bias(down_bias, rows.dtype)
        x = copy_of(x) if rows.copied else x
        return x, (chosen.contiguous(), weights.float().contiguous(), *biases, *others)

    plan.prepare = prepare
    return plan


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
