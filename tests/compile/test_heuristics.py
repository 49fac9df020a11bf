"""Kernels for few tokens compile without spills, to the intended instructions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from machine_code import check, count, sass

from anybit import jit
from anybit.choose import heuristics
from anybit.device import Device
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

HOPPER = Device.named("sm_90a")


def problem(bits: int, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, code: str = "sym") -> LinearProblem:
    return LinearProblem(m, n, k, WeightFormat(bits, code, 128), dtype=dtype, device=HOPPER)


@pytest.mark.parametrize(
    ("bits", "m", "dtype"),
    [(1, 1, torch.float16), (3, 2, torch.bfloat16), (4, 1, torch.float16), (8, 4, torch.float16)],
)
def test_digits(bits: int, m: int, dtype: torch.dtype) -> None:
    for n, k in ((4096, 4096), (28672, 4096)):
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
    for n, k in ((6144, 4096), (28672, 4096)):
        it = problem(bits, m, n, k)
        check(sm90_packed_gemv.norm_kernel(sm90_packed_gemv.norm_default(it)), "sm_90a", has="IMMA", lacks="HMMA")


def test_digits_that_end_with_something_else() -> None:
    """Fused SiLU, whose division is a call, or rotary embedding and store: no spills."""
    for bits, m in ((4, 1), (3, 2), (1, 2)):
        gate_up, qkv = (sm90_packed_gemv.norm_default(problem(bits, m, n, 4096)) for n in (28672, 6144))
        check(sm90_packed_gemv.rotary_kernel(qkv), "sm_90a", has="IMMA", lacks="HMMA")
        silu = sm90_packed_gemv.norm_kernel(gate_up, silu=True)
        compiled = jit.cached(silu, "sm_90a")
        assert compiled.spill_bytes == compiled.stack_bytes == 0 and compiled.registers * silu.threads <= 65536


def test_gate_up_lets_the_next_kernel_begin_as_measured() -> None:
    def trigger(bits: int, m: int, n: int) -> int:
        config = sm90_packed_gemv.norm_default(problem(bits, m, n, 4096))
        return heuristics.limit_occupancy_normed(config, HOPPER).trigger - config.trigger

    assert [trigger(bits, 1, 28672) for bits in (4, 2, 3)] == [1, -1, 0]
    assert trigger(4, 1, 6144) == trigger(4, 2, 28672) == 0


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
    wide = sm90_packed_gemv.default(problem(bits, m, 4096, 14336))  # not all activations at hand: apart from its like
    assert wide.x_resident or 2 * (sm90_packed_gemv.shared_bytes(heuristics.limit_occupancy(wide, HOPPER)) + 1024) > sm
    for n, k in ((4096, 4096), (576, 1536)):
        config = heuristics.limit_occupancy(sm90_packed_gemv.default(problem(bits, m, n, k)), HOPPER)
        assert (
            2 * (sm90_packed_gemv.shared_bytes(config) + 1024)
            <= sm
            < 3 * (sm90_packed_gemv.shared_bytes(config) + 1024)
        )
        of_four = heuristics.limit_occupancy(sm90_packed_gemv.default(problem(bits, 4, n, k)), HOPPER)
        assert of_four.chunks > 1 or 2 * (sm90_packed_gemv.shared_bytes(of_four) + 1024) > sm


def test_codes_stay_where_they_lie() -> None:
    """Four bits: a mask per four codes and no shift, in the main loop."""
    compiled = check(sm90_packed_gemv.kernel(sm90_packed_gemv.default(problem(4, 1, 28672, 4096))), "sm_90a")
    units = count(compiled.cubin, "IMMA") // 4
    assert count(compiled.cubin, "LOP3.*0xf0f0f0f") == 16 * units


@pytest.mark.parametrize(
    ("bits", "m", "dtype"),
    [(4, 3, torch.float16), (2, 8, torch.bfloat16), (4, 16, torch.float16), (8, 32, torch.float16)],
)
def test_mid(bits: int, m: int, dtype: torch.dtype) -> None:
    for n, k in ((4096, 14336), (28672, 4096)):
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


def test_sparse_weights_and_int8_beside_the_next_product() -> None:
    """Alone in a chain two blocks per SM, with all weights prefetched; among small kernels one, and fewer."""
    parsed = Scheme.parse("w4a8s24")
    it = LinearProblem(16, 4096, 4096, parsed.weights, parsed.activations)
    chosen = sm90_packed_gemm.default(it)
    alone = heuristics.among_small(it, chosen)
    assert (chosen.min_blocks_per_sm, alone.min_blocks_per_sm) == (2, 1)
    assert chosen.prologue_stages == chosen.stages and alone.prologue_stages < alone.stages


@pytest.mark.parametrize("scheme", ["w4a16g128", "w8a16g32", "w3a16g64asym", "w4a8", "w4a8fp", "w8a8", "w4a8s24"])
def test_one_block_is_always_legal(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    for m in (9, 16, 32, 64):
        for n, k in ((4096, 14336), (576, 1536)):
            it = LinearProblem(m, n, k, parsed.weights, parsed.activations)
            close = [config for config in sm90_packed_gemm.configs(it) if config.min_blocks_per_sm > 1]
            assert close and all(
                sm90_packed_gemm.why_not(it, heuristics.among_small(it, config)) is None for config in close
            )


@pytest.mark.parametrize(
    ("n", "k", "kernels"),
    [
        (5120, 25600, {3: sm90_packed_skinny, 4: sm90_packed_skinny, 8: None}),
        (
            8192,
            28672,
            {3: sm90_packed_gemv, 4: sm90_packed_gemv, 5: sm90_packed_skinny_f16, 8: sm90_packed_skinny_f16, 9: None},
        ),
        (4096, 14336, {3: sm90_packed_skinny_f16, 4: sm90_packed_skinny_f16, 6: sm90_packed_skinny_f16, 8: None}),
        (5120, 17408, {1: sm90_packed_skinny, 2: sm90_packed_gemv}),
        (4096, 11008, {4: sm90_packed_skinny_f16, 6: None}),
        (576, 576, {1: sm90_packed_gemv, 2: sm90_packed_skinny, 3: sm90_packed_skinny, 8: sm90_packed_skinny}),
        (2048, 8192, {1: sm90_packed_skinny_f16, 2: sm90_packed_skinny_f16, 8: sm90_packed_skinny_f16}),
        (
            4096,
            4096,
            {1: sm90_packed_gemv, 2: sm90_packed_gemv, 4: sm90_packed_skinny_f16, 6: sm90_packed_skinny_f16, 8: None},
        ),
        (6144, 4096, {1: sm90_packed_gemv, 2: sm90_packed_gemv, 4: sm90_packed_skinny_f16, 8: sm90_packed_skinny_f16}),
        (
            7168,
            5120,
            {1: sm90_packed_skinny, 2: sm90_packed_gemv, 4: sm90_packed_gemv, 6: sm90_packed_skinny_f16, 8: None},
        ),
        (22016, 4096, {2: sm90_packed_gemv, 4: sm90_packed_gemv, 6: None}),
        (28672, 4096, {2: sm90_packed_gemv, 4: sm90_packed_skinny_f16, 6: None}),
        (37888, 3584, {4: sm90_packed_skinny_f16, 6: sm90_packed_skinny_f16, 8: sm90_packed_skinny_f16}),
    ],
)
def test_layers_run_what_was_fastest(n: int, k: int, kernels: dict[int, GemmKernel[Any] | None]) -> None:
    """On an H200, us at 3 tokens: 21.1 (f16 kernel: 23.5), 31.8 (33.6), and 10.6 (skinny: 12.2)."""
    assert {m: heuristics.kernel(problem(4, m, n, k)) for m in kernels} == kernels


@pytest.mark.parametrize(
    ("n", "k", "kernels"),
    [
        (576, 576, {6: sm90_packed_skinny, 8: sm90_packed_skinny, 9: None}),
        (3072, 576, {8: sm90_packed_skinny}),
        (4224, 1536, {8: sm90_packed_skinny}),
        (4288, 1536, {8: None}),
        (4096, 1920, {8: sm90_packed_skinny}),
        (4096, 2048, {6: sm90_packed_skinny, 8: None}),
    ],
)
def test_small_layers_of_int8_run_what_was_fastest(n: int, k: int, kernels: dict[int, GemmKernel[Any] | None]) -> None:
    """On an H200, 576 x 576 at 8 tokens took 2.7 us, and 3.8 by sm90_packed_gemm."""
    weights = WeightFormat(4, "sym", None)
    its = {m: LinearProblem(m, n, k, weights, ActivationFormat(8, "sym"), device=HOPPER) for m in kernels}
    assert {m: heuristics.kernel(it) for m, it in its.items()} == kernels


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
