"""Bit planes as 1-bit tensor cores read them: the layout of bitplane_layout.cuh, and weights prepared in it.

``planes[chunk][plane][row][128 bytes]``, uint8: a chunk is 1024 columns (k), plane i holds bit i of every code, rows
are padded to a multiple of 8. Bit ``k % 8`` of a byte is column k. The eight 16-byte pieces of a row are stored in
wgmma's 128-byte swizzle, piece ``c`` of row ``r`` at ``c ^ (r & 7)``, so that tiles of any number of rows are plain
copies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.errors import KernelError
from anybit.scheme import CODES, ActivationFormat, WeightFormat

CHUNK = 1024
"""Columns of a chunk."""
ROW_BYTES = CHUNK // 8
_PIECES = 8
_ROWS_ELEMENTS = 1 << 25
"""Codes prepared at a time: unpacked codes take several bytes each, where planes take bits."""


def chunks(k: int) -> int:
    """Number of chunks for ``k`` columns."""
    return -(-k // CHUNK)


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to a multiple of 8."""
    return -(-rows // 8) * 8


def size(rows: int, k: int, bits: int) -> int:
    """Bytes of the planes of ``rows`` x ``k`` codes of ``bits`` bits."""
    return chunks(k) * bits * padded_rows(rows) * ROW_BYTES


def _swizzled(rows: Tensor) -> Tensor:
    """Rows uint8 [R, chunks * 128] with each chunk's 16-byte pieces in their places; its own inverse."""
    pieces = rows.reshape(rows.shape[0], -1, _PIECES, 16)
    row = torch.arange(rows.shape[0], device=rows.device)[:, None]
    places = torch.arange(_PIECES, device=rows.device) ^ (row & 7)
    return pieces.gather(2, places[:, None, :, None].expand_as(pieces)).flatten(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes uint8 [R, K] -> planes uint8 [chunks, bits, padded rows, 128]; padding is zeros."""
    rows, k = codes.shape
    padded = codes.new_zeros(padded_rows(rows), chunks(k) * CHUNK)
    padded[:rows, :k] = codes
    grouped = padded.view(padded.shape[0], -1, 8)
    planes = torch.empty(chunks(k), bits, padded.shape[0], ROW_BYTES, dtype=torch.uint8, device=codes.device)
    weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    for plane in range(bits):
        bytes_ = (((grouped >> plane) & 1) * weights).sum(-1, dtype=torch.uint8)
        planes[:, plane] = _swizzled(bytes_).unflatten(1, (-1, ROW_BYTES)).transpose(0, 1)
    return planes


def unpack(planes: Tensor, rows: int, k: int) -> Tensor:
    """Planes uint8 [chunks, bits, padded rows, 128] -> codes uint8 [rows, k]; the inverse of ``pack``."""
    _, bits, stored, _ = planes.shape
    codes = torch.zeros(stored, chunks(k) * CHUNK, dtype=torch.uint8, device=planes.device)
    for plane in range(bits):
        bytes_ = _swizzled(planes[:, plane].transpose(0, 1).flatten(1))
        bit = (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8, device=planes.device)) & 1
        codes |= bit.flatten(1) << plane
    return codes[:rows, :k].contiguous()


@dataclass(frozen=True, eq=False)
class PlaneWeight:
    """A layer's weights prepared for 1-bit tensor cores; exactly ``bits`` bits per weight, plus padding.

    planes: uint8 [ceil(K/1024), bits, ceil(N/8)*8, 128].  scale: float32 [N].
    correction: int32 [N], ``K * Z - 2^e * sum u`` where Z = 2^e * zero is an integer (e = 1 for bipolar, else 0): the
    factor of the activations' zero.  zero: int32 [N], Z for asym, else None.
    """

    planes: Tensor
    scale: Tensor
    correction: Tensor
    zero: Tensor | None
    shape: tuple[int, int]
    format: WeightFormat

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.planes.device

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What kernels read."""
        return self.planes, self.scale, self.correction, self.zero

    def to(self, device: torch.device | str) -> "PlaneWeight":
        """The same weights on another device."""
        zero = None if self.zero is None else self.zero.to(device)
        moved = (self.planes.to(device), self.scale.to(device), self.correction.to(device), zero)
        return PlaneWeight(*moved, self.shape, self.format)


def prepare(weight: QuantizedWeight) -> PlaneWeight:
    """Convert a layer's weights to bit planes. Raises KernelError with the reason of ``why_not``."""
    if (reason := why_not(weight.format)) is not None:
        raise KernelError(f"{weight.format} cannot be laid out as planes: {reason}")
    (n, k), bits = weight.shape, weight.format.bits
    stored = torch.empty(chunks(k), bits, padded_rows(n), ROW_BYTES, dtype=torch.uint8, device=weight.words.device)
    sums = torch.empty(n, dtype=torch.int64, device=weight.words.device)
    step = max(8, _ROWS_ELEMENTS // (chunks(k) * CHUNK) // 8 * 8)
    for start in range(0, n, step):
        stop = min(start + step, n)
        codes = unpack_words(weight.words[start:stop], bits, k)
        stored[:, :, start : padded_rows(stop)] = pack(codes, bits)
        sums[start:stop] = codes.sum(1, dtype=torch.int64)
    double = int(weight.format.code == "bipolar")
    zero = (weight.zeros()[:, 0].double() * 2**double).to(torch.int64)
    return PlaneWeight(
        stored,
        weight.scale[:, 0].float().contiguous(),
        (k * zero - (sums << double)).to(torch.int32),
        zero.to(torch.int32) if weight.format.code == "asym" else None,
        weight.shape,
        weight.format,
    )


def why_not(format: WeightFormat) -> str | None:
    """Why weights in ``format`` cannot be bit planes, in a sentence; None if they can."""
    if format.sparse:
        return "2:4 sparse weights have no 1-bit path"
    if format.code not in CODES:
        return f"{format.code} codes are not integers, which bit planes need"
    if format.group is not None:
        return f"bit planes need one scale a row, and these weights have groups of {format.group}"
    return None


def largest_sum(k: int, weights: WeightFormat, activations: ActivationFormat) -> int:
    """An upper bound on sums of k products of codes, with and without zero terms."""
    return int(k * (2**weights.bits - 1) * (2**activations.bits - 1))
