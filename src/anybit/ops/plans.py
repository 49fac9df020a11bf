"""Plans of ops, in one dictionary: an op's launches for a signature, to be filled in and run by each call like it.

A key holds everything that an op's launches depend on. Operands are checked when a plan is made; whatever a check looks
at is part of the key. ``anybit.choose.dispatch`` clears the dictionary when other maps are used.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.choose.dispatch import forget_with_maps
from anybit.device import Device
from anybit.jit import Kernel, Launch, Plan, Slot

_MOST = 4096
"""Most plans (kinds of layers x token counts). One takes a few kilobytes."""
_plans: dict[Hashable, "OpPlan"] = {}
forget_with_maps(_plans)
_ROOM, _ZEROS = "room", "zeros"
_PART = 256
"""Alignment of scratch memory, in bytes."""


def signature(tensor: Tensor | None) -> Hashable:
    """What a launch depends on in a tensor: everything but its values and address (except 16-byte alignment)."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % 16 == 0


def weight_signature(tensors: list[Tensor]) -> Hashable:
    """The signature of a prepared weight, besides its spec."""
    return tensors[0].get_device(), tuple([tensor.shape for tensor in tensors])


def planned(key: Hashable, make: Callable[[], "OpPlan"]) -> "OpPlan":
    """The plan of a key; ``make`` is called if there is none yet."""
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        found = _plans[key] = make()
    return found


find = _plans.get
"""The plan of a key, or None."""


@dataclass(frozen=True)
class Rows:
    """16-bit rows [m, k], ``stride`` values apart, as a plan reads them. aligned: all begin on 16 bytes."""

    at: Slot
    m: int
    k: int
    stride: int
    aligned: bool
    dtype: torch.dtype
    device: torch.device
    gpu: Device

    @staticmethod
    def of(x: Tensor, name: str = "x") -> "Rows":
        """A tensor [m, k] with adjacent columns."""
        (m, k), stride = x.shape, x.stride(0)
        aligned = x.data_ptr() % 16 == 0 and stride * x.itemsize % 16 == 0
        return Rows(Slot(name), m, k, stride, aligned, x.dtype, x.device, Device.of(x))

    @staticmethod
    def dense(m: int, k: int, like: "Rows", at: Slot) -> "Rows":
        """Dense rows that begin on 16 bytes, of the dtype and on the device of others."""
        return Rows(at, m, k, k, k * like.dtype.itemsize % 16 == 0, like.dtype, like.device, like.gpu)


@dataclass(frozen=True, eq=False)
class OpPlan:
    """An op's plan. plan: its launches.  room, zeros: bytes of scratch, and of scratch filled with zeros, per run.

    ordered: see ``Draft``.  shape: of the result.  prepare: lays out x and the bias as kernels read them, if they are
    not laid out so: (x, weight, bias) -> (rows, bias).
    """

    plan: Plan
    room: int
    zeros: int
    ordered: bool
    shape: tuple[int, ...] = ()
    prepare: Callable[[Tensor, list[Tensor], Tensor | None], tuple[Tensor, Tensor | None]] | None = None

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels to compile before the plan runs."""
        return self.plan.kernels

    def run(self, like: Tensor, *tensors: Tensor | None) -> None:
        """Run on the device of ``like``. tensors: of the plan's slots, in order; None for those that a call lacks."""
        room = like.new_empty(self.room, dtype=torch.uint8) if self.room else None
        zeros = like.new_zeros(self.zeros, dtype=torch.uint8) if self.zeros else None
        self.plan.run([0 if one is None else one.data_ptr() for one in (room, zeros, *tensors)])


class Draft:
    """A plan being made: its launches so far, and the scratch memory that they need.

    ordered: x must first be brought into the tiles' order, on 16 bytes (``packed_layout.in_order``).
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.ordered = False
        self._room = self._zeros = 0

    def room(self, size: int) -> Slot:
        """Scratch memory of ``size`` bytes."""
        place, self._room = self._room, self._room + -(-size // _PART) * _PART
        return Slot(_ROOM, place)

    def zeros(self, size: int) -> Slot:
        """Scratch memory that is zero before a run."""
        place, self._zeros = self._zeros, self._zeros + -(-size // _PART) * _PART
        return Slot(_ZEROS, place)

    def done(self, slots: Sequence[str], device: torch.device) -> OpPlan:
        """The plan. slots: the names of the tensors that ``OpPlan.run`` gets."""
        index = -1 if device.index is None else device.index
        return OpPlan(Plan(self.launches, (_ROOM, _ZEROS, *slots), index), self._room, self._zeros, self.ordered)
