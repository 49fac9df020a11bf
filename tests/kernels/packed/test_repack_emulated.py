"""repack.cuh on the CPU: tiles and row scales equal packed_layout's torch code, byte for byte."""

from dataclasses import replace

import pytest
import torch

import emulate
from anybit.codes.packing import QuantizedWeight
from anybit.kernels.packed import packed_layout, packed_tiles
from anybit.kernels.packed.repack import repack
from anybit.scheme import WeightFormat
from cases import random_weight


def check(weight: QuantizedWeight, order: packed_layout.Order) -> None:
    """Tiles and row scales written by the kernel over poisoned memory."""
    expected = packed_tiles.prepare(weight, order)
    tiles, row_scale = torch.full_like(expected.tiles, 0xA5), torch.full_like(expected.row_scale, torch.nan)
    columns = packed_tiles._columns(weight)[1]
    columns = None if columns is None else columns.int()
    params = repack.arguments(weight, expected.permutation, columns, tiles, row_scale)
    kernel = repack.kernel(repack.config_of(weight.format, order))
    emulate.run(kernel, params, (tiles.shape[1], tiles.shape[0], 1))
    assert torch.equal(tiles, expected.tiles)
    if weight.format.group is not None:
        assert torch.equal(row_scale, expected.row_scale)


@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_repack_makes_the_references_tiles(bits: int) -> None:
    format = WeightFormat(bits, "asym", 64)
    for n, k, ordered in ((70, 256, False), (64, 200, False), (40, 320, True)):
        weight = random_weight(n, k, format, bits)
        if ordered:
            index = (torch.arange(k) // 64)[torch.randperm(k, generator=torch.Generator().manual_seed(bits))]
            weight = QuantizedWeight(
                weight.words, weight.scale, weight.zero, weight.shape, format, index.to(torch.int32)
            )
        for order in ("a16", "a8"):
            check(weight, order)


@pytest.mark.parametrize("group", [32, 128, 256, None])
def test_repack_takes_groups(group: int | None) -> None:
    for code in ("sym", "asym"):
        check(random_weight(70, 600, WeightFormat(2, code, group), 5), "a16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_of_scales(dtype: torch.dtype) -> None:
    for code in ("sym", "min"):
        check(random_weight(70, 256, WeightFormat(4, code, 32), 5).with_scales(dtype), "a16")


def test_codes_of_floats() -> None:
    check(random_weight(70, 300, WeightFormat(4, "e2m1", 16), 5), "a16")


@pytest.mark.parametrize("group", [16, 64, 256])
def test_repack_takes_minima(group: int) -> None:
    check(random_weight(70, 600, WeightFormat(3, "min", group), 5), "a16")


def test_scales_of_any_size() -> None:
    weight = random_weight(70, 256, WeightFormat(1, "sym", 64), 5)
    weight = replace(weight, scale=weight.scale.float())
    sizes = (0.0, 1e-45, 1e-38, 1.1754944e-38, 3e-36, 1e-6, 1.0, 255.99, 6e4, 3e38, torch.inf, -2.0)
    for row, size in enumerate(sizes):
        weight.scale[row] = torch.tensor([size, size / 2, 0.0, -size])
    weight.scale[20:40] *= torch.exp2(torch.linspace(-140, 120, 20))[:, None]
    check(weight, "a16")
    minimum = weight.scale.flip(0).clone()
    minimum[10:14] *= 1e6
    check(replace(weight, minimum=minimum, format=WeightFormat(1, "min", 64)), "a16")
