"""Nested widths: the top bits of every code are the code of a narrower weight (Nair et al., 2025, MatQuant).

A weight of b bits is sliced to r bits by rounding its distance from the zero, in code units, to multiples of
2^(b - r), with half up; the zero's top r bits are the slice's own, and scales grow by 2^(b - r):

    u' = clamp(floor((u - zero) / 2^(b - r) + 1/2) + zero', 0, 2^r - 1),   zero' = floor(zero / 2^(b - r))

Bipolar codes, whose zero lies between two codes at every width, need no rounding: u' is u's top r bits.
"""

from dataclasses import replace

from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.scheme import WeightFormat, nested_widths


def top_bits(codes: Tensor, zero: Tensor, format: WeightFormat, step: Tensor | int) -> tuple[Tensor, Tensor]:
    """Codes and zeros, floats that broadcast, of the slices with 2^bits / ``step`` levels; step is a power of two."""
    if format.code == "bipolar":
        return (codes / step).floor(), (zero + 0.5) / step - 0.5
    top = (zero / step).floor()
    return ((codes - zero) / step + 0.5).floor().add(top).clamp_min(0).clamp_max(2**format.bits / step - 1), top


def sliced(weight: QuantizedWeight, bits: int) -> QuantizedWeight:
    """The same weight in fewer bits. Raises SchemeError for a width that its format does not allow."""
    format = weight.format
    nested_widths(format, [bits])
    step = 2 ** (format.bits - bits)
    codes, _ = top_bits(weight.codes().float(), weight.zeros()[:, weight.groups()], format, step)
    own = None if weight.zero is None else weight.zero >> format.bits - bits
    return QuantizedWeight.from_codes(
        codes.byte(), weight.scale * step, own, replace(format, bits=bits), weight.group_index
    )
