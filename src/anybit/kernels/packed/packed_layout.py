"""Tiles of packed weights: the prepared layout of all kernels that dequantize weights of 1 to 8 bits.

A tile is 64 rows by 128 columns: four units of 16 rows, each with its codes in the fragment order of the A operand of
mma (or wgmma), then its scales, then its zeros or minima. Units of a block of 128 columns are contiguous, so any range
of rows is one bulk copy. See docs/design/packed.md; ``packed_layout.cuh`` is the device's version of this placement.

Placement of codes. Lane 4g + t of a warp owns rows g and g + 8 of a unit, in registers j of 2 or 4 fields:

    order "a16"   32 registers j = 4s + r of two 16-bit fields h: row g + 8(r & 1), column 16s + 8(r >> 1) + 2t + h
    order "a8"    16 registers j = 4S + R of four 8-bit fields e: row g + 8(R & 1), column 32S + 16(R >> 1) + 4t + e

and 2 * bits words of 32 bits. ``pieces`` maps a register's fields to bits of these words.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import torch
from torch import Tensor

from anybit.errors import KernelError, dtype_name
from anybit.kernels.block.quantize_activations import pitch, rows_aligned
from anybit.kernels.packed import sparse_layout
from anybit.kernels.packed.lane_words import Piece, stream
from anybit.scheme import CODES, WeightFormat

Order = Literal["a16", "a8"]
_P = TypeVar("_P")  # a kernel's Problem
_C = TypeVar("_C")  # and its Config

UNIT_ROWS, TILE_ROWS, TILE_COLUMNS = 16, 64, 128


@cache
def pieces(bits: int, order: Order, register: int) -> tuple[Piece, ...]:
    """Where a register's codes are in a lane's words; several pieces only for left-over bits of widths 3, 5, 6, 7."""
    if bits in (1, 2, 4, 8):
        if order == "a16":
            step, r = divmod(register, 4)
            wide, odd, row, high = step >> 1, step & 1, r & 1, r >> 1
        else:
            wide, part = divmod(register, 4)
            row, odd, high = part & 1, part >> 1, 0
        word, place = {
            8: (4 * wide + 2 * odd + row, 0),
            4: (4 * (wide >> 1) + 2 * odd + row, wide & 1),
            2: (2 * odd + row, wide),
            1: (row, wide + 4 * odd),
        }[bits]
        return (Piece(word, 8 * high + bits * place, 0, bits),)
    return stream(bits, 16 if order == "a16" else 8, 2 * bits, register)


_MOVES = ((11, 14, 9), (7, 12, 9), (15, 11, 18), (14, 10, 11), (12, 8, 9), (13, 15, 15), (10, 9, 13), (8, 13, 10))


def float_order(codes: Tensor) -> Tensor:
    """Permute words of eight e2m1 codes, int32, so that four shifts and four ANDs convert them to float16.

    As float16, a code's sign goes to bit 15 and its exponent and mantissa to bits 9 to 11: its value times 2^-14, also
    for subnormals. With w the word returned here, the codes at bits 0, 4, 8 and 12 of the halves of ``codes`` are
    w << 6, w << 9, w ^ (w >> 3) and w ^ (w << 2), each masked. No four shifts alone bring sixteen bits to these places,
    so some bits are used twice, and others are stored XORed: each move is (bit of w, bit of the code, bit of w that it
    is XORed with).
    """
    word = (codes & 0x00070007) << 3 | (codes & 0x00080008) << 6 | (codes >> 4) & 0x00070007 | (codes >> 1) & 0x00400040
    for to, bit, against in _MOVES:
        word = word | ((codes >> bit ^ word >> against) & 0x00010001) << to
    return word


def from_float_order(words: Tensor) -> Tensor:
    """The inverse of ``float_order``."""
    codes = torch.zeros_like(words)
    for place, found in enumerate((words << 6, words << 9, words ^ (words >> 3 & 0x1FFFFFFF), words ^ words << 2)):
        codes |= ((found >> 9 & 0x00070007) | (found >> 12 & 0x00080008)) << 4 * place
    return codes


def subgroups(group: int | None) -> int:
    """Scales per row of a tile: one per group in its 128 columns; 0 for whole rows."""
    return max(1, TILE_COLUMNS // group) if group else 0


def tile_group(format: WeightFormat) -> int:
    """Columns of a tile that share a scale, 0 for whole rows; but whole rows with minima repeat both in each tile."""
    if format.group is None:
        return TILE_COLUMNS if format.code == "min" else 0
    return min(format.group, TILE_COLUMNS)


def unit_bytes(format: WeightFormat) -> int:
    """Bytes of one unit: codes, float16 scales, and uint8 zeros (asym) or float16 minima (min)."""
    return unit_bytes_of(format.bits, tile_group(format), format.code, format.sparse)


def unit_bytes_of(bits: int, group: int, code: str, sparse: bool = False) -> int:
    """``unit_bytes`` by the parts of a format; group: ``tile_group``."""
    size = code_bytes(bits, sparse) + subgroups(group) * (32 + {"asym": 16, "min": 32}.get(code, 0))
    return round_up(size, sparse_layout.SECTOR) if sparse else size


def code_bytes(bits: int, sparse: bool) -> int:
    """Bytes of a unit before its scales: codes and, for 2:4 sparse weights, metadata."""
    return sparse_layout.unit_bytes(bits) if sparse else 256 * bits


def tile_bytes(format: WeightFormat) -> int:
    """Bytes of one tile: four units."""
    return 4 * unit_bytes(format)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A layer's weights as tiles.

    tiles: uint8 [K'/128, N'/64, tile_bytes(format)], K' and N' padded with zeros.
    row_scale: float32 [N'], multiplies a row of the product, on top of group scales if any.
    row_zero: uint8 [N'] for asym whole rows, else None.
    permutation: int32 [K'], the input channel of each column, -1 for padding; None: columns are in order.
    shape: (N, K) of the layer.
    """

    tiles: Tensor
    row_scale: Tensor
    row_zero: Tensor | None
    permutation: Tensor | None
    shape: tuple[int, int]
    format: WeightFormat
    order: Order

    @property
    def padded(self) -> tuple[int, int]:
        """(N', K')."""
        return self.tiles.shape[1] * TILE_ROWS, self.tiles.shape[0] * TILE_COLUMNS

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What kernels read."""
        return self.tiles, self.row_scale, self.row_zero, self.permutation


def why_not(format: WeightFormat, quantized: bool = False) -> str | None:
    """Why no kernel over tiles takes weights in ``format``, in a sentence; None if one might.

    quantized: whether activations have 8 bits.
    """
    if format.code in CODES and format.group != 16:
        return None
    what = f"{format.code} codes" if format.code not in CODES else "groups of 16"
    if format.sparse:
        return f"2:4 sparse weights run in sym or asym codes with groups of 32 or more, not in {what}"
    if quantized:
        return f"weights in {what} run only with 16-bit activations: use a16"
    return None


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below ``least``."""
    return 1 << (least - 1).bit_length()


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def first_legal(problem: _P, configs: Iterable[_C], why_not: Callable[[_P, _C | None], str | None]) -> _C:
    """The first legal config. Raises KernelError with the reason if there is none."""
    if (reason := why_not(problem, None)) is not None:
        raise KernelError(reason)
    for config in configs:
        if (reason := why_not(problem, config)) is None:
            return config
    raise KernelError(f"no config for {problem}: {reason}")


def in_order(permutation: Tensor | None, x: Tensor) -> Tensor:
    """X [m, k] in the tiles' column order, with 16-byte aligned rows; a copy only if needed."""
    if permutation is not None:
        index = permutation.long()
        x = torch.where(index >= 0, x[:, index.clamp(min=0)], x.new_zeros(()))
    if not rows_aligned(x):
        room = x.new_zeros(x.shape[0], pitch(x.shape[1], x.element_size()))
        room[:, : x.shape[1]] = x
        x = room[:, : x.shape[1]]
    return x


def check_operands(
    weight: PackedWeight,
    x: Tensor,
    y: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    ordered: bool = False,
) -> None:
    """Raise KernelError unless the operands fit y[m, n] = x[m, k] W^T + bias[n] (with x_scale [m] for 8-bit x).

    Rows of x may be strided; y must be contiguous; bias has y's dtype. ordered: x comes from ``in_order``.
    """
    n, k = weight.shape
    if ordered and weight.permutation is not None:
        k = weight.padded[1]
    if x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1:
        raise KernelError(f"x must be [m, {k}] with adjacent columns, not {tuple(x.shape)} strided {x.stride()}")
    if ordered and not rows_aligned(x):
        raise KernelError(f"rows of x must start on 16 bytes, not {x.stride(0)} values apart from {x.data_ptr():#x}")
    if tuple(y.shape) != (x.shape[0], n) or not y.is_contiguous():
        found = f"{tuple(y.shape)} strided {y.stride()}"
        raise KernelError(f"y must be a contiguous [{x.shape[0]}, {n}], not {found}")
    coded = x.element_size() == 1
    if (x_scale is not None) != coded:
        raise KernelError(f"x_scale is for 8-bit activations, and x is {dtype_name(x.dtype)}")
    if not coded and x.dtype != y.dtype:
        kinds = f"{dtype_name(x.dtype)} and {dtype_name(y.dtype)}"
        raise KernelError(f"16-bit activations and output must agree, not {kinds}")
    if bias is not None and (bias.dtype != y.dtype or tuple(bias.shape) != (n,) or not bias.is_contiguous()):
        raise KernelError(
            f"bias must be a dense {dtype_name(y.dtype)} [{n}], not {dtype_name(bias.dtype)} {tuple(bias.shape)} "
            f"strided {bias.stride()}"
        )
    if weight.order != ("a8" if coded else "a16"):
        raise KernelError(f"the weight was prepared for {weight.order} activations, and x is {dtype_name(x.dtype)}")
