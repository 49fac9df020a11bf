"""sm90_bitplane_stacked.cuh on the CPU: stationary operands, short pipelines, ragged sizes."""

from typing import Any

import pytest

from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Stationary
from anybit.kernels.common.types import Output
from cases_bitplane import check_emulated, emulated, stacked

STATIONARY = {"stationary": Stationary.activations}


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "tile_m", "change"),
    [
        ("w1a2", 300, 304, 2100, 128, {"activation_stages": 3, "weight_stages": 3} | STATIONARY),
        ("w2a2bipolar-xasym", 300, 136, 3100, 128, {"weight_stages": 3}),
        ("w3a2asym-xasym", 150, 200, 1000, 64, {"epilogue_tile": 64, "epilogue_stages": 2, "weight_stages": 4}),
        ("w2a2asym-xbipolar", 140, 264, 3100, 64, {"weight_stages": 8}),
        ("w2a2", 500, 264, 2000, 128, {"weight_stages": 4} | STATIONARY),
    ],
)
def test_planes_side_by_side(scheme: str, m: int, n: int, k: int, tile_m: int, change: dict[str, Any]) -> None:
    asked = emulated(scheme, m, n, k, Output.bf16 if m == 150 else Output.f16)
    check_emulated(asked, stacked(asked, tile_m, **change), seed=m + n, bias=n == 200)
