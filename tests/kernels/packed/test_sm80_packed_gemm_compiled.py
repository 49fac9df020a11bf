"""sm80_packed_gemm.cuh compiles without spills for sm_80 to sm_120a; int4 tensor cores where they exist.

A part of the formats is compiled for each architecture, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import itertools

import pytest
import torch

from anybit import jit
from anybit.device import Device
from anybit.kernels.packed.repack import repack
from anybit.kernels.packed.rows import packed_rows
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.scheme import WeightFormat
from cases import EXHAUSTIVE
from cases_packed import problem
from machine_code import count


@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        ("sm_80", [(1, 4, torch.float16), (16, 4, torch.int8)]),
        ("sm_86", [(16, 3, torch.bfloat16)]),
        ("sm_89", [(16, 2, torch.int8)]),
        ("sm_90a", [(16, 4, torch.float16)]),
        ("sm_100a", [(64, 4, torch.int8)]),
        ("sm_120a", [(64, 4, torch.float16)]),
    ],
)
def test_gemm_does_not_spill(arch: str, cases: list[tuple[int, int, torch.dtype]]) -> None:
    device = Device.named(arch)
    for m, bits, dtype in cases:
        config = sm80_packed_gemm.default(problem(m, 4096, 4096, WeightFormat(bits, "sym", 128), dtype, device))
        assert config.nibbles == (dtype == torch.int8 and device.capability < 90)
        instruction = "HMMA" if dtype.is_floating_point else r"IMMA.*(S4|U4)" if config.nibbles else "IMMA"
        compiled = jit.cached(sm80_packed_gemm.kernel(config), arch)
        assert compiled.spill_bytes == 0 and compiled.stack_bytes == 0
        assert count(compiled.cubin, instruction) > 0
        # The assembler encodes the line's final jump as a call, once; subroutine calls would be more.
        assert count(compiled.cubin, "CALL") <= 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_sparse_weights(arch: str) -> None:
    """Products that skip zeros, at every number of tokens, without spills."""
    cases = (
        (1, 4, "sym", 128, torch.float16), (16, 3, "asym", 64, torch.bfloat16), (64, 8, "asym", 32, torch.float16),
        (16, 4, "sym", None, torch.int8), (64, 7, "asym", 32, torch.int8), (32, 2, "asym", 128, torch.int8),
    )  # fmt: skip
    for m, bits, code, group, dtype in cases if EXHAUSTIVE else cases[arch == "sm_89" :: 2]:
        weights = WeightFormat(bits, code, group, True)  # type: ignore[arg-type]
        config = sm80_packed_gemm.default(problem(m, 4096, 4096, weights, dtype, Device.named(arch)))
        compiled = jit.cached(sm80_packed_gemm.kernel(config), arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0, f"{weights}, {m} tokens: {compiled.spill_bytes}"
        assert count(compiled.cubin, r"HMMA\.SP" if dtype.is_floating_point else r"IMMA\.SP") > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
def test_repack_compiles_for_each_architecture(arch: str) -> None:
    """Repacking runs on every such architecture."""
    part = slice(None) if EXHAUSTIVE else slice(int(arch in ("sm_89", "sm_120a")), None, 2)
    for config in (repack.Config(3, False), repack.Config(4, True), repack.Config(4, False, float_order=True))[part]:
        compiled = jit.cached(repack.kernel(config), arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0
    for weights in (WeightFormat(8, "sym", None), WeightFormat(3, "asym", 64), WeightFormat(4, "e2m1", 16))[part]:
        rows = jit.cached(packed_rows.kernel(packed_rows.config_of(weights, torch.bfloat16)), arch)
        assert rows.spill_bytes == rows.stack_bytes == 0


@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_no_default_for_int8_spills(m: int) -> None:
    """Integer sums, float sums, and group scales: what needs most registers."""
    device = Device.named("sm_80")
    every = list(itertools.product((1, 2, 4, 5, 8), (32, 128, None)))
    for bits, group in every if EXHAUSTIVE else every[m.bit_length() % 4 :: 4]:
        weights = WeightFormat(bits, ("sym", "asym")[(bits + m // 8) % 2], group)
        config = sm80_packed_gemm.default(problem(m, 4096, 4096, weights, torch.int8, device))
        compiled = jit.cached(sm80_packed_gemm.kernel(config), "sm_80")
        assert compiled.spill_bytes == compiled.stack_bytes == 0, f"{weights} {config}: {compiled.spill_bytes}"


@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_nor_on_other_machines(arch: str) -> None:
    cases = (32, 1, "sym", 32), (32, 1, "asym", 32), (64, 2, "sym", 128), (8, 8, "sym", None)
    for m, bits, code, group in cases if EXHAUSTIVE else cases[arch == "sm_89" :: 2]:
        weights = WeightFormat(bits, code, group)
        asked = problem(m, 4096, 4096, weights, torch.int8, Device.named(arch))
        compiled = jit.cached(sm80_packed_gemm.kernel(sm80_packed_gemm.default(asked)), arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0, f"{weights}, {m} tokens: {compiled.spill_bytes}"
