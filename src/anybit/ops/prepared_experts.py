"""All experts of a layer, prepared as two tall weights, gate_up and down, each expert on whole tiles."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Problem
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.packed.packed_layout import TILE_ROWS, round_up
from anybit.ops import Prepared, prepare
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.elementwise import paired_rows
from anybit.scheme import ActivationFormat, WeightFormat


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
    """All experts of a layer in a backend's layout. left: whether one of their layers no longer runs by this."""

    gate_up: Prepared
    down: Prepared
    count: int
    gate: str
    spec_text: str = field(init=False)
    left: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "spec_text", str(ExpertsSpec(self.count, self.gate, self.gate_up.spec, self.down.spec))
        )

    def restore(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        """gate_up and down, exactly as they were before ``prepare_experts``."""
        outputs = 2 * self.down.spec.k, self.gate_up.spec.k
        gate_up, down = (one.restore() for one in (self.gate_up, self.down))
        return resized(gate_up, self.count, outputs[0]), resized(down, self.count, outputs[1])


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
    kernels = gate_up.device.type == "cuda" and backend in (None, "packed")
    device, formats = Device.of(gate_up.words) if kernels else None, (gate_up.format, down.format)
    reason = why_not(count, hidden, inner, formats, activations, gate, device)
    if reason is None and kernels and not (gate_up.group_index is None and down.group_index is None):
        reason = "their inputs have an activation order"
    if reason is not None:
        raise KernelError(f"experts cannot run as one op: {reason}")
    if kernels:
        whole = [round_up(n, TILE_ROWS) for n in (2 * inner, hidden)]
        backend, gate_up, down = "packed", resized(gate_up, count, whole[0]), resized(down, count, whole[1])
    return PreparedExperts(prepare(gate_up, activations, backend), prepare(down, activations, backend), count, gate)


def why_not(
    count: int, hidden: int, inner: int, formats: tuple[WeightFormat, WeightFormat], activations: ActivationFormat,
    gate: str, device: Device | None,
) -> str | None:  # fmt: skip
    """Why the experts of a layer cannot run as one op, in a sentence; None if they can.

    formats: of gate_up and down.  device: the GPU; None for the reference.
    """
    if gate not in reference.GATES:
        return f"gate {gate!r} is unknown; there are {', '.join(reference.GATES)}"
    if inner % 8:
        return f"gate and up rows alternate eight by eight, and experts have {inner} of each"
    if device is None:
        return None
    if activations.quantized:
        sizes = 1, 1, count, hidden, inner
        return sm90_grouped_gemm.why_not(sm90_grouped_gemm.Problem(*sizes, *formats, activations, device=device))
    first = Problem(1, 1, count, 2 * inner, hidden, formats[0], False, device=device)
    second = replace(first, n=hidden, k=inner, weights=formats[1], down=True)
    return sm90_experts_gemv.why_not(first) or sm90_experts_gemv.why_not(second)


def interleaved(weight: QuantizedWeight, count: int) -> QuantizedWeight:
    """gate_up of ``count`` experts, each all gate rows before all up rows, with rows that alternate eight by eight."""
    rows = weight.shape[0] // count
    return weight.rows((paired_rows(rows // 2) + rows * torch.arange(count)[:, None]).flatten())


_FIRST_TWO = 0x44444444
"""2:4 indices that keep the first two of every four inputs."""


def resized(weight: QuantizedWeight, count: int, wanted: int) -> QuantizedWeight:
    """The weight with ``wanted`` rows of each expert: its first ones, or with rows of zeros behind its own."""
    rows = weight.shape[0] // count
    if rows == wanted:
        return weight

    def changed(values: Tensor | None, padding: int = 0) -> Tensor | None:
        if values is None:
            return None
        by_expert = pad(values.view(count, rows, -1), (0, 0, 0, wanted - rows), value=padding)
        return by_expert.reshape(count * wanted, -1)

    words, scale = changed(weight.words), changed(weight.scale)
    assert words is not None and scale is not None
    return replace(
        weight, words=words, scale=scale, zero=changed(weight.zero), minimum=changed(weight.minimum),
        indices=changed(weight.indices, _FIRST_TWO), shape=(count * wanted, weight.shape[1]),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ExpertPart(Prepared):
    """One projection of prepared experts. It shares their tensors, and ``linear`` cannot run it.

    place: 0, 1 and 2 for gate, up and down.
    """

    alone = False
    experts: PreparedExperts
    expert: int
    place: int

    @staticmethod
    def of(experts: PreparedExperts, expert: int, place: int) -> "ExpertPart":
        """A projection of an expert, by its place."""
        whole = experts.down if place == 2 else experts.gate_up
        n = experts.gate_up.spec.k if place == 2 else experts.down.spec.k
        return ExpertPart(whole.tensors, replace(whole.spec, n=n), experts, expert, place)

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertPart.of, (self.experts, self.expert, self.place)

    def leave(self) -> None:
        """Mark the experts, of which all then have their own weights again."""
        object.__setattr__(self.experts, "left", True)

    def restore(self) -> QuantizedWeight:
        """The packed weight, exactly as it was before all were prepared."""
        whole, n = (self.experts.down, self.spec.n) if self.place == 2 else (self.experts.gate_up, 2 * self.spec.n)
        first = whole.spec.n // self.experts.count * self.expert
        found = backends[whole.spec.backend].restore_rows(whole.tensors, whole.spec, slice(first, first + n))
        if self.place == 2:
            return found
        return found.rows(paired_rows(self.spec.n).argsort().view(2, -1)[self.place])
