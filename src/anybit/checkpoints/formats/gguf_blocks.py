"""GGUF's blocks (GGML's quantization types): bytes to codes, scales and minima, and back.

A row is a sequence of blocks of 32 or 256 weights. Two-level scales (a float16 factor times small integers for groups
of 16 or 32 inputs) are multiplied in float32, where these products are exact.
Layouts: ggml-quants.c and the ``gguf`` package, with which the tests compare bitwise.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import powers_of_two
from anybit.checkpoints.gguf import SCHEMES
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError
from anybit.scheme import Scheme, WeightFormat


@dataclass(frozen=True, slots=True)
class _Plane:
    """Bytes ``begin`` to ``end`` in runs: each holds 8 / bits runs of integers, one per bit position, lowest first.

    shift: where these bits belong in the integers. 8 bits are two's complement, and become unsigned.
    """

    begin: int
    end: int
    run: int
    bits: int
    shift: int = 0

    def unpack(self, data: Tensor) -> Tensor:
        runs: Tensor = data[..., self.begin : self.end].unflatten(-1, (-1, self.run)).contiguous()
        if self.bits == 8:
            return runs.flatten(-2) ^ 0x80
        mask = (1 << self.bits) - 1
        planes = [runs >> place & mask for place in range(0, 8, self.bits)]
        return torch.stack(planes, dim=-2).flatten(-3).bitwise_left_shift(self.shift)

    def pack(self, values: Tensor, data: Tensor) -> None:
        values = values ^ 0x80 if self.bits == 8 else values >> self.shift & (1 << self.bits) - 1
        places = torch.arange(0, 8, self.bits, dtype=torch.uint8)[:, None]
        runs: Tensor = values.unflatten(-1, (-1, 8 // self.bits, self.run)) << places
        data[..., self.begin : self.end] = runs.sum(-2, dtype=torch.uint8).flatten(-2)


class _SixBits:
    """The eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K, in bytes 4 to 16."""

    def unpack(self, data: Tensor) -> Tensor:
        first, second, third = data[..., 4:16].chunk(3, -1)
        upper = third & 15 | first >> 6 << 4, third >> 4 | second >> 6 << 4
        return torch.cat([first & 63, upper[0], second & 63, upper[1]], -1)

    def pack(self, values: Tensor, data: Tensor) -> None:
        a, b, c, d = values.chunk(4, -1)
        data[..., 4:16] = torch.cat([a | b >> 4 << 6, c | d >> 4 << 6, b & 15 | (d & 15) << 4], -1)


class _Digits:
    """TQ1_0's ternary digits, five per byte, as a fixed-point fraction: multiplying by 3 carries out the next digit."""

    def unpack(self, data: Tensor) -> Tensor:
        parts = []
        for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
            powers = torch.tensor([3**i for i in range(count)], dtype=torch.int16)[:, None]
            shifted = data[..., begin:end].to(torch.int16)[..., None, :] * powers & 255
            parts.append((shifted * 3 >> 8).to(torch.uint8).flatten(-2))
        return torch.cat(parts, dim=-1)

    def pack(self, values: Tensor, data: Tensor) -> None:
        raise NotImplementedError("TQ1_0 is only read: TQ2_0 holds the same weights")


_Parts = tuple[_Plane | _SixBits | _Digits, ...]
"""How bytes of blocks, uint8 [N, blocks, size], hold unsigned integers [N, blocks, count], or some bits of them."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantization type. weights, bytes: per block.

    parts: of the codes.  scale, minimum: where the float16 scale and minimum begin.  exponent: byte 0 is the scale.
    small: parts of the integers of two-level scales, and after them those of the minima, of ``width`` bits.
    zero: the integer that stands for 0.  least: the code of the stored 0.
    """

    weights: int
    bytes: int
    parts: _Parts
    scale: int = 0
    minimum: int | None = None
    small: _Parts = ()
    width: int = 6
    zero: int = 0
    least: int = 0
    exponent: bool = False

    def decode(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Bytes uint8 [N, blocks, size] -> codes [N, blocks, weights], scales and minima [N, blocks, groups].

        Raises CheckpointError for bits that stand for no weight.
        """
        codes = _joined(self.parts, data) + self.least
        if self.least and bool((codes > 3).any()):
            raise CheckpointError("a pair of bits is 3, which stands for no ternary weight")
        if self.exponent:
            return codes, powers_of_two(data[..., :1]), None
        scale, minimum = _half(data, self.scale), None if self.minimum is None else _half(data, self.minimum)
        if not self.small:
            return codes, scale, minimum
        scales = _joined(self.small, data).float() - self.zero
        if minimum is None:
            return codes, scale.float() * scales, None
        scales, minima = scales.chunk(2, -1)
        return codes, scale.float() * scales, -(minimum.float() * minima)

    def encode(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """The inverse of ``decode``, from float32; bytes that decode to something else if the type cannot hold it."""
        data = codes.new_zeros(*codes.shape[:2], self.bytes)
        for part in self.parts:
            part.pack(codes - self.least, data)
        if self.small:
            most = (1 << self.width) - 1
            scale, integers = _factored(scale, -self.zero, most - self.zero)
            if self.minimum is not None:
                minimum, minima = _factored(-minimum, 0, most)
                integers = torch.cat([integers, minima], -1)
            for part in self.small:
                part.pack((integers + self.zero).to(torch.uint8), data)
        if self.exponent:
            data[..., :1] = (torch.frexp(scale).exponent + 126).clamp(0, 254)
            return data
        data[..., self.scale : self.scale + 2] = scale.to(torch.float16).view(torch.uint8)
        if self.minimum is not None:
            data[..., self.minimum : self.minimum + 2] = minimum.to(torch.float16).view(torch.uint8)
        return data


def weights_in(kind: str) -> WeightFormat:
    """The format of a type's weights."""
    return Scheme.parse(SCHEMES[kind]).weights


def read_blocks(data: Tensor, kind: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Decode the bytes of a matrix, uint8 of any shape. kind: a key of BLOCKS.  shape: (outputs, inputs).

    Raises CheckpointError for bytes that do not fit the shape, and for scales that are not finite.
    """
    block, (n, k) = BLOCKS[kind], shape
    if k % block.weights or data.numel() != n * (k // block.weights) * block.bytes:
        raise CheckpointError(f"{data.numel()} bytes are no {n} x {k} matrix in {kind}")
    codes, *scales = block.decode(data.reshape(n, k // block.weights, block.bytes))
    scale, minimum = (None if values is None else values.reshape(n, -1).contiguous() for values in scales)
    if scale is None or not all(bool(values.isfinite().all()) for values in (scale, minimum) if values is not None):
        raise CheckpointError("a block has a scale that is not finite")
    return QuantizedWeight.from_codes(codes.reshape(n, k), scale, None, weights_in(kind), minimum=minimum)


def _joined(parts: _Parts, data: Tensor) -> Tensor:
    return reduce(torch.bitwise_or, (part.unpack(data) for part in parts))


def _half(data: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, [N, blocks, 1]."""
    return data[..., start : start + 2].contiguous().view(torch.float16)


def _factored(values: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Factor values [..., G] exactly into a float16 [..., 1] times integers from ``least`` to ``most``.

    Where that is impossible, the factors' product differs from the values.
    """
    at = values.abs().argmax(-1, keepdim=True)
    largest = values.gather(-1, at)
    factor, whole = torch.zeros_like(largest), torch.zeros_like(values)
    found = largest == 0
    for count in (*range(1, most + 1), *range(-1, least - 1, -1)):
        tried = (largest / count).half().float()
        integers = torch.where(tried == 0, 0.0, values / tried).round()
        fits = ((integers * tried == values) & (integers >= least) & (integers <= most)).all(-1, keepdim=True) & ~found
        factor, whole, found = torch.where(fits, tried, factor), torch.where(fits, integers, whole), found | fits
        if bool(found.all()):
            break
    return factor, whole


_NIBBLES = (_Plane(2, 18, 16, 4),)
BLOCKS = {
    "Q4_0": BlockType(32, 18, _NIBBLES),
    "Q4_1": BlockType(32, 20, (_Plane(4, 20, 16, 4),), minimum=2),
    "Q5_0": BlockType(32, 22, (_Plane(6, 22, 16, 4), _Plane(2, 6, 1, 1, 4))),
    "Q5_1": BlockType(32, 24, (_Plane(8, 24, 16, 4), _Plane(4, 8, 1, 1, 4)), minimum=2),
    "Q8_0": BlockType(32, 34, (_Plane(2, 34, 32, 8),)),
    "Q2_K": BlockType(256, 84, (_Plane(16, 80, 32, 2),), 80, 82, small=(_Plane(0, 16, 16, 4),), width=4),
    "Q3_K": BlockType(
        256, 110, (_Plane(32, 96, 32, 2), _Plane(0, 32, 32, 1, 2)), 108,
        small=(_Plane(96, 104, 8, 4), _Plane(104, 108, 4, 2, 4)), zero=32,
    ),
    "Q4_K": BlockType(256, 144, (_Plane(16, 144, 32, 4),), minimum=2, small=(_SixBits(),)),
    "Q5_K": BlockType(256, 176, (_Plane(48, 176, 32, 4), _Plane(16, 48, 32, 1, 4)), minimum=2, small=(_SixBits(),)),
    "Q6_K": BlockType(
        256, 210, (_Plane(0, 128, 64, 4), _Plane(128, 192, 32, 2, 4)), 208,
        small=(_Plane(192, 208, 16, 8),), width=8, zero=128,
    ),
    "TQ1_0": BlockType(256, 54, (_Digits(),), 52, least=1),
    "TQ2_0": BlockType(256, 66, (_Plane(0, 64, 32, 2),), 64, least=1),
    "IQ4_NL": BlockType(32, 18, _NIBBLES),
    "IQ4_XS": BlockType(256, 136, (_Plane(8, 136, 16, 4),), small=(_Plane(4, 8, 1, 4), _Plane(2, 4, 1, 2, 4)), zero=32),
    "MXFP4": BlockType(32, 17, (_Plane(1, 17, 16, 4),), exponent=True),
}  # fmt: skip
"""The types that keep their codes, by GGML name; all others are dequantized."""
