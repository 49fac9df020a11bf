"""Bit-plane products through mma.sync on the emulator: exact, ragged on every side."""

import pytest

from anybit.device import Device
from anybit.kernels.bitplane.bitplane_problem import facts
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, WeightFormat
from cases import SEEDS
from cases_bitplane import check_emulated

# m, n, k, weights, activations, output, tile_n, tile_m, warps (n, m, k), stage_k, stages
CASES = [
    (5, 20, 700, WeightFormat(2), ActivationFormat(3, "asym"), Output.s32, 32, 8, (1, 1, 4), 1024, 2),
    (9, 41, 300, WeightFormat(1, "bipolar"), ActivationFormat(1, "bipolar"), Output.f16, 32, 16, (2, 1, 2), 512, 2),
    (17, 40, 1100, WeightFormat(3, "asym"), ActivationFormat(2, "bipolar"), Output.bf16, 32, 32, (2, 2, 1), 256, 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemm_computes_the_product(case: tuple) -> None:
    m, n, k, weights, form, output, tile_n, tile_m, warps, stage_k, stages = case
    aligned = n % 8 == 0
    problem = LinearProblem(m, n, k, weights, form, output.dtype, Device.named("sm_80"), y_aligned=aligned)
    config = sm80_bitplane_gemm.Config(*facts(problem)[:5], False, aligned, tile_n, tile_m, *warps, stage_k, stages)
    for seed in SEEDS:
        check_emulated(problem, config, seed, bias=output is not Output.s32)
