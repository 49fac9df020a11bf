"""The wgmma bit-plane kernels on the CPU: every kind of tile, the three code families, ragged everywhere.

Every 37th of the 192 pairs of widths and code families is tested, and resident tiles with 16-bit results; all pairs,
and integers, with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import pytest

from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm.sm90_bitplane_gemm import Schedule
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import EXHAUSTIVE, PAIRS, SEEDS
from cases_bitplane import TOKENS_A, check_emulated, code_pairs, emulated, gemm, resident, rings, skinny

EVERY = [(p, q, codes) for p, q in PAIRS for codes in code_pairs()[:3]]
EVERY = EVERY if EXHAUSTIVE else EVERY[::37]
RINGS = {"weight_chunks": 2, "activation_chunks": 2}


def problem(scheme: str, m: int, n: int, k: int, output: Output = Output.s32) -> LinearProblem:
    return emulated(scheme, m, n, k, output)


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 9, 70, 2100, {"tile_b": 8}),
        ("w2a3asym-xasym", 5, 20, 1100, {"tile_b": 8, **rings(3, 2, 2)}),
        ("w3a2bipolar-xasym", 33, 72, 3000, {"tile_b": 16, "cluster_k": 2}),
        ("w2a2asym-xbipolar", 3, 65, 4200, {"tile_b": 8, "cluster_k": 4}),
        ("w2a1", 20, 40, 2500, TOKENS_A),
        ("w3a4", 70, 50, 2100, TOKENS_A | {**rings(4, 3, 3)}),
        ("w1a1", 23, 40, 5000, TOKENS_A | {"a_stages": 4}),  # more chunks than stages
        ("w1a2bipolar-xasym", 12, 33, 2100, TOKENS_A | {"cluster_k": 2}),
        ("w1a3asym-xasym", 70, 70, 3100, TOKENS_A | rings(4, 4, 2)),
    ],
)
def test_kernels_multiply_few_tokens(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    asked = problem(scheme, m, n, k)
    for seed in SEEDS:
        check_emulated(asked, skinny(asked, **change), seed)


@pytest.mark.parametrize(("p", "q", "codes"), EVERY)
def test_every_pair_is_exact(p: int, q: int, codes: tuple[str, str]) -> None:
    scheme = str(Scheme(WeightFormat(p, codes[0]), ActivationFormat(q, codes[1])))
    few, many = problem(scheme, 11, 70, 1100), problem(scheme, 70, 132, 1031)
    check_emulated(few, skinny(few, 8))
    check_emulated(many, gemm(many, 64))


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 40, 64, 2100, {"tile_b": 32}),
        ("w2a3asym-xasym", 37, 136, 2000, {"tile_b": 32}),
        ("w3a2bipolar-xasym", 64, 70, 4000, TOKENS_A | {"fill_waves": True, "accumulator_sets": 2}),
        (
            "w2a2",
            64,
            64,
            2100,
            TOKENS_A | {"reserved_bytes": 64, "fill_waves": True, "accumulator_sets": 2, "prologue_stages": 1},
        ),
        ("w1a2asym", 21, 300, 2100, {"tile_b": 16}),
        ("w2a1", 100, 96, 4096, {"tile_b": 16, "a_operand": AOperand.activations, "prologue_stages": 0}),
        ("w4a2", 70, 128, 2100, {"tile_b": 32, "accumulator_sets": 2, "prologue_stages": 2}),
        ("w3a3asym", 64, 120, 2100, {"tile_b": 32, "accumulator_sets": 3}),
        ("w4a4", 40, 64, 2100, {"tile_b": 32, "accumulator_sets": 3, "prologue_stages": 1}),
        (
            "w3a4",
            37,
            136,
            3100,
            {"tile_b": 32, "accumulator_sets": 3, "prologue_stages": 1, "cp_async_activations": True},
        ),
        ("w2a2-xasym", 70, 72, 2100, TOKENS_A | {"prologue_stages": 2, "cp_async_activations": True}),
        ("w1a4", 21, 100, 1100, {"tile_b": 16, "cp_async_activations": True}),
    ],
)
def test_everything_of_a_tile_at_resident(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    for output in (Output.s32, Output.f16) if EXHAUSTIVE else (Output.f16,):
        asked = problem(scheme, m, n, k, output)
        check_emulated(asked, resident(asked, **change), bias=output is Output.f16)
    check_emulated(asked, resident(asked, **change), seed=1, padding=3)  # unaligned rows


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 70, 200, 2100, {"tile_m": 64, "schedule": Schedule.cooperative}),
        ("w2a3asym-xasym", 50, 140, 3000, {"tile_m": 64}),
        ("w3a1bipolar-xasym", 130, 100, 1000, {"tile_m": 128}),
        ("w2a1", 300, 300, 1100, {"tile_m": 128}),
        ("w1a2", 100, 300, 2000, {"tile_m": 64, "schedule": Schedule.pingpong, **RINGS}),
        ("w1a2", 200, 100, 1100, {"tile_m": 256}),
    ],
)
def test_gemm_multiplies_many_tokens(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    asked = problem(scheme, m, n, k)
    for seed in SEEDS:
        check_emulated(asked, gemm(asked, **change), seed)


@pytest.mark.parametrize("output", [Output.f16, Output.bf16, Output.f32])
def test_results_are_rounded_resident(output: Output) -> None:
    for n, padding in ((72, 0), (71, 2), (72, 8)):
        asked = problem("w2a3-xasym", 66, n, 1024, output)
        check_emulated(asked, gemm(asked, tile_m=64), padding=padding, bias=True)
        if output is not Output.f32 and n % 8 == 0:
            config = gemm(asked, tile_m=64, tma_store=True, epilogue_stages=2 + padding // 8)
            check_emulated(asked, config, padding=padding, bias=True)
        check_emulated(asked, skinny(asked, 16), padding=padding, bias=True)


def test_tma_stores_want_whole_sixteens() -> None:
    asked = problem("w2a2", 5, 71, 1024, Output.f16)
    assert "N % 8 == 0" in (sm90_bitplane_gemm.why_not(asked, gemm(asked, tile_m=64, tma_store=True)) or "")
