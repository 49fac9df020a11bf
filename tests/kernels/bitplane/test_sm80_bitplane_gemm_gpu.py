"""Bit-plane products through mma.sync on a GPU: exact."""

import pytest

from anybit.device import Device
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, WeightFormat
from cases import EXHAUSTIVE, PAIRS
from cases_bitplane import check_on_gpu

CODES = ["sym", "asym", "bipolar"]
RAGGED = [(1, 1, 1), (1, 8, 128), (7, 5, 33), (65, 129, 1025), (4097, 24, 256), (130, 264, 4096), (2, 576, 1536)]


WIDTHS = PAIRS if EXHAUSTIVE else [(1, 1), (1, 7), (2, 5), (4, 4), (8, 8)]
OUTPUTS = [Output.f16, Output.bf16, Output.f32] if EXHAUSTIVE else [Output.f16]
EVERY_CONFIG = [(1, 1), (2, 2), (4, 4), (3, 8)] if EXHAUSTIVE else [(3, 8)]


def code_of(p: int, q: int) -> tuple[str, str]:
    return CODES[(p + q) % 3], CODES[(p + 2 * q) % 3]


def problem_of(m: int, n: int, k: int, p: int, q: int, codes: tuple[str, str], output: Output) -> LinearProblem:
    formats = WeightFormat(p, codes[0]), ActivationFormat(q, codes[1])
    return LinearProblem(m, n, k, *formats, output.dtype, Device.named("sm_90a"), y_aligned=n % 8 == 0)


def sampled(problem: LinearProblem) -> tuple[sm80_bitplane_gemm.Config, ...]:
    return sm80_bitplane_gemm.configs(problem)[:: 1 if EXHAUSTIVE else 5]


def run(
    m: int, n: int, k: int, p: int, q: int, codes: tuple[str, str], *outputs: Output, every_config: bool = False
) -> None:
    integers = problem_of(m, n, k, p, q, codes, Output.s32)
    for config in (sm80_bitplane_gemm.default(integers), *(sampled(integers) if every_config else ())):
        check_on_gpu(integers, config)
    for output in outputs:
        problem = problem_of(m, n, k, p, q, codes, output)
        check_on_gpu(problem, sm80_bitplane_gemm.default(problem), bias=True)


@pytest.mark.parametrize(("p", "q"), WIDTHS)
def test_gemm_multiplies_all_widths(p: int, q: int) -> None:
    run(19, 72, 1100, p, q, code_of(p, q), Output.f16)


@pytest.mark.parametrize("weight_code", CODES)
@pytest.mark.parametrize("token_code", CODES)
def test_gemm_multiplies_all_codes(weight_code: str, token_code: str) -> None:
    run(33, 136, 2500, 3, 2, (weight_code, token_code), *OUTPUTS)


@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_gemm_takes_ragged_shapes(m: int, n: int, k: int) -> None:
    run(m, n, k, 2, 2, ("sym", "sym"), Output.f16)
    run(m, n, k, 1, 4, ("bipolar", "asym"), Output.f16)


@pytest.mark.parametrize(("p", "q"), EVERY_CONFIG)
def test_gemm_is_right_with_every_config(p: int, q: int) -> None:
    run(70, 200, 3000, p, q, ("asym", "asym"), every_config=True)
