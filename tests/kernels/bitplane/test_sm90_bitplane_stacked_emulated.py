"""sm90_bitplane_stacked.cuh on the CPU: stationary operands, short pipelines, lagging warpgroups, ragged sizes."""

from typing import Any

import pytest
import torch

import emulate
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Stationary
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from cases_bitplane import DEPENDENT, emulated, on_host, operands, stacked

pytestmark = pytest.mark.emulate


def run(asked: LinearProblem, config: sm90_bitplane_stacked.Config, seed: int, bias: bool = False) -> None:
    assert sm90_bitplane_stacked.why_not(asked, config) is None
    m, n, k = asked.m, asked.n, asked.k
    given = operands(m, n, k, asked.weights, asked.activations, seed=seed)
    y = torch.full((m, n), 77, dtype=asked.output.dtype)
    added = torch.linspace(-1, 1, n) if bias else None
    params = on_host(given, y, added, emulate.Box(y, 64, config.tma_rows))
    grid = sm90_bitplane_stacked.grid(asked, config)
    emulate.run(sm90_bitplane_stacked.kernel(config), params, grid, seed=seed, dependent=DEPENDENT)
    expected = given.exact * given.unit + (0 if added is None else added.double())
    step = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype] + 2**-21
    assert bool(((y.double() - expected).abs() <= expected.abs() * step + 1e-6).all())


def problem(scheme: str, m: int, n: int, k: int, output: Output = Output.f16) -> LinearProblem:
    return emulated(scheme, m, n, k, output)


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "tile_m", "change"),
    [
        (
            "w1a2",
            300,
            304,
            2100,
            128,
            {"activation_stages": 3, "weight_stages": 3, "stationary": Stationary.activations, "warpgroup_lag": 2},
        ),
        ("w2a2bipolar-xasym", 300, 136, 3100, 128, {"weight_stages": 3, "warpgroup_lag": 1}),
        (
            "w3a2asym-xasym",
            150,
            200,
            1000,
            64,
            {"epilogue_tile": 64, "epilogue_stages": 2, "weight_stages": 4, "warpgroup_lag": 1},
        ),
        ("w2a2asym-xbipolar", 140, 264, 3100, 64, {"weight_stages": 8, "stationary": Stationary.weights}),
        ("w2a2", 500, 264, 2000, 128, {"stationary": Stationary.activations, "weight_stages": 4}),
    ],
)
def test_planes_side_by_side(scheme: str, m: int, n: int, k: int, tile_m: int, change: dict[str, Any]) -> None:
    asked = problem(scheme, m, n, k, Output.bf16 if m == 150 else Output.f16)
    run(asked, stacked(asked, tile_m, **change), seed=m + n, bias=n == 200)
