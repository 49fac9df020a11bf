"""Tiles of 2:4 sparse weights: kept codes and metadata, in the order of sparse MMA fragments.

Tiles, units, scales and zeros are those of packed_layout.py, except for the first bytes of a unit (16 rows by 128
columns, 64 per row kept): b words of codes per lane, then two planes of 32 metadata words. Lane 4g + t of a warp has

    order "a16"   16 registers j = 4s + 2u + h of two 16-bit fields e: row g + 8h, kept column 16s + 8u + 2t + e
    order "a8"    8 registers j = 4s + 2u + h of four 8-bit fields e: row g + 8h, kept column 32s + 16u + 4t + e

The same byte of all b words holds eight registers' codes: in "a16" low bytes of fields are u = 0, high ones u = 1, so
that 8-bit products find the codes of four kept columns in two lanes' bytes. Metadata is a nibble per four columns, with
the index of the first kept one in its low bits: the words of plane p are, by lane (g, t),

    order "a16"   row g in the low half, row g + 8 in the high one; fours 8(2p + t / 2) + 4(t % 2) to + 3
    order "a8"    row g + 8(t % 2); fours 16p + 8(t / 2) to + 7
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from anybit.codes.packing import QuantizedWeight, pack_words, unpack_words
from anybit.errors import LayerError
from anybit.kernels.packed.lane_words import Piece, arrange, pack, restore, stream, unpack

ORDERED = "no kernel runs 2:4 sparse weights in an activation order: quantize with natural order"
"""2:4 metadata indexes four neighbouring columns, which an activation order would separate."""
DENSE_ALONE = "it takes dense weights, and these are 2:4 sparse: sm90_packed_gemv and the packed gemms take them"
"""The reason of kernels without sparse MMA."""
METADATA_BYTES = 256
"""Per unit."""
SECTOR = 32
"""Bytes of a memory sector: units are multiples of it."""
_PADDING = 0b0100
"""The nibble of padding: indices 0 and 1."""
_REGISTERS = 8


def code_bytes(bits: int) -> int:
    """Bytes of a unit's kept codes."""
    return 128 * bits


def unit_bytes(bits: int) -> int:
    """Bytes of a unit's kept codes and metadata."""
    return code_bytes(bits) + METADATA_BYTES


def pieces(bits: int, register: int) -> tuple[Piece, ...]:
    """Where a register's codes are in a lane's words. register: 2 * step + row half in order "a16", j in order "a8"."""
    return stream(bits, 8, bits, register)


def place(units: Tensor, weight: QuantizedWeight, order: str, rows: int) -> None:
    """Fill codes and metadata of units, uint8 [K'/128, N'/64, 4, unit bytes], ``rows`` rows at a time.

    Raises LayerError for indices that are not two of four in order.
    """
    (n, k), bits = weight.shape, weight.format.bits
    padded_n, padded_k = units.shape[1] * 64, units.shape[0] * 128
    assert weight.indices is not None
    for start in range(0, padded_n, rows):
        stop = min(start + rows, padded_n)
        mine = slice(start, min(stop, n))
        pad = (0, (padded_k - k) // 2, 0, stop - start - (mine.stop - mine.start))
        codes = padded(unpack_words(weight.words[mine], bits, k // 2), pad)
        places = unpack_words(weight.indices[mine], 2, k // 2).view(-1, k // 4, 2)
        if bool((places[..., 0] >= places[..., 1]).any()):  # what sparse products make of such is undefined
            raise LayerError("indices of a 2:4 sparse layer must name two of four inputs each, the lower one first")
        nibbles = places[..., 0] | places[..., 1] << 2
        pad = (0, (padded_k - k) // 4, *pad[2:])
        nibbles = padded(nibbles, pad, value=_PADDING)
        part, at = slice(start // 64, stop // 64), code_bytes(bits)
        lanes = len(units), (stop - start) // 64, 4, 32, 4
        fields = arrange(codes, *_kept_axes(stop - start, padded_k // 2, order)).reshape(_REGISTERS, *lanes)
        units[:, part, :, :at] = pack(fields, bits, partial(pieces, bits))
        low, high = arrange(nibbles, *_metadata_axes(stop - start, padded_k // 4, order)).unbind(-1)
        units[:, part, :, at : at + METADATA_BYTES] = (low | high << 4).reshape(*lanes[:3], METADATA_BYTES)


def _kept_axes(n: int, kept: int, order: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of kept codes [N', K'/2], and their order as [register, K'/128, N'/64, unit, lane, byte]."""
    if order == "a16":  # tile, unit, h, g, block, s, u, t, e
        return (n // 64, 4, 2, 8, kept // 64, 4, 2, 4, 2), (5, 2, 4, 0, 1, 3, 7, 8, 6)
    return (n // 64, 4, 2, 8, kept // 64, 2, 2, 4, 4), (5, 6, 2, 4, 0, 1, 3, 7, 8)


def _metadata_axes(n: int, fours: int, order: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of nibbles [N', K'/4], and their order in units, of each byte the low one first."""
    if order == "a16":  # tile, unit, h, g, block, plane and step and u, byte, low and high
        return (n // 64, 4, 2, 8, fours // 32, 2, 2, 2, 2, 2), (4, 0, 1, 5, 3, 6, 7, 2, 8, 9)
    # tile, unit, h, g, block, plane, t / 2, byte, low and high
    return (n // 64, 4, 2, 8, fours // 32, 2, 2, 4, 2), (4, 0, 1, 5, 3, 6, 2, 7, 8)


def read(units: Tensor, bits: int, order: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Kept codes and their indices, uint8 [N, K/2] each: the inverse of ``place``."""
    blocks, tiles = units.shape[:2]
    padded_n, padded_k, at = 64 * tiles, 128 * blocks, code_bytes(bits)
    codes = unpack(units[..., :at], bits, 4, _REGISTERS, partial(pieces, bits))
    codes = restore(codes, *_kept_axes(padded_n, padded_k // 2, order)).reshape(padded_n, -1)
    raw = units[..., at : at + METADATA_BYTES]
    both = torch.stack((raw & 15, raw >> 4), dim=-1)
    nibbles = restore(both, *_metadata_axes(padded_n, padded_k // 4, order)).reshape(padded_n, -1)[:n, : k // 4]
    places = torch.stack((nibbles & 3, nibbles >> 2), dim=-1).reshape(n, k // 2)
    return codes[:n, : k // 2].contiguous(), places


def words_of(tiles: Tensor, bits: int, order: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """``words`` and ``indices`` of a layer [n, k] in tiles, exactly as its QuantizedWeight had them."""
    codes, places = read(tiles.view(*tiles.shape[:2], 4, -1), bits, order, n, k)
    return pack_words(codes, bits), pack_words(places, 2)
