"""Nested widths: the top bits of codes are the nearest codes of the narrower weight."""

import pytest
import torch
from tests.cases import random_weight

from anybit.codes.nested import sliced
from anybit.errors import SchemeError
from anybit.scheme import WeightFormat, nested_widths


@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
@pytest.mark.parametrize(("bits", "width"), [(8, 2), (8, 3), (8, 4), (8, 7), (5, 2), (3, 2)])
@pytest.mark.parametrize("group", [32, None])
def test_slices_are_the_nearest_values_of_their_width(code: str, bits: int, width: int, group: int | None) -> None:
    """Of all levels that a slice's own scale and zero give it; the last group is partial."""
    whole = random_weight(7, 80, WeightFormat(bits, code, group), seed=bits)
    found = sliced(whole, width)
    assert found.format == WeightFormat(width, code, group) and found.shape == whole.shape
    assert torch.equal(found.scale, whole.scale * 2 ** (bits - width))
    if code == "asym":
        assert torch.equal(found.zero, whole.zero >> bits - width)
    groups = whole.groups()
    levels = torch.arange(2**width)[:, None, None] - found.zeros()[:, groups]
    wanted = (levels * found.scale[:, groups] - whole.dequantize()).abs().amin(0)
    torch.testing.assert_close((found.dequantize() - whole.dequantize()).abs(), wanted)


def test_slices_keep_the_order_of_inputs() -> None:
    whole = random_weight(5, 64, WeightFormat(8, "asym", 32))
    index = torch.arange(64, dtype=torch.int32) % 2
    scattered = type(whole)(whole.words, whole.scale, whole.zero, whole.shape, whole.format, index)
    found = sliced(scattered, 4)
    assert torch.equal(found.group_index, index)
    assert float((found.dequantize() - scattered.dequantize()).abs().max()) <= 16 * float(whole.scale.max())


@pytest.mark.parametrize(
    ("format", "widths", "says"),
    [
        (WeightFormat(8), [8], "weights of 8 bits have no slice of 8: a nested width is at least 2, and less than"),
        (WeightFormat(4), [3, 1], "no slice of 1"),
        (WeightFormat(8), [True], "no slice of True"),
        (WeightFormat(8, sparse=True), [4], "2:4 sparse weights have no slices: nested widths need a scheme like w8"),
        (WeightFormat(8, "min", 32), [4], "min codes have no slices"),
    ],
)
def test_other_widths_are_refused(format: WeightFormat, widths: list[int], says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        nested_widths(format, widths)


def test_widths_are_sorted() -> None:
    assert nested_widths(WeightFormat(8, "asym", 64), (4, 2, 3, 2)) == [2, 3, 4]
    assert nested_widths(WeightFormat(8, "min", 32), ()) == []
