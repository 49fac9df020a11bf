"""Encode layers as GGUF's blocks, if these hold their codes, scales and minima exactly: the inverse of ``gguf_blocks``.

Each candidate type is encoded, decoded and compared: only an exact round trip counts. For types with two-level scales
the factors are recovered: a float16 of which every scale in the block is a small integer multiple.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from anybit.checkpoints.formats.gguf_blocks import BLOCKS
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError, ConversionError
from anybit.scheme import Scheme, WeightFormat

# Codes [N, blocks, weights], scales and minima [N, blocks, groups of a block] -> bytes [N, blocks, size].
_Encode = Callable[[Tensor, Tensor, Tensor], Tensor]


def encode(weight: QuantizedWeight) -> tuple[str, Tensor]:
    """(GGML type, bytes uint8 [N, bytes per row]) that represent a layer exactly.

    Zeros become minima, -zero * scale. Raises ConversionError, with each type's reason, if none represents it.
    """
    if weight.group_index is not None:
        raise ConversionError("its inputs are in activation order, which GGUF does not have")
    reasons = []
    for kind in types_of(weight.format):
        found = _encoded(weight, kind)
        if isinstance(found, Tensor):
            return kind, found
        reasons.append(f"{kind} {found}")
    fmt = weight.format
    raise ConversionError("; ".join(reasons) or f"no type of blocks has {fmt.bits}-bit {fmt.code} codes")


def why_not(scheme: Scheme) -> str | None:
    """Why GGUF cannot represent a scheme, whatever the scales, in a sentence; None if it might."""
    weights = scheme.weights
    if scheme.activations.quantized:
        return f"{scheme.activations.bits}-bit activations: it has 16 bits"
    sizes = [Scheme.parse(BLOCKS[kind].scheme).weights.group or 1 for kind in types_of(weights)]
    if not sizes or weights.sparse:
        return f"no type of blocks has {weights.bits}-bit {weights.code} codes" + " of 2:4" * weights.sparse
    if weights.group is not None and all(weights.group % size for size in sizes):
        return f"its blocks have groups of {min(sizes)}, which do not divide groups of {weights.group}"
    return None


def types_of(format: WeightFormat) -> list[str]:
    """The GGML types with a format's codes."""
    kind = format.bits, "min" if format.code == "asym" else format.code
    found = {name: Scheme.parse(BLOCKS[name].scheme).weights for name in BLOCKS if name in _ENCODERS}
    return [name for name, weights in found.items() if (weights.bits, weights.code) == kind]


def _encoded(weight: QuantizedWeight, kind: str) -> Tensor | str:
    """A layer's bytes in a block type, or why that type cannot represent it."""
    block, (n, k) = BLOCKS[kind], weight.shape
    size = Scheme.parse(block.scheme).weights.group
    assert size is not None
    group = weight.format.group or k
    if k % block.weights:
        return f"has blocks of {block.weights}, which do not divide {k} inputs"
    if group % size:
        return f"has groups of {size}, which do not divide groups of {group}"
    codes = weight.codes().view(n, -1, block.weights)
    scale = weight.scale.float()
    minimum = torch.zeros_like(scale)
    if weight.minimum is not None:
        minimum = weight.minimum.float()
    elif weight.zero is not None:
        minimum = -(weight.zeros() * scale)
    shape = n, k // block.weights, block.weights // size
    scale, minimum = (
        values.repeat_interleave(group // size, 1)[:, : k // size].view(shape) for values in (scale, minimum)
    )
    data = _ENCODERS[kind](codes, scale, minimum)
    try:
        back, scale_back, minimum_back = block.decode(data)
    except CheckpointError:  # an unused bit pattern
        return "does not hold its codes"
    if not torch.equal(back, codes):
        return "does not hold its codes"
    if not torch.equal(scale_back.float().view(shape), scale):
        return "does not hold its scales exactly"
    if minimum_back is not None and not torch.equal(minimum_back.float().view(shape), minimum):
        return "does not hold its minima exactly"
    return data.flatten(1)


def _half(values: Tensor) -> Tensor:
    """Float16 bytes [..., 2] of values [..., 1]."""
    return values.to(torch.float16).view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., 2 B] to bytes [..., B]: the first half in the low nibbles."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _bits(values: Tensor) -> Tensor:
    """Pack bits [..., 8 B], least significant first, to bytes [..., B]."""
    eights: Tensor = values.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
    return eights.sum(-1, dtype=torch.uint8)


def _planes(codes: Tensor, run: int, bits: int) -> Tensor:
    """Pack codes to runs of bytes: each holds 8 / bits runs of codes, one per bit position, lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs: Tensor = codes.unflatten(-1, (-1, 8 // bits, run)) << shifts
    return runs.sum(-2, dtype=torch.uint8).flatten(-2)


def _factored(values: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Factor values [..., G] exactly into a float16 [..., 1] times integers from ``least`` to ``most``.

    Where that is impossible, the factors' product differs from the values.
    """
    at = values.abs().argmax(-1, keepdim=True)
    largest = values.gather(-1, at)
    unit, whole = torch.zeros_like(largest), torch.zeros_like(values)
    found = largest == 0
    for count in (*range(1, most + 1), *range(-1, least - 1, -1)):
        tried = (largest / count).half().float()
        steps = torch.where(tried == 0, 0.0, values / tried).round()
        fits = ((steps * tried == values) & (steps >= least) & (steps <= most)).all(-1, keepdim=True) & ~found
        unit, whole, found = torch.where(fits, tried, unit), torch.where(fits, steps, whole), found | fits
        if bool(found.all()):
            break
    return unit, whole


def _q4_0(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_half(scale), _halves(codes)], -1)


def _q4_1(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_half(scale), _half(minimum), _halves(codes)], -1)


def _q5_0(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_half(scale), _bits(codes >> 4), _halves(codes & 15)], -1)


def _q5_1(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_half(scale), _half(minimum), _bits(codes >> 4), _halves(codes & 15)], -1)


def _q8_0(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_half(scale), codes ^ 0x80], -1)


def _q2_k(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    (unit, scales), (least, minima) = _factored(scale, 0, 15), _factored(-minimum, 0, 15)
    small = scales.to(torch.uint8) | minima.to(torch.uint8) << 4
    return torch.cat([small, _planes(codes, 32, 2), _half(unit), _half(least)], -1)


def _q3_k(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    unit, scales = _factored(scale, -32, 31)
    small = (scales + 32).to(torch.uint8)
    packed = torch.cat([_halves(small & 15), _planes(small >> 4, 4, 2)], -1)
    return torch.cat([_planes(codes >> 2, 32, 1), _planes(codes & 3, 32, 2), packed, _half(unit)], -1)


def _six_bits(scale: Tensor, minimum: Tensor) -> list[Tensor]:
    """The super-block scale and minimum of Q4_K and Q5_K, and the packed 6-bit scales and minima."""
    (unit, scales), (least, minima) = _factored(scale, 0, 63), _factored(-minimum, 0, 63)
    (a, b), (c, d) = scales.to(torch.uint8).chunk(2, -1), minima.to(torch.uint8).chunk(2, -1)
    return [_half(unit), _half(least), a | b >> 4 << 6, c | d >> 4 << 6, b & 15 | (d & 15) << 4]


def _q4_k(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([*_six_bits(scale, minimum), _planes(codes, 32, 4)], -1)


def _q5_k(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([*_six_bits(scale, minimum), _planes(codes >> 4, 32, 1), _planes(codes & 15, 32, 4)], -1)


def _q6_k(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    unit, scales = _factored(scale, -128, 127)
    small = scales.to(torch.int8).view(torch.uint8)
    return torch.cat([_planes(codes & 15, 64, 4), _planes(codes >> 4, 32, 2), small, _half(unit)], -1)


def _tq2_0(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return torch.cat([_planes(codes - 1 & 3, 32, 2), _half(scale)], -1)


def _iq4_xs(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    unit, scales = _factored(scale, -32, 31)
    small = (scales + 32).to(torch.uint8).unflatten(-1, (-1, 2))
    low = small[..., 0] & 15 | (small[..., 1] & 15) << 4
    high = (small.flatten(-2) >> 4).unflatten(-1, (-1, 4)) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return torch.cat(
        [_half(unit), high.sum(-1, dtype=torch.uint8), low, _halves(codes.unflatten(-1, (8, 32))).flatten(-2)], -1
    )


def _mxfp4(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    exponent = (torch.frexp(scale).exponent + 126).clamp(0, 254).to(torch.uint8)
    return torch.cat([exponent, _halves(codes)], -1)


_ENCODERS: dict[str, _Encode] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
