"""The DPR model: Decomposition, Partial products, Reconstruction (ADAngel, section 4.2).

A product of p-bit and q-bit integers is exact when both operands are cut into parts of fewer bits, every pair of
parts is multiplied on whatever the tensor cores offer, and the partial products are summed with their shifts:

    Y = X W = sum over s, t of (X_s W_t) * 2^(shift(s) + shift(t))                                   (equation 7)

anybit applies it to unsigned codes alone; zeros of every code come back as rank-1 terms (``anybit.reference``), so one
algebra serves signed, asymmetric and bipolar operands. A strategy is a value, a ``Plan``, not a class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.scheme import CODES, ActivationFormat, WeightFormat

Strategy = Literal["bitwise", "split", "padding", "dequantize", "sparse"]
Number = Literal["b1", "u4", "u8", "e4m3", "f16"]

STRATEGIES: tuple[Strategy, ...] = ("bitwise", "split", "padding", "dequantize", "sparse")
_BITS: dict[Number, int] = {"b1": 1, "u4": 4, "u8": 8, "e4m3": 8, "f16": 16}

# What each architecture's tensor cores multiply at full rate: read from the SASS of CUDA 13.0, on sm_90a measured.
# Absent is emulated by the compiler on the integer units, or does not exist: b1 XOR and u4 on sm_90, b1 and u4 later.
TENSOR_CORES: dict[str, tuple[Number, ...]] = {
    "sm_80": ("b1", "u4", "u8", "f16"),
    "sm_86": ("b1", "u4", "u8", "f16"),
    "sm_89": ("b1", "u4", "u8", "e4m3", "f16"),
    "sm_90a": ("b1", "u8", "e4m3", "f16"),
    "sm_100a": ("u8", "e4m3", "f16"),
    "sm_103a": ("u8", "e4m3", "f16"),
    "sm_120a": ("u8", "e4m3", "f16"),
}
_EMULATED = {
    "b1": "1-bit products are emulated on the integer units of {arch}",
    "u4": "4-bit integer products are emulated on the integer units of {arch}",
    "e4m3": "8-bit float products do not exist on {arch}",
}


@dataclass(frozen=True, slots=True)
class Partition:
    """A bit-partitioning schema P = (q_1, ..., q_m), least significant part first (equation 2)."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or any(width < 1 for width in self.widths):
            raise KernelError(f"a partition has parts of at least one bit, not {self.widths}")

    @property
    def bits(self) -> int:
        """The width of the operand."""
        return sum(self.widths)

    @property
    def shifts(self) -> tuple[int, ...]:
        """shift(i): how far left part i stands in the operand (equation 3)."""
        return tuple(sum(self.widths[:i]) for i in range(len(self.widths)))

    def split(self, codes: Tensor) -> list[Tensor]:
        """The parts of unsigned codes, each int64 and below 2^width."""
        wide = codes.to(torch.int64)
        return [(wide >> shift) & (2**width - 1) for width, shift in zip(self.widths, self.shifts, strict=True)]


def partitions(bits: int) -> Iterator[Partition]:
    """Every partition of an operand of ``bits`` bits: 2^(bits-1) of them."""
    for cuts in range(2 ** (bits - 1)):
        widths, width = [], 1
        for i in range(bits - 1):
            if cuts >> i & 1:
                widths.append(width)
                width = 1
            else:
                width += 1
        yield Partition((*widths, width))


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is carried out.

    weight_parts, activation_parts: the partitions.  number: the type that tensor cores multiply.
    The partial product (i, j) of weight part i and activation part j is added with its shift (``terms``).
    """

    strategy: Strategy
    weight_parts: Partition
    activation_parts: Partition
    number: Number

    @property
    def terms(self) -> tuple[tuple[int, int, int], ...]:
        """(weight part, activation part, shift) of every partial product."""
        return tuple(
            (i, j, w + x)
            for i, w in enumerate(self.weight_parts.shifts)
            for j, x in enumerate(self.activation_parts.shifts)
        )

    def __str__(self) -> str:
        w, x = self.weight_parts.widths, self.activation_parts.widths
        return f"{self.strategy}: weights {w} x activations {x} on {self.number}"


def promote(weight_parts: Partition, activation_parts: Partition, arch: str) -> Number:
    """The hardware-aware promotion principle (equation 5): the narrowest native integer that holds the widest part.

    Raises KernelError where an architecture has none.
    """
    widest = max(weight_parts.widths + activation_parts.widths)
    integers = [number for number in _native(arch) if number in ("b1", "u4", "u8") and _BITS[number] >= widest]
    if not integers:
        raise KernelError(f"{arch} multiplies no integers of {widest} bits; cut the operands into parts of at most 8")
    return min(integers, key=_BITS.__getitem__)


def plan(weights: WeightFormat, activations: ActivationFormat, arch: str, strategy: Strategy) -> Plan:
    """The plan of a strategy for a pair of formats on an architecture.

    bitwise: all parts of one bit (latency).  split: both operands in parts of at most four bits (balance).
    padding: whole operands, widened to the narrowest type that holds both (throughput).
    dequantize: weights become 16-bit floats. sparse: as padding or dequantize, with two of every four weights.
    Raises KernelError, in a sentence, where the strategy does not apply.
    """
    refusal = why_not(weights, activations, arch, strategy)
    if refusal is not None:
        raise KernelError(refusal)
    w, x = weights.bits, activations.bits
    if strategy == "dequantize" or (strategy == "sparse" and not activations.quantized):
        return Plan(strategy, Partition((w,)), Partition((16,)), "f16")
    if strategy == "bitwise":
        return Plan(strategy, Partition((1,) * w), Partition((1,) * x), "b1")
    if strategy == "split":
        return Plan(strategy, _nibbles(w), _nibbles(x), "u4")
    whole_w, whole_x = Partition((w,)), Partition((x,))
    if not activations.integer:
        return Plan(strategy, whole_w, whole_x, "e4m3")
    return Plan(strategy, whole_w, whole_x, promote(whole_w, whole_x, arch))


def plans(weights: WeightFormat, activations: ActivationFormat, arch: str) -> list[Plan]:
    """Every plan that applies to a pair of formats on an architecture."""
    return [plan(weights, activations, arch, s) for s in STRATEGIES if why_not(weights, activations, arch, s) is None]


def why_not(weights: WeightFormat, activations: ActivationFormat, arch: str, strategy: Strategy) -> str | None:
    """Why a strategy does not apply to a pair of formats on an architecture, in a sentence, or None if it does."""
    native = _native(arch)
    if strategy not in STRATEGIES:
        return f"strategy {strategy!r} is unknown; there are {', '.join(STRATEGIES)}"
    if weights.sparse != (strategy == "sparse"):
        return "the weights are 2:4 sparse" if weights.sparse else "the weights are not 2:4 sparse"
    if strategy == "dequantize":
        return f"activations are quantized to {activations.bits} bits" if activations.quantized else None
    if weights.code not in CODES:
        return f"{weights.code} codes are no integers, so weights have to become 16-bit floats (dequantize)"
    if strategy == "sparse":
        absent = activations.quantized and not activations.integer and "e4m3" not in native
        return _EMULATED["e4m3"].format(arch=arch) if absent else None
    if not activations.quantized:
        return f"{strategy} multiplies integers, and the activations are 16-bit floats"
    if strategy in ("bitwise", "split") and not activations.integer:
        return f"{strategy} multiplies integers, and the activations are 8-bit floats"
    needed: Number = {"bitwise": "b1", "split": "u4"}.get(strategy, "u8" if activations.integer else "e4m3")  # type: ignore[assignment]
    if needed not in native:
        return _EMULATED[needed].format(arch=arch) + f", which makes {strategy} useless there"
    if strategy == "split" and max(weights.bits, activations.bits) <= 4:
        return "both operands fit four bits, so there is nothing to split: padding runs them on 4-bit tensor cores"
    return None


def execute(plan: Plan, activations: Tensor, weights: Tensor) -> Tensor:
    """Carry a plan out in exact integers: codes X [M, K] and W [N, K] -> Y = X W^T, int64 [M, N].

    Every part is checked against the number it is promoted to, so a plan that could not run on hardware fails here.
    Raises KernelError for that, and for a plan that is not an integer product.
    """
    if plan.number in ("e4m3", "f16"):
        raise KernelError(f"a plan on {plan.number} is not an integer product, so it has no exact executor")
    limit = 2 ** _BITS[plan.number]
    w_parts, x_parts = plan.weight_parts.split(weights), plan.activation_parts.split(activations)
    for part in (*w_parts, *x_parts):
        if part.numel() and int(part.max()) >= limit:
            raise KernelError(f"a part holds {int(part.max())}, which {plan.number} cannot")
    total = torch.zeros(activations.shape[0], weights.shape[0], dtype=torch.int64)
    for i, j, shift in plan.terms:
        # Products of parts stay below 2^16 and K below 2^32, so float64 holds every partial sum exactly.
        partial = x_parts[j].double() @ w_parts[i].double().T
        total += partial.to(torch.int64) << shift
    return total


def _native(arch: str) -> tuple[Number, ...]:
    if arch not in TENSOR_CORES:
        raise KernelError(f"architecture {arch!r} is not known; anybit knows {', '.join(TENSOR_CORES)}")
    return TENSOR_CORES[arch]


def _nibbles(bits: int) -> Partition:
    return Partition((4,) * (bits // 4) + ((bits % 4,) if bits % 4 else ()))
