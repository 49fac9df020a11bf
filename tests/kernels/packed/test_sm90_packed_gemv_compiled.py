"""Kernels for few tokens compile without spills, to the intended instructions.

A format is compiled for one layer, for two with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from anybit import jit
from anybit.choose import heuristics
from anybit.device import Device
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_gemv.sm90_packed_gemv import NormParams, RotaryParams
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import Scheme, WeightFormat
from cases import EXHAUSTIVE, in_turn
from machine_code import check, count, sass

HOPPER = Device.named("sm_90a")


def problem(bits: int, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, code: str = "sym") -> LinearProblem:
    return LinearProblem(m, n, k, WeightFormat(bits, code, 128), dtype=dtype, device=HOPPER)


@pytest.mark.parametrize(
    ("bits", "m", "dtype"),
    [(1, 1, torch.float16), (3, 2, torch.bfloat16), (4, 1, torch.float16), (8, 4, torch.float16)],
)
def test_digits_do_not_spill(bits: int, m: int, dtype: torch.dtype) -> None:
    for n, k in in_turn((4096, 4096), (28672, 4096), at=bits == 4):
        it = problem(bits, m, n, k, dtype)
        check(sm90_packed_gemv.kernel(sm90_packed_gemv.default(it)), "sm_90a", has="IMMA", lacks="HMMA")


@pytest.mark.parametrize(
    ("scheme", "m", "dtype"),
    [
        ("w4a16g32e2m1", 1, torch.float16),
        ("w4a16g16e2m1", 2, torch.float16),
        ("w4a16g32e2m1", 4, torch.bfloat16),
        ("w4a16g64nf4", 1, torch.float16),
        ("w8a16g128e4m3", 2, torch.bfloat16),
    ],
)
def test_tables_are_multiplied_as_floats(scheme: str, m: int, dtype: torch.dtype) -> None:
    it = LinearProblem(m, 28672, 4096, Scheme.parse(scheme).weights, dtype=dtype)
    check(sm90_packed_gemv.kernel(sm90_packed_gemv.default(it)), "sm_90a", has="HMMA", lacks="IMMA")


def test_e2m1_takes_eight_instructions_for_eight_codes() -> None:
    """Four ANDs, as for symmetric codes, and four shifts, mostly done by IMAD."""
    ands = {}
    for scheme in ("w4a16g32", "w4a16g32e2m1"):
        it = LinearProblem(8, 28672, 4096, Scheme.parse(scheme).weights)
        found = sass(jit.cached(sm90_packed_skinny_f16.kernel(sm90_packed_skinny_f16.default(it)), "sm_90a").cubin)
        ands[scheme] = sum(one.startswith("LOP3") for one in found)
    assert ands["w4a16g32e2m1"] <= ands["w4a16g32"]


@pytest.mark.parametrize(("bits", "m"), [(4, 1), (4, 2), (2, 1), (3, 2)])
def test_digits_of_a_norm(bits: int, m: int) -> None:
    for n, k in in_turn((6144, 4096), (28672, 4096), at=bits + m):
        it = problem(bits, m, n, k)
        check(
            sm90_packed_gemv.kernel(sm90_packed_gemv.norm_default(it), NormParams), "sm_90a", has="IMMA", lacks="HMMA"
        )


def test_digits_that_end_with_something_else() -> None:
    """Fused SiLU, whose division is a call, or rotary embedding and store: no spills."""
    for bits, m in ((4, 1), (3, 2), (1, 2)):
        gate_up, qkv = (sm90_packed_gemv.norm_default(problem(bits, m, n, 4096)) for n in (28672, 6144))
        check(sm90_packed_gemv.kernel(qkv, RotaryParams), "sm_90a", has="IMMA", lacks="HMMA")
        silu = sm90_packed_gemv.kernel(gate_up, NormParams, silu=True)
        compiled = jit.cached(silu, "sm_90a")
        assert compiled.spill_bytes == compiled.stack_bytes == 0 and compiled.registers * silu.threads <= 65536


def test_gate_up_triggers_the_next_kernel_as_measured() -> None:
    def triggers(bits: int, m: int, n: int) -> tuple[int, int]:
        config = sm90_packed_gemv.norm_default(problem(bits, m, n, 4096))
        return config.trigger, heuristics.limit_occupancy_normed(replace(config, trigger=3), HOPPER).trigger

    assert [triggers(bits, 1, 28672)[1] for bits in (4, 2, 3)] == [1, 0, 3]
    assert triggers(4, 1, 6144)[1] == triggers(4, 2, 28672)[1] == 3


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("m", [1, 2])
def test_room_for_one_block_of_the_next(bits: int, m: int) -> None:
    """In a fused layer, any two blocks fit an SM, except two blocks of a product with a fused norm."""
    sm = HOPPER.shared_bytes + 1024  # including 1 KB per block
    for n, k in ((6144, 4096), (28672, 4096), (960, 576), (3072, 576)):
        it = replace(problem(bits, m, n, k), columns=-(-k // 128) * 128)
        config = heuristics.limit_occupancy_normed(sm90_packed_gemv.norm_default(it), HOPPER)
        assert sm90_packed_gemv.norm_why_not(it, config) is None
        assert 2 * (sm90_packed_gemv.shared_bytes(config) + 1024) > sm
    for n, k in ((2048, 4096), (576, 1536)):
        whole = replace(sm90_packed_gemv.default(problem(bits, m, n, k)), x_resident=True)
        config = heuristics.limit_occupancy(whole, HOPPER)
        assert whole.chunks == 1
        assert sm90_packed_gemv.shared_bytes(whole) <= sm90_packed_gemv.shared_bytes(config)
        assert 3 * (sm90_packed_gemv.shared_bytes(config) + 1024) > sm
        split = heuristics.limit_occupancy(replace(whole, x_resident=False), HOPPER)
        assert 2 * (sm90_packed_gemv.shared_bytes(split) + 1024) > sm


def test_codes_stay_where_they_lie() -> None:
    """Four bits: a mask per four codes and no shift, in the main loop."""
    compiled = check(sm90_packed_gemv.kernel(sm90_packed_gemv.default(problem(4, 1, 28672, 4096))), "sm_90a")
    units = count(compiled.cubin, "IMMA") // 4
    assert count(compiled.cubin, "LOP3.*0xf0f0f0f") == 16 * units


@pytest.mark.parametrize(
    ("bits", "m", "dtype"),
    [(4, 3, torch.float16), (2, 8, torch.bfloat16), (4, 16, torch.float16), (8, 32, torch.float16)],
)
def test_mid_token_counts_do_not_spill(bits: int, m: int, dtype: torch.dtype) -> None:
    for n, k in in_turn((4096, 14336), (28672, 4096), at=bits // 4):
        it = problem(bits, m, n, k, dtype)
        check(sm90_packed_skinny_f16.kernel(sm90_packed_skinny_f16.default(it)), "sm_90a", has="HMMA")


def test_one_block_of_many_tokens_among_small_kernels() -> None:
    """Fused layers with more than 8 tokens: o and down at one block per SM, qkv at more, as usual."""
    for m, n, k, changes in (
        (16, 4096, 4096, True),
        (16, 4096, 14336, True),
        (16, 6144, 4096, False),
        (8, 4096, 4096, False),
    ):
        it = LinearProblem(m, n, k, WeightFormat(4, "sym", 128))
        chosen = sm90_packed_gemm.config_for(it, 16, 1, 2, 2, min_blocks_per_sm=2)
        found = heuristics.among_small(it, chosen)
        assert found == (replace(chosen, min_blocks_per_sm=1) if changes else chosen)
        assert sm90_packed_gemm.why_not(it, found) is None


@pytest.mark.parametrize("scheme", ["w4a16g128", "w8a16g32", "w3a16g64asym", "w4a8", "w4a8fp", "w8a8", "w4a8s24"])
def test_one_block_is_always_legal(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    for m in (9, 16, 32, 64):
        for n, k in ((4096, 14336), (576, 1536)):
            it = LinearProblem(m, n, k, parsed.weights, parsed.activations)
            close = [config for config in sm90_packed_gemm.configs(it) if config.min_blocks_per_sm > 1]
            close = close if EXHAUSTIVE else close[:: 1 + len(close) // 8]
            assert close and all(
                sm90_packed_gemm.why_not(it, heuristics.among_small(it, config)) is None for config in close
            )


@pytest.mark.parametrize(
    ("n", "units", "blocks"), [(33792, 16, 132), (34816, 17, 132), (38016, 18, 132), (38080, 16, 149), (57344, 16, 224)]
)
@pytest.mark.parametrize("family", [sm90_packed_gemv, sm90_packed_skinny])
def test_a_few_more_units_spare_a_second_wave(family: GemmKernel[Any], n: int, units: int, blocks: int) -> None:
    """34816 x 5120 took 34.1 us in 136 blocks on 132 SMs, and takes 25.6 now (int8, two tokens)."""
    it = problem(4, 2, n, 5120)
    config = family.default(it)
    assert it.block_units == units
    assert family.why_not(it, config) is None and family.grid(it, config)[0] == blocks


@pytest.mark.parametrize("module", [sm90_packed_gemv, sm90_packed_skinny, sm90_packed_skinny_f16])
def test_refit_finds_room(module: GemmKernel[Any]) -> None:
    there = problem(4, 2, 6144, 4096)
    like = module.default(there)
    for bits, n, k in ((4, 6144, 4096), (8, 28672, 4096), (1, 576, 576), (4, 8192, 28672)):
        here = problem(bits, 2, n, k)
        found = next(one for one in module.refit(here, like) if module.why_not(here, one) is None)
        assert found.bits == bits and found.warps <= like.warps
        assert n != 6144 or found.stages == like.stages
