"""Tiles of packed weights hold their source layer: every width, code, group, order, ragged ends, act-order."""

from dataclasses import replace

import pytest
import torch

from anybit.codes.packing import QuantizedWeight, pack_words, table_of, unpack_words
from anybit.errors import KernelError, LayerError
from anybit.kernels.packed import sparse_layout
from anybit.kernels.packed.packed_layout import float_order, from_float_order, pieces, tile_bytes
from anybit.kernels.packed.packed_tiles import _normalized, codes, prepare
from anybit.scheme import WeightFormat
from cases import random_weight
from cases_packed import FOREIGN, act_order, scheme_of, unpack

SHAPES = [
    (128, (64, 256), False),
    (None, (40, 200), False),
    (32, (16, 100), False),
    (64, (80, 192), True),
    (256, (64, 300), True),
    (256, (64, 512), False),
]


def layer(n, k, bits, code, group, ordered=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    format = WeightFormat(bits, code, group)
    groups = format.groups(k)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(n, groups, generator=generator) * 0.01 + 0.005).half().float()
    zero = torch.randint(0, 2**bits, (n, groups), generator=generator).to(torch.uint8) if code == "asym" else None
    index = None
    if ordered and group is not None:
        index = (torch.arange(k) // group)[torch.randperm(k, generator=generator)].to(torch.int32)
    return QuantizedWeight(pack_words(codes, bits), scale, zero, (n, k), format, index)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
def test_unpack_inverts_prepare(bits, code):
    for group, (n, k), ordered in SHAPES:
        weight = layer(n, k, bits, code, group, ordered)
        expected = weight.dequantize(torch.float64)
        for order in ("a16", "a8"):
            packed = prepare(weight, order)
            assert packed.tiles.shape[-1] == tile_bytes(weight.format)
            assert torch.allclose(unpack(packed), expected, rtol=1e-6, atol=0)
            assert torch.equal(codes(packed), weight.codes())


@pytest.mark.parametrize("format", FOREIGN, ids=scheme_of)
def test_round_trip_of_formats_of_other_tools(format):
    for n, k, ordered in ((70, 300, False), (64, 512, True)):
        weight = random_weight(n, k, format, 3).with_scales(torch.float16)
        weight = act_order(weight, torch.Generator().manual_seed(5)) if ordered else weight
        packed = prepare(weight)
        assert packed.tiles.shape[-1] == tile_bytes(format)
        assert torch.equal(codes(packed), weight.codes())
        # A minimum may leave scales fewer bits.
        assert torch.allclose(unpack(packed), weight.dequantize(torch.float64), rtol=1e-6, atol=1e-6)
        with pytest.raises(KernelError, match="only with 16-bit activations"):
            prepare(weight, "a8")


def test_order_of_floats():
    words = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    ordered = float_order(words)
    assert torch.equal(from_float_order(ordered), words)
    for place, found in enumerate(
        (ordered << 6, ordered << 9, ordered ^ (ordered >> 3 & 0x1FFFFFFF), ordered ^ ordered << 2)
    ):
        halves = (found & 0x8E008E00 - 2**32).view(torch.float16).view(-1, 2)
        codes = torch.stack([words >> shift + 4 * place & 15 for shift in (0, 16)], 1)
        assert torch.equal(halves.float() * 2**14, table_of("e2m1").float()[codes.long()])


def test_minima_far_larger_than_scales():
    weight = random_weight(64, 256, WeightFormat(4, "min", 64)).with_scales(torch.float16)
    for factor in (1e3, 1e6, 1e30):
        big = replace(weight, scale=weight.scale.float(), minimum=weight.minimum.float() * factor)
        exact = big.dequantize(torch.float64)
        assert ((unpack(prepare(big)) - exact).abs() <= 2**-11 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("order", ["a16", "a8"])
def test_every_bit_of_a_lane_has_one_owner(bits, order):
    registers, field = (32, 16) if order == "a16" else (16, 8)
    owned = [(p.word, p.bit + i) for j in range(registers) for p in pieces(bits, order, j) for i in range(p.count)]
    assert sorted(owned) == [(word, bit) for word in range(2 * bits) for bit in range(field)]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("order", ["a16", "a8"])
def test_sparse_round_trip(bits: int, order: str) -> None:
    for (code, group), (n, k) in zip(
        (("sym", 128), ("asym", 32), ("asym", None)), ((70, 264), (64, 256), (20, 132)), strict=True
    ):
        weight = random_weight(n, k, WeightFormat(bits, code, group, True))  # type: ignore[arg-type]
        packed = prepare(weight, order)  # type: ignore[arg-type]
        words, indices = sparse_layout.words_of(packed.tiles, bits, order, n, k)
        assert torch.equal(words, weight.words) and torch.equal(indices, weight.indices)
        assert torch.allclose(unpack(packed), weight.dequantize(torch.float64), rtol=2e-3)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_bit_of_a_sparse_lane_has_one_owner(bits: int) -> None:
    """Also by the device's definition: fields of 16 bits, whose high bytes are the higher kept columns, and of 8."""
    owned = [(p.word, p.bit + i) for j in range(8) for p in sparse_layout.pieces(bits, j) for i in range(p.count)]
    assert sorted(owned) == [(word, bit) for word in range(bits) for bit in range(8)]


@pytest.mark.parametrize("order", ["a16", "a8"])
def test_sparse_layers_have_no_groups_of_16(order: str) -> None:
    weight = random_weight(64, 128, WeightFormat(4, "asym", 16, True))
    with pytest.raises(KernelError, match="2:4 sparse weights run in sym or asym codes with groups of 32 or more"):
        prepare(weight, order)  # type: ignore[arg-type]


def test_sparse_layers_have_no_activation_order() -> None:
    weight = random_weight(64, 128, WeightFormat(4, "sym", 64, True))
    order = torch.arange(128).flip(0).div(64, rounding_mode="floor").int()
    with pytest.raises(KernelError, match="2:4 sparse weights in an activation order"):
        prepare(replace(weight, group_index=order))


@pytest.mark.parametrize("pair", [(0, 0), (2, 1), (3, 3)])
def test_sparse_layers_name_two_of_four_in_order(pair: tuple[int, int]) -> None:
    """What sparse products make of other metadata is undefined."""
    weight = random_weight(64, 128, WeightFormat(4, "sym", 64, True))
    places = unpack_words(weight.indices, 2, 64)
    places[63, 62:] = torch.tensor(pair)
    for order in ("a16", "a8"):
        with pytest.raises(LayerError, match="must name two of four inputs each, the lower one first"):
            prepare(replace(weight, indices=pack_words(places, 2)), order)


def test_scales_of_any_size_survive():
    weight = layer(64, 256, 4, "sym", 64)
    for factor in (1e-9, 1e9):
        big = QuantizedWeight(weight.words, weight.scale * factor, None, weight.shape, weight.format)
        assert torch.allclose(unpack(prepare(big)), big.dequantize(torch.float64), rtol=1e-3)


def test_bad_input_is_named():
    with pytest.raises(KernelError, match="order must be"):
        prepare(layer(64, 128, 4, "sym", 128), "a4")


@pytest.mark.parametrize("size", [1e-45, 1e-39, 2.0**-126, 1e-3, 1.0, 3.0e38])
def test_a_power_of_two_leaves_each_row_of_scales(size: float) -> None:
    """The factor and the rest reproduce the scales, from the smallest float32 to the largest."""
    weight = layer(64, 256, 4, "sym", 128)
    scale = size * torch.linspace(0.25, 1, 128).view(64, 2)
    left, _, factor = _normalized(replace(weight, scale=scale), 64)
    assert torch.equal(left * factor[:, None], scale) and (left.abs() <= 256).all()
    assert (left.half().isfinite()).all()
