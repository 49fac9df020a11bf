"""packed_repack.cuh on the CPU: the same tiles as packed_layout's torch code, byte for byte."""

import pytest
import torch

import emulate
from anybit.kernels import packed_layout, packed_repack
from anybit.packing import QuantizedWeight
from anybit.scheme import WeightFormat
from cases import random_weight

pytestmark = pytest.mark.emulate


@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_same_tiles(bits: int) -> None:
    format = WeightFormat(bits, "asym", 64)
    for n, k, ordered in ((70, 256, False), (64, 200, False), (40, 320, True)):
        weight = random_weight(n, k, format, bits)
        if ordered:
            index = (torch.arange(k) // 64)[torch.randperm(k, generator=torch.Generator().manual_seed(bits))]
            weight = QuantizedWeight(
                weight.words, weight.scale, weight.zero, weight.shape, format, index.to(torch.int32)
            )
        for order in ("a16", "a8"):
            expected = packed_layout.prepare(weight, order)
            tiles = expected.tiles.clone()
            packed_layout._units(tiles, format)[..., : 256 * bits] = 0xA5
            params = packed_repack.arguments(weight.words, expected.permutation, tiles, n, k)
            kernel = packed_repack.kernel(packed_repack.Config(bits, order == "a8"))
            emulate.run(kernel, params, (tiles.shape[1], tiles.shape[0], 1))
            assert torch.equal(tiles, expected.tiles)
