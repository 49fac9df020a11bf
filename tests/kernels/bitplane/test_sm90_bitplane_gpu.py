"""The wgmma bit-plane kernels on a GPU: every pair of widths and code family is exact, with ragged edges.

Every seventh of the 192 pairs and families is tested, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from anybit.codes import reference
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane, bitplane_layout
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm.sm90_bitplane_gemm import Schedule
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import PAIRS, quantized, random_weight
from cases_bitplane import (
    H200,
    TOKENS_A,
    assert_right,
    check_on_gpu,
    code_pairs,
    gemm,
    multiply,
    operands,
    resident,
    rings,
    skinny,
)


def present() -> bool:
    return torch.cuda.is_available() and Device.of(torch.empty(0, device="cuda")).arch == "sm_90a"


pytestmark = pytest.mark.skipif(not present(), reason="needs an sm_90 GPU")

EXACT = [(p, q, *codes) for (p, q), codes in itertools.product(PAIRS, code_pairs()[:3])]
EXACT = EXACT if os.environ.get("ANYBIT_EXHAUSTIVE") else EXACT[::7]
TOKENS = [1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 100, 129, 255, 257, 1000, 1024, 4097]
EDGES = [(5, 1, 1), (130, 7, 31), (3, 8, 255), (70, 63, 1023), (66, 65, 1025), (9, 129, 5000), (129, 1000, 14336)]
OUTPUTS = [Output.f16, Output.bf16, Output.f32]
MANY: list[dict[str, Any]] = [
    {"tile_m": 64, "schedule": Schedule.cooperative},
    {"tile_m": 128, "epilogue_tile": 64},
    {"tile_m": 256, "epilogue_tile": 64},
    {"tile_m": 128, "epilogue_tile": 128, "epilogue_stages": 2, "weight_chunks": 2, "activation_chunks": 2},
    {"tile_m": 64, "activation_chunks": 3, "weight_chunks": 3, "schedule": Schedule.pingpong},
]
FEW: list[dict[str, Any]] = [
    *({"tile_b": b, "cluster_k": c} for b, c in [(8, 1), (8, 4), (16, 2), (32, 1)]),
    {"tile_b": 32, **rings(5, 3, 3)},
    TOKENS_A | rings(3, 4, 2),
    TOKENS_A | {"cluster_k": 2},
    TOKENS_A | {"tile_b": 64, "wgmma_n": 128, **rings(9, 3, 3)},
]
WHOLE: list[dict[str, Any]] = [
    {"tile_b": 32, "fill_waves": True},
    {"tile_b": 32, "accumulator_sets": 2, "prologue_stages": 1, "fill_waves": True},
    {"tile_b": 16, "reserved_bytes": 4096},
    {"tile_b": 32, "prologue_stages": 1, "cp_async_activations": True},
    TOKENS_A | {"accumulator_sets": 2, "prologue_stages": 2, "cp_async_activations": True},
    TOKENS_A | {"accumulator_sets": 3, "prologue_stages": 2},
    TOKENS_A | {"accumulator_sets": 2},
]
VARIANTS = [(gemm, one) for one in MANY] + [(skinny, one) for one in FEW] + [(resident, one) for one in WHOLE]
AT_ONCE: list[dict[str, Any]] = [
    {"tile_b": 32, "fill_waves": True},
    {"tile_b": 32, "accumulator_sets": 2, "prologue_stages": 1, "fill_waves": True},
    TOKENS_A | {"accumulator_sets": 2},
    {"tile_b": 32, "accumulator_sets": 2, "prologue_stages": 1, "cp_async_activations": True},
    TOKENS_A | {"accumulator_sets": 2, "prologue_stages": 1, "cp_async_activations": True},
    {"tile_b": 16, "accumulator_sets": 2},
]


def asked(m: int, n: int, k: int, scheme: str | Scheme, output: Output = Output.s32) -> LinearProblem:
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, output.dtype, H200)


def exact_problems(p: int, q: int, w: str, x: str) -> list[LinearProblem]:
    scheme = Scheme(WeightFormat(p, w), ActivationFormat(q, x))
    return [asked(m, 200, 1100, scheme) for m in (11, 150)]


@pytest.mark.parametrize(("p", "q", "w", "x"), EXACT)
def test_every_pair_is_exact(p: int, q: int, w: str, x: str) -> None:
    for problem in exact_problems(p, q, w, x):
        check_on_gpu(problem)


@pytest.mark.parametrize("m", TOKENS)
def test_any_number_of_tokens(m: int) -> None:
    check_on_gpu(asked(m, 136, 2048, "w2a2"), padding=3)


@pytest.mark.parametrize(("m", "n", "k"), EDGES)
def test_ragged_weights_and_k(m: int, n: int, k: int) -> None:
    check_on_gpu(asked(m, n, k, "w3a2asym-xbipolar"))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("m", [20, 300])
def test_results_are_rounded_once(m: int, output: Output) -> None:
    problem = asked(m, 264, 1500, "w2a3-xasym", output)
    check_on_gpu(problem, bias=True)
    check_on_gpu(problem, padding=1)  # rows not aligned to 16 bytes
    check_on_gpu(asked(m, 263, 1500, "w2a3-xasym", output))


@pytest.mark.parametrize("tile_m", [128, 256])
def test_blocks_walk_more_than_a_wave(tile_m: int) -> None:
    problem = asked(1000, 6000, 2100, "w1a1", Output.f16)
    check_on_gpu(problem, gemm(problem, tma_store=True, tile_m=tile_m))


@pytest.mark.parametrize(("make", "change"), VARIANTS, ids=str)
def test_every_kind_of_config(make: Callable[..., Any], change: dict[str, Any]) -> None:
    problem = asked(300, 328, 2100, "w2a3asym")
    config = make(problem, **change)
    assert bitplane.family_of(config).why_not(problem, config) is None
    check_on_gpu(problem, config)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("m", "n", "rows"), [(300, 328, 32), (300, 320, 64), (5, 8, 32)])
def test_gemm_stores_through_tma(m: int, n: int, rows: int, stages: int) -> None:
    problem = asked(m, n, 2100, "w2a3asym", Output.f16)
    config = gemm(problem, 128, tma_store=True, epilogue_tile=rows, epilogue_stages=stages)
    assert sm90_bitplane_gemm.why_not(problem, config) is None
    check_on_gpu(problem, config, padding=8, bias=True)
    with pytest.raises(KernelError, match="16-byte aligned rows"):
        check_on_gpu(problem, config, padding=3)
    check_on_gpu(problem, replace(config, tma_store=False), padding=3)


@pytest.mark.parametrize("m", [64, 4096])
def test_large_layer_and_repeats(m: int) -> None:
    problem = asked(m, 28672, 4096, "w1a1", Output.f16)
    given = operands(m, 28672, 4096, problem.weights, problem.activations, "cuda")
    y = torch.empty(m, 28672, dtype=torch.float16, device="cuda")
    first = multiply(given.x, given.weight, y).clone()
    assert_right(given, first)
    for _ in range(20):
        assert torch.equal(first, multiply(given.x, given.weight, y))


@pytest.mark.parametrize("change", AT_ONCE, ids=str)
def test_chains_of_products_that_overlap(change: dict[str, Any]) -> None:
    """Kernels that load weights while their predecessors still run: every result is the same."""
    problem = asked(64, 4096, 4096, "w2a2", Output.f16)
    config = resident(problem, **change)
    assert sm90_bitplane_resident.why_not(problem, config) is None
    given = operands(64, 4096, 4096, problem.weights, problem.activations, "cuda")
    results = [multiply(given.x, given.weight, y, config) for y in torch.empty(24, 64, 4096, device="cuda").half()]
    assert_right(given, results[0])
    assert all(torch.equal(results[0], result) for result in results)


def test_after_quantize_and_pack() -> None:
    weight = random_weight(320, 1300, WeightFormat(4))
    x = torch.randn(33, 1300, generator=torch.Generator().manual_seed(5)).half()
    form = ActivationFormat(4, "sym")
    y = torch.empty(33, 320, dtype=torch.float16, device="cuda")
    multiply(quantized(x.cuda(), form), bitplane_layout.prepare(weight).to("cuda"), y)
    expected = reference.linear(x.double(), weight, form)
    assert bool(((y.cpu().double() - expected).abs() <= expected.abs() * 2**-10 + 1e-5).all())
