"""Repacking on hardware: equal to packed_layout's torch code, with no extra memory."""

from dataclasses import replace

import pytest
import torch

from anybit.kernels.packed import packed_tiles
from anybit.scheme import WeightFormat
from cases import random_weight
from cases_packed import act_order


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
@pytest.mark.parametrize("bits", [3, 4])
def test_tiles_are_those_of_torch(bits: int, group: int | None) -> None:
    for code in ("sym", "asym", "min", *(("e2m1",) if bits == 4 else ())):
        for order in ("a16", "a8") if code in ("sym", "asym") and group != 16 else ("a16",):
            host = random_weight(300, 1000, WeightFormat(bits, code, group))
            if group == 64 and order == "a16":
                host = act_order(host, torch.Generator().manual_seed(bits))
            expected = packed_tiles.prepare(host, order)
            found = packed_tiles.prepare(host.to("cuda"), order)
            for name in ("tiles", "row_scale", "row_zero", "permutation"):
                mine, theirs = getattr(found, name), getattr(expected, name)
                assert mine is theirs is None or torch.equal(mine.cpu(), theirs), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(1, 128), (4, 128), (4, 32), (8, None)])
def test_repack_needs_little_memory(bits: int, group: int | None, dtype: torch.dtype) -> None:
    """Besides the source layer: its tiles, and a few numbers per row."""
    weight = random_weight(4096, 4096, WeightFormat(bits, "sym", group))
    weight = replace(weight, scale=weight.scale.to(dtype)).to("cuda")
    packed_tiles.prepare(weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # without the allocator's rounding
    packed = packed_tiles.prepare(weight)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert packed.tiles.numel() < peak < packed.tiles.numel() + 16 * 4096
