"""The weights that the following kernels read, brought into L2 by the kernel before them. Host side of upcoming.cuh.

Memory stands idle from the last weights of one product to the first of the next, and in a model all small kernels long.
What comes next is known: so a launch may name it, and its blocks ask L2 for its first bytes while they finish.
"""

from dataclasses import dataclass

from torch import Tensor

PIECE = 4096
"""Bytes that a block asks for at a time."""


@dataclass(frozen=True)
class Upcoming:
    """A range of weights to bring into L2: contiguous, on 16 bytes, alive and unchanged when the launch runs.

    most: bytes to ask for. parts: of so many equal parts of the tensor the first bytes, a power of two. moment: when
    a kernel that has a choice asks; see each.
    """

    tensor: Tensor
    most: int
    parts: int = 1
    moment: int = 0
    piece: int = PIECE


def arguments(upcoming: Upcoming | None) -> tuple[Tensor | None, int, int, int, int, int, int]:
    """The last fields of Params: next, next_piece, next_count, next_parts, next_stride, next_moment, next_pace."""
    if upcoming is None:
        return None, 0, 0, 0, 0, 0, 0
    whole = upcoming.tensor.numel() * upcoming.tensor.element_size()
    stride = whole // upcoming.parts // 16 * 16
    pieces = min(stride, upcoming.most // upcoming.parts) // upcoming.piece
    shift = upcoming.parts.bit_length() - 1
    return upcoming.tensor, upcoming.piece, pieces << shift, shift, stride, upcoming.moment, 0
