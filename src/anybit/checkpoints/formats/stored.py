"""What every reader of another tool's layers shares: one layer's tensors, and groups as anybit has them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.checkpoints.safetensors import Entry
from anybit.errors import CheckpointError
from anybit.scheme import GROUPS


class Source(Protocol):
    """Where tensors are read from: a model folder."""

    entries: dict[str, Entry]

    def read(self, name: str) -> Tensor:
        """One tensor by its name."""


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one layer as another tool has stored them, read when they are asked for.

    name: of the module.  config: the model's quantization_config.
    """

    source: Source
    name: str
    config: dict[str, Any]

    def __contains__(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.source.entries

    def __getitem__(self, suffix: str) -> Tensor:
        return self.source.read(f"{self.name}.{suffix}")

    def entry(self, suffix: str) -> Entry:
        """Shape and dtype of a tensor, from the file's header. Raises CheckpointError where there is none."""
        found = self.source.entries.get(f"{self.name}.{suffix}")
        if found is None:
            raise CheckpointError(f"layer {self.name} has no tensor {suffix}, which its format needs")
        return found

    def shape(self, suffix: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        return tuple(self.entry(suffix).shape)

    def refuse(self, why: str) -> CheckpointError:
        """The error that says what of the layer cannot be read."""
        return CheckpointError(f"layer {self.name} cannot be read: {why}")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of inputs as a file has them, and as anybit does.

    group: anybit's, None for whole rows.  count: how many a row has.  repeat: how many of them share a stored scale.
    """

    layer: StoredLayer
    group: int | None
    count: int
    repeat: int

    @classmethod
    def of(cls, layer: StoredLayer, size: int | None, k: int) -> "Groups":
        """Groups of ``size`` inputs (None or -1: whole rows) of a layer with k inputs.

        Sizes that anybit does not have are cut into smaller groups with the same scale, which changes no weight.
        Raises CheckpointError for a size that does not divide so.
        """
        if size in GROUPS:
            return cls(layer, size, -(-k // size), 1)
        if size is None or size < 1 or size >= k:
            return cls(layer, None, 1, 1)
        fitting = [group for group in GROUPS if size % group == 0]
        if not fitting:
            raise layer.refuse(f"groups of {size} inputs; anybit's have {', '.join(map(str, GROUPS))} or a multiple")
        group = max(fitting)
        return cls(layer, group, -(-k // group), size // group)

    def spread(self, values: Tensor) -> Tensor:
        """Scales, zeros or minima [N, stored groups] -> [N, count], contiguous. Raises CheckpointError for others."""
        stored = -(-self.count // self.repeat)
        if values.shape[1] != stored:
            raise self.layer.refuse(f"its scales or zeros are of {values.shape[1]} groups a row, and it has {stored}")
        if self.repeat > 1:
            values = values.repeat_interleave(self.repeat, dim=1)
        return values[:, : self.count].contiguous()

    def order(self, index: Tensor) -> Tensor | None:
        """A file's group of each input, int32 [K], or None where the inputs are in the order of their groups.

        Raises CheckpointError for a group that is not there, and where anybit's groups are smaller than the file's.
        """
        if self.group is None or torch.equal(index.int(), _in_runs(index, self.group * self.repeat)):
            return None
        least, most, stored = int(index.min()), int(index.max()), -(-self.count // self.repeat)
        if least < 0 or most >= stored:
            raise self.layer.refuse(
                f"its activation order names groups {least} to {most}, and it has 0 to {stored - 1}"
            )
        if self.repeat > 1:
            size = self.group * self.repeat
            raise self.layer.refuse(f"an activation order over groups of {size} inputs, which anybit does not have")
        return index.to(torch.int32)


def group_size(layer: StoredLayer, said: object, stored: int, k: int) -> int | None:
    """The size of ``stored`` groups of k inputs: what the configuration says if it fits, since the last may be shorter.

    None: whole rows. Raises CheckpointError where no size fits.
    """
    if isinstance(said, int) and said > 0 and -(-k // said) == stored:
        return said
    if stored == 1:
        return None
    if stored == 0 or k % stored:
        raise layer.refuse(f"{k} inputs in {stored} groups, which fit no group size")
    return k // stored


def ordered(layer: StoredLayer) -> bool:
    """Whether the layer's inputs are in another order than its groups (GPTQ's activation order)."""
    indices = (layer[suffix] for suffix in ("g_idx", "weight_g_idx") if suffix in layer)
    return any(not unset(index) and not torch.equal(index.int(), _in_runs(index)) for index in indices)


def unset(index: Tensor) -> bool:
    """Whether compressed-tensors has made room for an order, and never filled it."""
    return bool((index == -1).any())


def _in_runs(index: Tensor, size: int | None = None) -> Tensor:
    """The groups of as many inputs where each has ``size`` of them, side by side; None: as many as the first has."""
    size = size or max(1, int((index == 0).sum()))
    return torch.arange(index.numel(), dtype=torch.int32) // size


def finite(layer: StoredLayer, name: str, values: Tensor) -> Tensor:
    """The values, all of which are finite; CheckpointError where one is not."""
    if not bool(torch.isfinite(values).all()):
        raise layer.refuse(f"its {name} hold values that are not finite")
    return values


def nibbles(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., K/2], the first of two codes in the low half -> codes uint8 [..., K]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """E8M0 scales, their bytes (255 is NaN) -> float32."""
    exponents = exponents.view(torch.uint8)
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return torch.where(exponents == 255, torch.nan, powers)
