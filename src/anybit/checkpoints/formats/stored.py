"""Shared by all readers of other tools' layers: access to a layer's tensors, and conversion of groups to anybit's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.checkpoints.safetensors import Entry
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError
from anybit.scheme import GROUPS, Scheme


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one layer as another tool stored them, read on access.

    entries, read: the headers of the model's tensors, and what reads one, by name.
    name: of the module.  config: the model's quantization_config.
    """

    entries: Mapping[str, Entry]
    read: Callable[[str], Tensor]
    name: str
    config: Mapping[str, object]

    def __contains__(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.entries

    def __getitem__(self, suffix: str) -> Tensor:
        return self.read(f"{self.name}.{suffix}")

    def entry(self, suffix: str) -> Entry:
        """Shape and dtype of a tensor, from the file's header. Raises CheckpointError if there is none."""
        found = self.entries.get(f"{self.name}.{suffix}")
        if found is None:
            raise CheckpointError(f"layer {self.name} has no tensor {suffix}, which its format needs")
        return found

    def shape(self, suffix: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        return self.entry(suffix).shape

    def refuse(self, why: str) -> CheckpointError:
        """The error for a layer that cannot be read."""
        return CheckpointError(f"layer {self.name} cannot be read: {why}")


Opened = tuple[Scheme, Callable[[], QuantizedWeight]]
"""A layer's scheme, found without reading its codes, and what reads it, with its codes unchanged."""


@dataclass(frozen=True)
class Format:
    """How one tool stores its layers.

    name: for users.  marks: tensor names that mark a module as a quantized layer.  tensors: all that the format may
    store for a layer, except its bias.  matches: whether a quantization_config describes this format.
    open: of a layer. It and what it returns raise CheckpointError, naming the layer, if it cannot be read.
    """

    name: str
    marks: tuple[str, ...]
    tensors: tuple[str, ...]
    matches: Callable[[Mapping[str, object]], bool]
    open: Callable[[StoredLayer], Opened]


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a layer: anybit's, and how they map to the file's.

    group: anybit's group size, None for whole rows.  count: groups per row.  repeat: groups per stored scale.
    """

    layer: StoredLayer
    group: int | None
    count: int
    repeat: int

    @classmethod
    def of(cls, layer: StoredLayer, size: object, k: int) -> "Groups":
        """Groups of ``size`` inputs (None or -1: whole rows) of a layer with k inputs.

        Unsupported sizes are split into smaller groups with the same scale, which changes no weight.
        Raises CheckpointError for a size that cannot be split.
        """
        if size is None or (isinstance(size, int) and size not in GROUPS and not 0 < size < k):
            return cls(layer, None, 1, 1)
        fitting = [group for group in GROUPS if isinstance(size, int) and size % group == 0]
        if not isinstance(size, int) or not fitting:
            raise layer.refuse(f"groups of {size!r:.80} inputs; there are {', '.join(map(str, GROUPS))} or a multiple")
        group = max(fitting)
        return cls(layer, group, -(-k // group), size // group)

    @classmethod
    def fitting(cls, layer: StoredLayer, stored: int, k: int, said: object = None) -> "Groups":
        """``stored`` groups of k inputs: of ``said`` inputs if that fits (the last may be partial), else of equal size.

        Raises CheckpointError if no size fits.
        """
        if isinstance(said, int) and said > 0 and -(-k // said) == stored:
            return cls.of(layer, said, k)
        if stored == 0 or k % stored:
            raise layer.refuse(f"{k} inputs in {stored} groups, which fit no group size")
        return cls.of(layer, None if stored == 1 else k // stored, k)

    @property
    def stored(self) -> int:
        """Groups per row in the file."""
        return -(-self.count // self.repeat)

    def spread(self, values: Tensor) -> Tensor:
        """Scales, zeros or minima [N, stored groups] -> [N, count], contiguous. Raises CheckpointError for others."""
        if values.shape[1] != self.stored:
            raise self.layer.refuse(
                f"its scales or zeros have {values.shape[1]} groups per row, and it has {self.stored}"
            )
        return values.repeat_interleave(self.repeat, dim=1)[:, : self.count].contiguous()

    def order(self, index: Tensor) -> Tensor | None:
        """The file's group index of each input, int32 [K], or None if inputs are in group order.

        Raises CheckpointError for a group index out of range, and for an activation order over groups that were split.
        """
        if self.group is None or torch.equal(index.int(), _in_runs(index, self.group * self.repeat)):
            return None
        least, most = int(index.min()), int(index.max())
        if least < 0 or most >= self.stored:
            raise self.layer.refuse(
                f"its activation order names groups {least} to {most}, and it has 0 to {self.stored - 1}"
            )
        if self.repeat > 1:
            size = self.group * self.repeat
            raise self.layer.refuse(f"an activation order over groups of {size} inputs, which anybit does not support")
        return index.to(torch.int32)


def ordered(layer: StoredLayer) -> bool:
    """Whether the layer has an activation order (GPTQ's act-order)."""
    indices = (layer[suffix] for suffix in ("g_idx", "weight_g_idx") if suffix in layer)
    return any(not unset(index) and not torch.equal(index.int(), _in_runs(index)) for index in indices)


def unset(index: Tensor) -> bool:
    """Whether compressed-tensors allocated an activation order (filled with -1) but never set it."""
    return bool((index == -1).any())


def _in_runs(index: Tensor, size: int | None = None) -> Tensor:
    """The index of contiguous groups of ``size`` inputs, of index's length; None: the size of its first group."""
    size = size or max(1, int((index == 0).sum()))
    return torch.arange(index.numel(), dtype=torch.int32) // size


def finite(layer: StoredLayer, name: str, values: Tensor) -> Tensor:
    """Return the values; CheckpointError unless all are finite."""
    if not bool(torch.isfinite(values).all()):
        raise layer.refuse(f"its {name} hold values that are not finite")
    return values


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """Signed codes as unsigned ones, uint8."""
    return (codes.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes uint8 [..., K/2], low nibble first, to codes uint8 [..., K]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Decode E8M0 scales, given as bytes (255 is NaN), to float32."""
    exponents = exponents.view(torch.uint8)
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return torch.where(exponents == 255, torch.nan, powers)
