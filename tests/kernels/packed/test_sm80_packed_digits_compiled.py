"""sm80_packed_digits and digitize compile without spills; a unit costs what widening and multiplying it needs.

An architecture compiles one scheme, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import pytest
import torch

from anybit import jit
from anybit.choose import heuristics
from anybit.device import Device
from anybit.kernels.gemm_kernel import Operands, launches
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.scheme import Scheme
from cases import EXHAUSTIVE
from cases_packed import problem
from machine_code import ARCHITECTURES, check, count

HOPPER = Device.named("sm_90a")
SLOTS = jit.Slot("x"), 0, (jit.Slot("w"),) * 4, jit.Slot("y"), 0


def kernels(scheme: str, m: int, arch: str = "sm_90a", dtype: torch.dtype = torch.float16) -> list[jit.Kernel]:
    """digitize and the product, as the default config runs them."""
    asked = problem(m, 14336, 12288, Scheme.parse(scheme).weights, dtype, Device.named(arch))
    config = sm80_packed_digits.default(asked)
    made = launches(sm80_packed_digits, Operands(*SLOTS, scratch=(jit.Slot("s"), None)), asked, config)
    return [launch.kernel for launch in made]


def test_two_blocks_share_an_sm_but_not_three() -> None:
    """Small ones otherwise pile up on the SMs that free up first: 7.9 or 13.7 us, from run to run, instead of 8.3."""
    asked = problem(4, 4096, 14336, Scheme.parse("w2a16g128").weights, torch.float16, HOPPER)
    padded = heuristics.limit_occupancy(sm80_packed_digits.fitted(asked, 1, 4, 4, 2), HOPPER)
    assert padded.min_shared_bytes and sm80_packed_digits.why_not(asked, padded) is None
    assert 2 <= (HOPPER.shared_bytes + 1024) / (sm80_packed_digits.shared_bytes(padded) + 1024) < 3


@pytest.mark.parametrize(
    ("arch", "scheme", "m"),
    [
        (arch, *case)
        for i, arch in enumerate(ARCHITECTURES)
        for j, case in enumerate((("w2a16g128", 4), ("w3a16", 7), ("w4a16g32", 8)))
        if EXHAUSTIVE or i % 3 == j
    ],
)
def test_every_architecture(arch: str, scheme: str, m: int) -> None:
    for kernel in kernels(scheme, m, arch, torch.bfloat16 if m == 7 else torch.float16):
        compiled = jit.cached(kernel, arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        assert compiled.registers <= (40 if kernel.entry == "digitize" else 255)
        assert (count(compiled.cubin, r"IMMA\.16832\.U8\.S8") > 0) == (kernel.entry != "digitize")
        # The assembler encodes a loop's end as a call, once; subroutine calls would be more.
        assert count(compiled.cubin, "CALL") <= 1


@pytest.mark.parametrize("m", [1, 8, 16, 24, 32] if EXHAUSTIVE else [1, 16, 32])
def test_tokens(m: int) -> None:
    check(kernels("w2a16g128", m)[1], "sm_90a", registers=255)


@pytest.mark.parametrize(("bits", "masks"), [(1, 16), (2, 16), (3, 24), (4, 16)])
def test_a_unit_is_widened_once(bits: int, masks: int) -> None:
    """Of 16 rows by 128 columns at four tokens: a mask for four codes, four products, two conversions."""
    code = jit.cached(kernels(f"w{bits}a16g128", 4)[1], "sm_90a").cubin
    assert count(code, "IMMA") == 4 * 7
    assert count(code, "LOP3") < (masks + 4) * 7
    assert count(code, "I2FP") == 2 * 7


@pytest.mark.parametrize(("m", "warps"), [(8, (4, 4)), (16, (4, 3)), (32, (4, 3)), (64, (4, 2))])
def test_wgmma(m: int, warps: tuple[int, int]) -> None:
    asked = problem(m, 14336, 12288, Scheme.parse("w2a16g128").weights, torch.float16)
    config = sm80_packed_digits.fitted(asked, *warps, 3, wgmma=True)
    assert sm80_packed_digits.why_not(asked, config) is None
    columns, jobs = min(2 * m, 64), config.units * (1 + (m > 32))
    compiled = check(sm80_packed_digits.kernel(config), "sm_90a", has=rf"IGMMA\.64x{columns}x32\.U8\.S8", lacks="IMMA")
    # A wait a job: ptxas has not put every product in line.
    assert count(compiled.cubin, "IGMMA") == 4 * jobs and count(compiled.cubin, r"WARPGROUP\.DEPBAR") == jobs
