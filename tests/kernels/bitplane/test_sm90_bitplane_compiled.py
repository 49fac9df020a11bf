"""The bit-plane GEMMs compile for sm_90a without a GPU: 1-bit MMAs in the machine code, no spills, no calls."""

import dataclasses
from typing import Any

import pytest

from anybit import jit
from anybit.device import Device
from anybit.jit import Kernel
from anybit.kernels.bitplane import bitplane, bitplane_problem
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import PAIRS
from cases_bitplane import default, resident, stacked
from machine_code import check, count

H200 = Device.named("sm_90a")


def problem(scheme: str, m: int, n: int = 4096, k: int = 4096, output: Output = Output.f16) -> LinearProblem:
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, output.dtype, H200)


def kernel_of(config: Any) -> Kernel:
    kernel: Kernel = bitplane.family_of(config).kernel(config)
    return kernel


@pytest.mark.parametrize(
    ("scheme", "m"),
    [("w1a1", 1), ("w2a2", 64), ("w4a4", 64), ("w1a1", 4096), ("w2a3asym-xasym", 4096), ("w4a4", 4096), ("w8a8", 300)],
)
def test_default_config_multiplies_bits_on_tensor_cores(scheme: str, m: int) -> None:
    check(kernel_of(default(problem(scheme, m))), "sm_90a", has=r"BGMMA.*AND\.POPC", lacks="BMMA")


def test_threads_copy_tokens_of_four_planes() -> None:
    copied = resident(problem("w3a4", 64), 32, AOperand.weights, cp_async_activations=True)
    check(kernel_of(copied), "sm_90a", has="LDGSTS", lacks="LDL")
    check(kernel_of(dataclasses.replace(copied, cp_async_activations=False)), "sm_90a", has="UBLKCP", lacks="LDGSTS")


@pytest.mark.parametrize(
    ("scheme", "change"),
    [
        ("w2a2", {"accumulator_sets": 2}),
        ("w4a4", {"accumulator_sets": 2}),
        ("w4a4", {"accumulator_sets": 3}),
        ("w3a4", {"accumulator_sets": 3}),
        ("w3a4", {"accumulator_sets": 3, "prologue_stages": 1, "cp_async_activations": True}),
    ],
)
def test_products_of_several_sets_of_sums_overlap(scheme: str, change: dict[str, Any]) -> None:
    """The assembler serializes MMAs unless it sees that accumulators are untouched until they complete."""
    asked = problem(scheme, 64)
    config = resident(asked, 32, AOperand.weights, **change)
    assert sm90_bitplane_resident.why_not(asked, config) is None
    cubin = jit.cached(sm90_bitplane_resident.kernel(config), "sm_90a").cubin
    products, waits = count(cubin, r"BGMMA"), count(cubin, r"WARPGROUP\.DEPBAR")
    assert products == 4 * 4 * config.weight_bits
    assert waits == 4 * (config.weight_bits - config.accumulator_sets) + 1


@pytest.mark.parametrize(("scheme", "m"), [("w1a2", 1024), ("w2a2", 1024), ("w2a2", 4096), ("w3a4", 4096)])
def test_products_of_large_tiles_wait_once_a_diagonal(scheme: str, m: int) -> None:
    """If MMAs run short of registers, the assembler waits after each."""
    config = sm90_bitplane_gemm.default(problem(scheme, m))
    diagonals = config.weight_bits + config.activation_bits - 1
    cubin = jit.cached(sm90_bitplane_gemm.kernel(config), "sm_90a").cubin
    assert count(cubin, r"WARPGROUP\.DEPBAR") == diagonals + 1


@pytest.mark.parametrize("scheme", ["w1a2", "w2a2", "w4a2asym-xasym"])
def test_results_are_written_while_the_next_products_run(scheme: str) -> None:
    """The accumulators of two tiles fit the registers, and the assembler adds no waits to the source's."""
    asked = problem(scheme, 1024)
    config = sm90_bitplane_stacked.default(asked)
    check(sm90_bitplane_stacked.kernel(config), "sm_90a", has=r"BGMMA.*AND\.POPC", lacks="BMMA")
    cubin = jit.cached(sm90_bitplane_stacked.kernel(config), "sm_90a").cubin
    assert count(cubin, r"BGMMA") == 4 * config.weight_bits
    assert count(cubin, r"WARPGROUP\.DEPBAR") == config.weight_bits + 1


def test_planes_side_by_side_are_refused_where_they_do_not_fit() -> None:
    asked = problem("w2a2", 1024)
    config = stacked(asked, 128)
    assert sm90_bitplane_stacked.why_not(asked, config) is None
    for other, reason in (
        (problem("w2a2", 64), "more than 64 tokens"),
        (problem("w2a4", 1024), "2-bit activations"),
        (problem("w2a2", 1024, n=4100), "N % 8 == 0, and N is 4100"),
        (problem("w2a2", 1024, output=Output.f32), "not float32"),
        (dataclasses.replace(asked, device=Device.named("sm_100a")), "emulated"),
    ):
        assert reason in (sm90_bitplane_stacked.why_not(other) or "")
    for change, reason in (
        ({"tile_m": 96}, "not 96"),
        ({"weight_stages": 12}, "bytes of shared memory"),
        ({"stationary": sm90_bitplane_stacked.Stationary.activations}, "activation_stages = 4"),
        ({"weight_bits": 3}, "other bit-widths"),
    ):
        assert reason in (sm90_bitplane_stacked.why_not(asked, dataclasses.replace(config, **change)) or ""), change
    for one in (asked, problem("w1a2", 4096, n=28672), problem("w3a2", 200, k=14336)):
        assert sm90_bitplane_stacked.default(one) in sm90_bitplane_stacked.configs(one)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_every_pair_has_configs(p: int, q: int) -> None:
    for m in (1, 33, 128, 4096):
        default(problem(f"w{p}a{q}", m))


def test_refuses_what_it_cannot_do() -> None:
    base = problem("w2a2", 64)

    def reason(**change: object) -> str:
        return bitplane_problem.why_not(dataclasses.replace(base, **change)) or ""

    assert bitplane_problem.why_not(base) is None
    assert "emulated on the integer units" in reason(device=Device.named("sm_100a"))
    assert "has no wgmma" in reason(device=Device.named("sm_80"))
    assert "groups of 128" in reason(weights=WeightFormat(2, "sym", 128))
    assert "need quantized activations, and these have 16 bits" in reason(activations=ActivationFormat())
    assert "overflow int32" in reason(weights=WeightFormat(8), activations=ActivationFormat(8, "sym"), k=40000)
    assert "is empty" in reason(m=0)


def test_every_listed_config_is_legal_and_fits() -> None:
    for scheme in ("w1a1", "w4a4", "w8a8"):
        for m in (1, 4096):
            asked = problem(scheme, m)
            for family in (sm90_bitplane_gemm, sm90_bitplane_skinny, sm90_bitplane_resident):
                configs = family.configs(asked)
                assert not configs or family.default(asked) in configs
                for config in configs:
                    assert family.shared_bytes(config) <= H200.shared_bytes
                    assert min(family.grid(asked, config)) >= 1
            assert default(asked) in bitplane.family(asked).configs(asked)


def test_tokens_that_threads_copy_come_in_sixteens() -> None:
    """128 threads copy 2048 bytes of a plane at a time: for a tile of 8 tokens they would copy nothing."""
    asked = problem("w3a4", 64)
    copied = resident(asked, 32, AOperand.weights, cp_async_activations=True)
    for tokens, legal in ((8, False), (16, True), (24, False), (32, True)):
        config = dataclasses.replace(copied, tile_b=tokens, wgmma_n=4 * tokens, prologue_stages=0, accumulator_sets=1)
        said = sm90_bitplane_resident.why_not(asked, config)
        assert said is None if legal else "copy 16 tokens of a plane at a time" in (said or "")
        assert sm90_bitplane_resident.why_not(asked, dataclasses.replace(config, cp_async_activations=False)) is None


def test_config_of_another_problem_is_refused() -> None:
    config = default(problem("w2a2", 64))
    assert "other bit-widths" in (bitplane.family_of(config).why_not(problem("w4a4", 64), config) or "")
    assert "needs float32" in (bitplane.family_of(config).why_not(problem("w2a2", 64, output=Output.f32), config) or "")
