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

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from anybit.codes.packing import QuantizedWeight, pack_words, unpack_words
from anybit.errors import LayerError

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


@cache
def pieces(bits: int, register: int) -> tuple[tuple[int, int, int, int], ...]:
    """(word, bit, first, count): ``count`` bits of a code from bit ``first`` up, at ``bit`` of a byte of a word.

    register: 2 * step + row half in order "a16", j in order "a8".
    """
    whole = 8 // bits
    rest = 8 - whole * bits
    if register < bits * whole:
        return ((register % bits, bits * (register // bits), 0, bits),)
    found, first = [], 0
    while first < bits:  # the stream of left-over bits, low first
        word, offset = divmod((register - bits * whole) * bits + first, rest)
        count = min(bits - first, rest - offset)
        found.append((word, bits * whole + offset, first, count))
        first += count
    return tuple(found)


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
        units[:, part, :, :at] = _words(_by_byte(codes, order), bits)
        units[:, part, :, at : at + METADATA_BYTES] = _metadata(nibbles, order)


def _by_byte(codes: Tensor, order: str) -> Tensor:
    """Kept codes uint8 [N', K'/2] -> [register of 8, byte, K'/128, N'/64, unit, lane]."""
    n, kept = codes.shape
    blocks = kept // 64
    if order == "a16":  # tile, unit, h, g, block, s, u, t, e
        view = codes.view(n // 64, 4, 2, 8, blocks, 4, 2, 4, 2)
        return view.permute(5, 2, 8, 6, 4, 0, 1, 3, 7).reshape(_REGISTERS, 4, blocks, n // 64, 4, 32)
    view = codes.view(n // 64, 4, 2, 8, blocks, 2, 2, 4, 4)
    return view.permute(5, 6, 2, 8, 4, 0, 1, 3, 7).reshape(_REGISTERS, 4, blocks, n // 64, 4, 32)


def _from_bytes(found: Tensor, order: str) -> Tensor:
    """The inverse of ``_by_byte``."""
    blocks, tiles = found.shape[2:4]
    if order == "a16":
        view = found.view(4, 2, 2, 2, blocks, tiles, 4, 8, 4)  # s, h, e, u, block, tile, unit, g, t
        return view.permute(5, 6, 1, 7, 4, 0, 3, 8, 2).reshape(tiles * 64, blocks * 64)
    view = found.view(2, 2, 2, 4, blocks, tiles, 4, 8, 4)  # s, u, h, e, block, tile, unit, g, t
    return view.permute(5, 6, 2, 7, 4, 0, 1, 8, 3).reshape(tiles * 64, blocks * 64)


def _words(by_byte: Tensor, bits: int) -> Tensor:
    """Codes by register and byte -> the code bytes of units, uint8 [K'/128, N'/64, 4, 128 * bits]."""
    words = torch.zeros(bits, *by_byte.shape[1:], dtype=torch.uint8, device=by_byte.device)
    for register in range(_REGISTERS):
        for word, bit, first, count in pieces(bits, register):
            words[word] |= (by_byte[register] >> first & ((1 << count) - 1)) << bit
    blocks, tiles = words.shape[2:4]
    parts, at = [], 0
    for width in _widths(bits):  # a lane's words: fours, then two, then one
        part = words[at : at + width].permute(2, 3, 4, 5, 0, 1)  # block, tile, unit, lane, word, byte
        parts.append(part.reshape(blocks, tiles, 4, -1))
        at += width
    return torch.cat(parts, dim=-1)


def _widths(bits: int) -> list[int]:
    return [4] * (bits // 4) + [2] * (bits >> 1 & 1) + [1] * (bits & 1)


def _metadata(nibbles: Tensor, order: str) -> Tensor:
    """Nibbles uint8 [N', K'/4] -> uint8 [K'/128, N'/64, 4, METADATA_BYTES]."""
    n, fours = nibbles.shape
    blocks = fours // 32
    if order == "a16":  # tile, unit, h, g, block, plane and step and u, byte, low and high
        view = nibbles.view(n // 64, 4, 2, 8, blocks, 2, 2, 2, 2, 2)
        view = view.permute(4, 0, 1, 5, 3, 6, 7, 2, 8, 9)
    else:  # tile, unit, h, g, block, plane, t / 2, byte, low and high
        view = nibbles.view(n // 64, 4, 2, 8, blocks, 2, 2, 4, 2).permute(4, 0, 1, 5, 3, 6, 2, 7, 8)
    low, high = view.unbind(-1)
    return (low | high << 4).reshape(blocks, n // 64, 4, METADATA_BYTES)


def _from_metadata(raw: Tensor, order: str) -> Tensor:
    """The inverse of ``_metadata``."""
    blocks, tiles = raw.shape[:2]
    both = torch.stack((raw & 15, raw >> 4), dim=-1)
    if order == "a16":
        view = both.view(blocks, tiles, 4, 2, 8, 2, 2, 2, 2, 2)
        return view.permute(1, 2, 7, 4, 0, 3, 5, 6, 8, 9).reshape(tiles * 64, blocks * 32)
    view = both.view(blocks, tiles, 4, 2, 8, 2, 2, 4, 2)
    return view.permute(1, 2, 6, 4, 0, 3, 5, 7, 8).reshape(tiles * 64, blocks * 32)


def read(units: Tensor, bits: int, order: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Kept codes and their indices, uint8 [N, K/2] each: the inverse of ``place``."""
    blocks, tiles = units.shape[:2]
    at, words = 0, []
    for width in _widths(bits):
        part = units[..., at : at + 128 * width].reshape(blocks, tiles, 4, 32, width, 4)
        words += list(part.permute(4, 5, 0, 1, 2, 3))  # byte, block, tile, unit, lane
        at += 128 * width
    found = units.new_zeros(_REGISTERS, *words[0].shape)
    for register in range(_REGISTERS):
        for word, bit, first, count in pieces(bits, register):
            found[register] |= (words[word] >> bit & ((1 << count) - 1)) << first
    nibbles = _from_metadata(units[..., at : at + METADATA_BYTES], order)[:n, : k // 4]
    places = torch.stack((nibbles & 3, nibbles >> 2), dim=-1).reshape(n, k // 2)
    return _from_bytes(found, order)[:n, : k // 2].contiguous(), places


def words_of(tiles: Tensor, bits: int, order: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """``words`` and ``indices`` of a layer [n, k] in tiles, exactly as its QuantizedWeight had them."""
    codes, places = read(tiles.view(*tiles.shape[:2], 4, -1), bits, order, n, k)
    return pack_words(codes, bits), pack_words(places, 2)
