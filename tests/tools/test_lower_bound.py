"""Lower bounds: below every measured time, and accounting for idle SMs and padding."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.choose.builtin import builtin
from anybit.choose.choose import Map
from anybit.choose.families import FAMILIES, Candidate
from anybit.choose.policy import SHIPPED, read
from anybit.choose.space import promising
from anybit.errors import KernelError
from cases_tune import product

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "tuning"))
from lower_bound import lower_bound_us


def test_nothing_was_measured_to_be_faster_than_its_bound() -> None:
    compared, closest = 0, 0.0
    for (scheme, dtype, n, k), points in read(SHIPPED / "nvidia-h200.json").layers.items():
        for m, point in list(points.items())[::2]:
            one = product(scheme, m, n, k, dtype=getattr(torch, dtype))
            for measured in point.strategies.values():
                try:
                    candidate = measured.candidate(one)
                except KernelError:
                    continue
                compared += 1
                closest = max(closest, lower_bound_us(one, candidate) / measured.us)
    assert compared > 500
    assert 0.5 < closest <= 1.0


def test_tiles_that_leave_a_last_round_nearly_empty_are_bounded_by_whole_rounds() -> None:
    one = product("w4a8", 128, 64 * 133, 4096)  # 133 tiles of 64 rows, and 132 SMs
    config = FAMILIES["sm90_packed_gemm"].default(one)
    alone = replace(config, tile_m=128, row_warpgroups=1, split_k_warpgroups=1, cluster_k=1, cluster_n=1)
    both = [Candidate("sm90_packed_gemm", alone, one.activations)] * 2
    fewer = replace(one, n=64 * 132)
    assert lower_bound_us(one, both[0]) == pytest.approx(2 * lower_bound_us(fewer, both[1]))


def test_many_planes_of_many_tokens_cannot_win() -> None:
    one = product("w4a8", 4096, 4096, 4096)
    own = builtin(one)
    planes = [c for c in promising(one, 10**6, Map([])) if c.kernel == "sm90_bitplane_gemm"]
    assert planes
    assert all(lower_bound_us(one, c) > 2 * lower_bound_us(one, own) for c in planes)


def test_what_has_no_bound_of_its_own_has_none() -> None:
    one = product("w4a16g128", 1, 4096, 4096)
    assert lower_bound_us(one, builtin(one)) == 0.0


def test_planes_side_by_side_are_bounded_as_other_large_tiles() -> None:
    one = product("w2a2", 1024, 28672, 4096)
    config = FAMILIES["sm90_bitplane_stacked"].default(one)
    wide = Candidate("sm90_bitplane_stacked", config, one.activations)
    assert 0.5 < lower_bound_us(replace(one, m=2048), wide) / lower_bound_us(one, wide) / 2 < 1.1
    assert 20.0 < lower_bound_us(one, wide) < 100.0  # 66 us at 3,600 TOPS, which nothing has reached
