"""Nested widths: the top bits of every code are the code of a narrower weight (Nair et al., 2025, MatQuant).

A weight of b bits is sliced to r bits by rounding its distance from the zero, in code units, to multiples of
2^(b - r), with half up; the zero's top r bits are the slice's own, and scales grow by 2^(b - r):

    u' = clamp(floor((u - zero) / 2^(b - r) + 1/2) + zero', 0, 2^r - 1),   zero' = floor(zero / 2^(b - r))

Bipolar codes, whose zero lies between two codes at every width, need no rounding: u' is u's top r bits.
"""

from dataclasses import replace

from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.scheme import nested_widths


def top_bits(codes: Tensor, zero: Tensor, bits: int, code: str, step: Tensor | int) -> tuple[Tensor, Tensor]:
    """Codes and zeros of the slice with 2^bits / ``step`` levels, floats; step: a power of two.

    codes, zero: of ``bits`` bits, as floats that broadcast.  code: their kind.
    """
    if code == "bipolar":
        return (codes / step).floor(), (zero + 0.5) / step - 0.5
    top = (zero / step).floor()
    return ((codes - zero) / step + 0.5).floor().add(top).clamp_min(0).clamp_max(2**bits / step - 1), top


def sliced(weight: QuantizedWeight, bits: int) -> QuantizedWeight:
    """The same weight in fewer bits. Raises SchemeError for a width that its format does not allow."""
    format = weight.format
    nested_widths(format, [bits])
    less = format.bits - bits
    codes, zero = weight.codes().short(), None
    if format.code == "bipolar":
        codes >>= less
    else:  # as in top_bits, by integers: a model of billions of weights is waiting
        zero = weight.zeros().short()
        weight.by_group(codes, Tensor.sub_, zero).add_(2 ** (less - 1)).bitwise_right_shift_(less)
        zero >>= less
        weight.by_group(codes, Tensor.add_, zero).clamp_(0, 2**bits - 1)
    zero = zero.byte() if zero is not None and format.code == "asym" else None
    new = replace(format, bits=bits)
    return QuantizedWeight.from_codes(codes.byte(), weight.scale * 2**less, zero, new, weight.group_index)
