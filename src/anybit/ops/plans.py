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
from anybit.jit import Plan, Slot

_MOST = 4096
"""Most plans (kinds of layers x token counts). One takes a few kilobytes."""
PLANS: dict[Hashable, "OpPlan"] = {}
forget_with_maps(PLANS.clear)
_ROOM, _ZEROS = "room", "zeros"
_PART = 256
"""Alignment of scratch memory, in bytes."""


def key_of(how: Hashable, tensors: Sequence[Tensor | None], weight: Sequence[Tensor] = ()) -> Hashable:
    """What launches depend on: ``how``, and of tensors all but values and address (except 16-byte alignment).

    weight: the tensors of a prepared weight, whose spec is in ``how``: the device, and the length of the permutation.
    """
    of_weight = (weight[0].get_device(), weight[3].shape) if weight else None
    return (
        how,
        of_weight,
        *[
            None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0)
            for x in tensors
        ],
    )


@dataclass(frozen=True)
class Rows:
    """16-bit rows [m, k], ``stride`` values apart, as a plan reads them.

    aligned: all begin on 16 bytes.  copied: they are a dense copy of x, whose own rows kernels cannot read.
    """

    at: Slot
    m: int
    k: int
    stride: int
    aligned: bool
    dtype: torch.dtype
    device: torch.device
    gpu: Device
    copied: bool = False

    @staticmethod
    def of(x: Tensor) -> "Rows":
        """A tensor [..., k] as rows: a copy if columns have gaps, or rows overlap or lie 2 GiB or more apart.

        Those are views of long prompts, and kernels use 32-bit strides.
        """
        k, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
        (m, _), (stride, step) = rows.shape, rows.stride()
        moved = rows.data_ptr() != x.data_ptr()
        copied = moved or step != 1 or (m > 1 and stride < k) or stride * x.itemsize >= 2**31
        stride, start = (k, 0) if copied else (stride, x.data_ptr())
        aligned = (start | stride * x.itemsize) % 16 == 0
        return Rows(Slot("x"), m, k, stride, aligned, x.dtype, x.device, Device.of(x), copied)

    @staticmethod
    def dense(m: int, k: int, like: "Rows", at: Slot) -> "Rows":
        """Dense rows that begin on 16 bytes, of the dtype and on the device of others."""
        return Rows(at, m, k, k, k * like.dtype.itemsize % 16 == 0, like.dtype, like.device, like.gpu)


@dataclass(eq=False)
class OpPlan(Plan):
    """An op's plan. shape: of its result.  room_bytes, zeros_bytes: scratch of a run, and scratch filled with zeros.

    ordered: x must first be brought into the tiles' order, on 16 bytes (``packed_layout.in_order``).
    prepare: lays out x and the bias as kernels read them, if they are not laid out so: it gets a call's x and the
    tensors behind it, and returns both.
    """

    shape: tuple[int, ...] = ()
    room_bytes: int = 0
    zeros_bytes: int = 0
    ordered: bool = False
    prepare: Callable[[Tensor, tuple[Tensor | None, ...]], tuple[Tensor, tuple[Tensor | None, ...]]] | None = None

    def room(self, size: int) -> Slot:
        """Scratch memory of ``size`` bytes."""
        place, self.room_bytes = self.room_bytes, self.room_bytes + -(-size // _PART) * _PART
        return Slot(_ROOM, place)

    def zeros(self, size: int) -> Slot:
        """Scratch memory that is zero before a run."""
        place, self.zeros_bytes = self.zeros_bytes, self.zeros_bytes + -(-size // _PART) * _PART
        return Slot(_ZEROS, place)

    def call(self, x: Tensor, *more: Tensor | None) -> Tensor:
        """The result, new and of the plan's shape. more: the tensors of the slots behind it; None for those that a call
        lacks.
        """
        y, like = x.new_empty(self.shape), x
        if self.prepare is not None:
            x, more = self.prepare(x, more)
        room = like.new_empty(self.room_bytes, dtype=torch.uint8) if self.room_bytes else None
        zeros = like.new_zeros(self.zeros_bytes, dtype=torch.uint8) if self.zeros_bytes else None
        self.run([0 if one is None else one.data_ptr() for one in (room, zeros, x, y, *more)])
        return y


def new_plan(shape: Sequence[int], device: torch.device, *more: str) -> OpPlan:
    """A plan without launches. Its slots are "x", "y", which has a shape, and ``more``."""
    if len(PLANS) >= _MOST:
        PLANS.clear()
    slots = (_ROOM, _ZEROS, "x", "y", *more)
    return OpPlan([], slots, -1 if device.index is None else device.index, tuple(shape))
