"""Decode GGUF's blocks (GGML's quantization types) to codes, scales and minima.

A row is a sequence of blocks of 32 or 256 weights. Two-level scales (a float16 super-block scale times small integers
for groups of 16 or 32 inputs) are multiplied in float32, where these products are exact.
Layouts: ggml-quants.c and the ``gguf`` package, with which the tests compare bitwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import nibbles, powers_of_two
from anybit.checkpoints.gguf_summary import SCHEMES
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError
from anybit.scheme import Scheme

# Codes [N, blocks, weights], scales and minima [N, blocks, groups of a block].
_Decoded = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantization type. weights, bytes: per block.

    decode: bytes uint8 [N, blocks, size] -> (codes, scales, minima or None).
    """

    scheme: str
    weights: int
    bytes: int
    decode: Callable[[Tensor], _Decoded]

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.bytes / self.weights


def read_blocks(data: Tensor, kind: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Decode the bytes of a matrix, uint8 of any shape. kind: a key of BLOCKS.  shape: (outputs, inputs).

    Raises CheckpointError for bytes that do not fit the shape, and for scales that are not finite.
    """
    block, (n, k) = BLOCKS[kind], shape
    if k % block.weights or data.numel() != n * (k // block.weights) * block.bytes:
        raise CheckpointError(f"{data.numel()} bytes are no {n} x {k} matrix in {kind}")
    codes, scale, minimum = block.decode(data.reshape(n, k // block.weights, block.bytes))
    for values in (scale,) if minimum is None else (scale, minimum):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError("a block has a scale that is not finite")
    format = Scheme.parse(block.scheme).weights
    flat = None if minimum is None else minimum.reshape(n, -1).contiguous()
    return QuantizedWeight.from_codes(
        codes.reshape(n, k), scale.reshape(n, -1).contiguous(), None, format, minimum=flat
    )


def _half(data: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, [N, blocks, 1]."""
    return data[..., start : start + 2].contiguous().view(torch.float16)


def _halves(packed: Tensor) -> Tensor:
    """Unpack bytes [..., B] to codes [..., 2 B]: all low nibbles, then all high nibbles."""
    return _planes(packed, packed.shape[-1], 4)


def _bits(data: Tensor) -> Tensor:
    """Unpack bytes [..., B] to bits [..., 8 B], least significant first."""
    return _BITS[data.int()].view(torch.uint8)


_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64)[:, 0]
"""The bits of every byte value, one byte per bit, viewed as int64."""


def _planes(data: Tensor, run: int, bits: int) -> Tensor:
    """Unpack bytes in runs: each run holds 8 / bits runs of codes, one per bit position, lowest first."""
    runs, mask = data.unflatten(-1, (-1, run)).contiguous(), (1 << bits) - 1
    return torch.stack([runs >> shift & mask for shift in range(0, 8, bits)], dim=-2).flatten(-3)


def _q4_0(data: Tensor) -> _Decoded:
    return _halves(data[..., 2:]), _half(data, 0), None


def _q4_1(data: Tensor) -> _Decoded:
    return _halves(data[..., 4:]), _half(data, 0), _half(data, 2)


def _q5_0(data: Tensor) -> _Decoded:
    return _halves(data[..., 6:]) | _bits(data[..., 2:6]) << 4, _half(data, 0), None


def _q5_1(data: Tensor) -> _Decoded:
    return _halves(data[..., 8:]) | _bits(data[..., 4:8]) << 4, _half(data, 0), _half(data, 2)


def _q8_0(data: Tensor) -> _Decoded:
    return data[..., 2:] ^ 0x80, _half(data, 0), None  # two's complement to unsigned


def _q2_k(data: Tensor) -> _Decoded:
    small = data[..., :16]
    codes = _planes(data[..., 16:80], 32, 2)
    return codes, _half(data, 80).float() * (small & 15), -(_half(data, 82).float() * (small >> 4))


def _q3_k(data: Tensor) -> _Decoded:
    low = _planes(data[..., 32:96], 32, 2)
    high = _planes(data[..., :32], 32, 1)
    packed = data[..., 96:108]
    small = _halves(packed[..., :8]) | _planes(packed[..., 8:], 4, 2) << 4
    return low | high << 2, _half(data, 108).float() * (small.float() - 32), None


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K from twelve bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales, minima


def _q4_k(data: Tensor) -> _Decoded:
    scales, minima = _six_bits(data[..., 4:16])
    codes = _planes(data[..., 16:], 32, 4)
    return codes, _half(data, 0).float() * scales, -(_half(data, 2).float() * minima)


def _q5_k(data: Tensor) -> _Decoded:
    scales, minima = _six_bits(data[..., 4:16])
    codes = _planes(data[..., 48:], 32, 4) | _planes(data[..., 16:48], 32, 1) << 4
    return codes, _half(data, 0).float() * scales, -(_half(data, 2).float() * minima)


def _q6_k(data: Tensor) -> _Decoded:
    codes = _planes(data[..., :128], 64, 4) | _planes(data[..., 128:192], 32, 2) << 4
    return codes, _half(data, 208).float() * data[..., 192:208].contiguous().view(torch.int8), None


def _tq1_0(data: Tensor) -> _Decoded:
    """Five ternary digits per byte, as a fixed-point fraction: multiplying by 3 carries out the next digit."""

    def digits(packed: Tensor, count: int) -> Tensor:
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.int16)[:, None]
        shifted = packed.to(torch.int16)[..., None, :] * powers & 255
        return (shifted * 3 >> 8).to(torch.uint8).flatten(-2)

    parts = [digits(data[..., :32], 5), digits(data[..., 32:48], 5), digits(data[..., 48:52], 4)]
    return torch.cat(parts, dim=-1) + 1, _half(data, 52), None  # -1, 0, 1 are the codes 1, 2, 3 of two bits


def _tq2_0(data: Tensor) -> _Decoded:
    codes = _planes(data[..., :64], 32, 2) + 1
    if bool((codes > 3).any()):
        raise CheckpointError("a pair of bits is 3, which stands for no ternary weight")
    return codes, _half(data, 64), None


def _iq4_nl(data: Tensor) -> _Decoded:
    return _halves(data[..., 2:]), _half(data, 0), None


def _iq4_xs(data: Tensor) -> _Decoded:
    low = nibbles(data[..., 4:8])
    high = nibbles(data[..., 2:4]).unflatten(-1, (-1, 1)) >> torch.tensor([0, 2], dtype=torch.uint8) & 3
    small = (low | high.flatten(-2) << 4).float() - 32
    codes = _halves(data[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return codes, _half(data, 0).float() * small, None


def _mxfp4(data: Tensor) -> _Decoded:
    return _halves(data[..., 1:]), powers_of_two(data[..., :1]), None


BLOCKS = {
    name: BlockType(SCHEMES[name], weights, size, decode)
    for name, weights, size, decode in (
        ("Q4_0", 32, 18, _q4_0),
        ("Q4_1", 32, 20, _q4_1),
        ("Q5_0", 32, 22, _q5_0),
        ("Q5_1", 32, 24, _q5_1),
        ("Q8_0", 32, 34, _q8_0),
        ("Q2_K", 256, 84, _q2_k),
        ("Q3_K", 256, 110, _q3_k),
        ("Q4_K", 256, 144, _q4_k),
        ("Q5_K", 256, 176, _q5_k),
        ("Q6_K", 256, 210, _q6_k),
        ("TQ1_0", 256, 54, _tq1_0),
        ("TQ2_0", 256, 66, _tq2_0),
        ("IQ4_NL", 32, 18, _iq4_nl),
        ("IQ4_XS", 256, 136, _iq4_xs),
        ("MXFP4", 32, 17, _mxfp4),
    )
}
"""The types that keep their codes, by GGML name; all others are dequantized."""
