"""Codes in the words of a warp's 32 lanes: how the units of tiles, dense and 2:4 sparse, hold them.

A lane has registers of fields, a code each, and its words have the same fields: a code's bits stay in its field.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """``count`` bits of a code, from bit ``first`` up, at ``bit`` of every field of a word."""

    word: int
    bit: int
    first: int
    count: int


Pieces = Callable[[int], Iterable[Piece]]
"""The pieces of a register."""


def stream(bits: int, field: int, words: int, register: int) -> tuple[Piece, ...]:
    """A register's pieces: whole codes side by side in a field while they fit, the others in the bits left over."""
    whole = field // bits
    rest = field - whole * bits
    if register < words * whole:
        return (Piece(register % words, bits * (register // words), 0, bits),)
    found, first = [], 0
    while first < bits:  # low bits first
        word, offset = divmod((register - words * whole) * bits + first, rest)
        count = min(bits - first, rest - offset)
        found.append(Piece(word, bits * whole + offset, first, count))
        first += count
    return tuple(found)


def pack(fields: Tensor, words: int, pieces: Pieces) -> Tensor:
    """Codes uint8 [registers, K'/128, N'/64, unit, lane, fields] -> uint8 [K'/128, N'/64, unit, 128 * words]."""
    parts = torch.zeros(words, *fields.shape[1:], dtype=torch.int32, device=fields.device)
    for register, codes in enumerate(fields):
        for piece in pieces(register):
            parts[piece.word] |= (codes.int() >> piece.first & (1 << piece.count) - 1) << piece.bit
    lanes = parts.to(_type(fields.shape[-1])).view(torch.uint8)
    blocks, tiles = lanes.shape[1:3]
    runs = [lanes[at : at + width].permute(1, 2, 3, 4, 0, 5) for at, width in _runs(words)]
    return torch.cat([run.reshape(blocks, tiles, 4, -1) for run in runs], dim=-1)


def unpack(units: Tensor, words: int, fields: int, registers: int, pieces: Pieces) -> Tensor:
    """The inverse of ``pack``."""
    runs = [units[..., 128 * at : 128 * (at + width)].unflatten(-1, (32, width, 4)) for at, width in _runs(words)]
    lanes = torch.cat([run.permute(4, 0, 1, 2, 3, 5) for run in runs]).contiguous().view(_type(fields))
    found = torch.zeros(registers, *lanes.shape[1:], dtype=torch.uint8, device=units.device)
    for register in range(registers):
        for piece in pieces(register):
            part = lanes[piece.word] >> piece.bit & (1 << piece.count) - 1
            found[register] |= (part << piece.first).to(torch.uint8)
    return found


def _type(fields: int) -> torch.dtype:
    """Of a field of a word that has so many."""
    return torch.int16 if fields == 2 else torch.uint8


def _runs(words: int) -> list[tuple[int, int]]:
    """(first, count) of a lane's adjacent words: fours, then two, then one."""
    found, at = list[tuple[int, int]](), 0
    while at < words:
        width = 4 if words - at >= 4 else words - at & 2 or 1
        found.append((at, width))
        at += width
    return found


def arrange(values: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Values seen in a shape, its axes in an order."""
    return values.view(*shape).permute(*order)


def restore(values: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """The inverse of ``arrange``, for values of any shape."""
    return values.reshape([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])
