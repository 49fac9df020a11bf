"""sm80_packed_digits.cuh and digitize.cuh on the CPU: widths, codes, groups, ragged ends, order, extremes."""

import itertools
from dataclasses import replace

import pytest
import torch

import emulate
from anybit.device import Device
from anybit.kernels.gemm_kernel import launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem, packed_tiles
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.scheme import WeightFormat
from cases import EXHAUSTIVE, SEEDS, random_weight
from cases_packed import PackedCase, operands, product

HOPPER, AMPERE = (replace(Device.named(arch), sms=2) for arch in ("sm_90a", "sm_80"))


def multiplied(case: PackedCase, device: Device = HOPPER, seed: int = 0, **changes: int) -> torch.Tensor:
    m, weight = case.x.shape[0], case.packed
    aligned = case.x.stride(0) % 8 == 0
    asked = replace(packed_problem.problem_of(weight, m, case.x.dtype, case.output, device), aligned=aligned)
    config = replace(sm80_packed_digits.default(asked), **changes)
    assert sm80_packed_digits.why_not(asked, config) is None
    y, size = case.empty(), sm80_packed_digits.traits.scratch(asked, config)[0]
    scratch = torch.full((size,), 255, dtype=torch.uint8)
    given = operands(weight, case.x, y, case.bias, scratch=(scratch, None))
    first, second = launches(sm80_packed_digits, given, asked, config)
    emulate.run(first.kernel, first.params, first.grid, seed=seed, dependent=("x", "digits"))
    emulate.run(second.kernel, second.params, second.grid, seed=seed, dependent=("x", "y"))
    return y


def check(
    format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, ordered: bool = False,
    bias: bool = False, device: Device = HOPPER, seed: int = 0, **changes: int,
) -> None:  # fmt: skip
    """The error against float64 is no larger than that of the codes as 16-bit floats, y's rounding apart."""
    case = product(format, m, n, k, dtype, ordered=ordered, bias=bias, seed=seed)
    error = case.error(multiplied(case, device, seed, **changes))
    assert error < (3e-4 if dtype == torch.float16 else 2e-3), f"{format} m={m} n={n} k={k} {dtype}: error {error:.2e}"


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_widths(bits: int, dtype: torch.dtype) -> None:
    check(WeightFormat(bits, "bipolar" if bits == 1 else "sym", 128), 3 + 4 * bits, 112, 384, dtype, seed=bits)


@pytest.mark.parametrize(
    ("code", "group"),
    itertools.product(("sym", "asym", "bipolar"), (32, 64, 256, None))
    if EXHAUSTIVE
    else (("sym", 32), ("bipolar", 64), ("asym", 256), ("asym", None)),
)
def test_codes_and_groups(code: str, group: int | None) -> None:
    for bits, dtype in ((2, torch.bfloat16), (3, torch.float16)):
        check(WeightFormat(bits, code, group), 5, 64, 512, dtype, bias=True, seed=bits)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 20, 130), (5, 72, 37), (16, 100, 264), (32, 130, 128)])
def test_ragged(m: int, n: int, k: int) -> None:
    check(WeightFormat(2, "sym", 128), m, n, k, bias=True)
    check(WeightFormat(3, "asym", 32), m, n, k, torch.bfloat16)


def test_activation_order() -> None:
    check(WeightFormat(4, "asym", 64), 2, 64, 320, ordered=True)
    check(WeightFormat(3, "sym", 256), 9, 64, 300, torch.bfloat16, ordered=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_grids_of_warps(seed: int) -> None:
    """Rings that wrap around, warps that share digits, clusters that split K; uneven rows."""
    format = WeightFormat(2, "sym", 128)
    check(format, 8, 208, 1152, seed=seed, row_warps=1, k_warps=2, units=8, together=2, stages=2)
    check(format, 4, 240, 1152, seed=seed, row_warps=2, k_warps=2, units=4, together=3, stages=3)
    check(
        format, 12, 240, 1152, seed=seed, row_warps=3, k_warps=3, units=6, together=1, stages=2, cluster_k=2,
        wgmma=False,
    )  # fmt: skip
    check(format, 4, 112, 1152, device=AMPERE, seed=seed)


@pytest.mark.parametrize(
    ("format", "m", "changes"),
    [
        (WeightFormat(2, "sym", 128), 4, {"row_warps": 4, "k_warps": 1, "units": 3, "together": 3}),
        (WeightFormat(3, "sym", 128), 13, {"row_warps": 4, "k_warps": 2, "units": 3, "together": 1}),
        (WeightFormat(1, "bipolar", 32), 24, {"row_warps": 8, "k_warps": 1, "units": 2, "together": 2}),
        (WeightFormat(4, "asym", None), 64, {"row_warps": 4, "k_warps": 1, "units": 2, "together": 2, "cluster_k": 2}),
    ],
    ids=str,
)
def test_wgmma(format: WeightFormat, m: int, changes: dict[str, int]) -> None:
    check(format, m, 176, 512 + 40, seed=m, tile_m=-(-m // 8) * 8 if m > 4 else 4, stages=2, wgmma=True, **changes)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_largest_activations(bits: int, dtype: torch.dtype) -> None:
    """Digits at the end of their range; zeros; infinities and NaN stay in their token."""
    format = WeightFormat(bits, "sym", 128)
    case, most = product(format, 6, 64, 256, dtype), torch.finfo(dtype).max
    case.x[0, ::3] = 2 - torch.finfo(dtype).eps
    case.x[1], case.x[1, 5] = 0, most / (1 if dtype == torch.float16 else 2**32)  # row scales come last
    case.x[2] *= 2.0**-8
    case.x[3] = 0
    case.x[4, 77], case.x[5, 200] = torch.inf, torch.nan
    expected = case.x[:4].double() @ random_weight(64, 256, format, 0).dequantize(torch.float64).T
    y = multiplied(case).double()
    assert y[4:].isnan().all()
    assert (y[3] == 0).all()
    for wanted, found in zip(expected[:3], y, strict=False):
        fits = wanted.abs() < most / 2
        error = (found - wanted)[fits].abs().mean() / wanted[fits].abs().mean()
        assert error < (3e-4 if dtype == torch.float16 else 2e-3)


def test_refusals() -> None:
    packed = packed_tiles.prepare(random_weight(64, 128, WeightFormat(2, "sym", 128)))
    problem = packed_problem.problem_of(packed, 4, torch.float16, torch.float16, HOPPER)
    assert "64 tokens" in str(sm80_packed_digits.why_not(replace(problem, m=65)))
    assert "32 tokens" in str(sm80_packed_digits.why_not(replace(problem, m=33, device=AMPERE)))
    for bits, code, group in ((5, "sym", 128), (4, "sym", 16), (4, "nf4", 64), (4, "min", 32)):
        weights = WeightFormat(bits, code, group)  # type: ignore[arg-type]
        assert "1 to 4 bits" in str(sm80_packed_digits.why_not(replace(problem, weights=weights)))
    config = sm80_packed_digits.default(problem)
    assert "another problem" in str(sm80_packed_digits.why_not(problem, replace(config, bits=3)))
    assert "shared memory" in str(sm80_packed_digits.why_not(problem, replace(config, stages=4000)))
    assert "cluster" in str(sm80_packed_digits.why_not(replace(problem, device=AMPERE), replace(config, cluster_k=2)))
    wide = replace(config, wgmma=True, row_warps=4)
    assert sm80_packed_digits.why_not(problem, wide) is None
    assert "four warps" in str(sm80_packed_digits.why_not(problem, replace(wide, row_warps=2)))
    assert "wgmma" in str(sm80_packed_digits.why_not(replace(problem, device=AMPERE), wide))
    for asked in (problem, LinearProblem(16, 14336, 12288, WeightFormat(3, "sym", 128))):
        assert all(sm80_packed_digits.why_not(asked, c) is None for c in sm80_packed_digits.configs(asked))
