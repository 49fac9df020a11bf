"""sm80_packed_gemm.cuh on the CPU: stripes that cross row tiles, widths, codes, int8 and int4.

Half of the formats of other tools are tested, and sparse ones with one of the three activations each; all with
ANYBIT_EXHAUSTIVE=1 in the environment.
"""

from dataclasses import replace

import pytest
import torch

import emulate
from anybit import jit
from anybit.device import Device
from anybit.kernels.multiply import multiply
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.kernels.packed.sm80_gemm.sm80_packed_gemm import Params
from anybit.scheme import WeightFormat
from cases import EXHAUSTIVE, SEEDS, in_turn
from cases_packed import FOREIGN, TOLERANCE, operands, problem, product, scheme_of


def run(
    format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, sms: int = 3,
    arch: str = "sm_80", act_order: bool = False, bias: bool = False, seed: int = 0, **changes: int,
) -> None:  # fmt: skip
    case = product(format, m, n, k, dtype, ordered=act_order, bias=bias, seed=seed)
    y = case.empty()
    ordered = packed_layout.in_order(case.packed.permutation, case.x)
    device = replace(Device.named(arch), sms=sms)
    asked = problem(m, n, ordered.shape[1], format, dtype, device)
    config = replace(sm80_packed_gemm.default(asked), **changes)
    assert sm80_packed_gemm.why_not(asked, config) is None
    size, zeros = sm80_packed_gemm.scratch_bytes(asked, config)
    partial, locks = torch.full((size // 4,), torch.nan), torch.zeros(zeros // 4, dtype=torch.int32)
    given = operands(case.packed, ordered, y, case.bias, case.x_scale, scratch=(partial, locks))
    params = sm80_packed_gemm.arguments(given, asked, config)
    emulate.run(sm80_packed_gemm.kernel(config), params, sm80_packed_gemm.grid(asked, config), seed=seed, resident=sms)
    assert not locks.any()
    error = case.error(y)
    assert error < TOLERANCE[case.output], f"{format} m={m} n={n} k={k} {dtype} {config}: error {error:.2e}"


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(4, torch.float16), (3, torch.float16), (8, torch.bfloat16), (1, torch.int8), (3, torch.int8), (8, torch.int8)],
    ids=str,
)
def test_gemm_multiplies_all_widths(bits: int, dtype: torch.dtype) -> None:
    run(WeightFormat(bits, "sym", 128), 5, 192, 384, dtype, sms=2, seed=bits, bias=True)


@pytest.mark.parametrize(("code", "group"), [("asym", 64), ("bipolar", 32), ("asym", None), ("sym", 256)])
def test_codes_and_groups(code: str, group: int | None) -> None:
    for bits, dtype in ((4, torch.float16), (2, torch.int8)):
        run(WeightFormat(bits, code, group), 3, 128, 512, dtype, sms=2)


@pytest.mark.parametrize("format", FOREIGN if EXHAUSTIVE else FOREIGN[::2], ids=scheme_of)
def test_formats_of_other_tools(format: WeightFormat) -> None:
    run(format, 3, 128, 328, (torch.float16, torch.bfloat16)[FOREIGN.index(format) // 2 % 2], sms=2)


@pytest.mark.parametrize(
    ("bits", "code", "group"), [(4, "sym", 128), (3, "asym", 32), (8, "asym", None), (2, "asym", 64), (7, "sym", 32)]
)
def test_sparse_weights(bits: int, code: str, group: int | None) -> None:
    for dtype in in_turn(torch.float16, torch.bfloat16, torch.int8, at=bits):
        run(WeightFormat(bits, code, group, True), 5, 72, 264, dtype, sms=2, seed=bits, bias=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("sms", [1, 3, 5])
def test_stripes_cover_the_product(sms: int) -> None:
    """Stripes shorter than a row tile, and longer; several token tiles; an incomplete last row tile."""
    for seed in SEEDS:
        shape = {"tile_m": 8, "units": 1, "row_warps": 8, "split_k_warps": 1}
        run(WeightFormat(4, "sym", 128), 9, 320, 640, sms=sms, seed=seed, **shape)


def test_ragged_and_ordered() -> None:
    run(WeightFormat(4, "sym", 128), 17, 70, 200, bias=True)
    run(WeightFormat(4, "asym", 64), 2, 64, 256, act_order=True)


def test_int8_on_later_architectures() -> None:
    run(WeightFormat(4, "asym", 128), 3, 64, 256, torch.int8, arch="sm_90a")


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_more_tokens_than_a_launch_takes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    def launch(kernel: jit.Kernel, params: Params, grid: tuple[int, int, int], **_: object) -> None:
        grids.append(params.m)
        emulate.run(kernel, params, grid, resident=2)

    monkeypatch.setattr(jit, "launch", launch)
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: replace(Device.named("sm_80"), sms=2)))
    monkeypatch.setattr(sm80_packed_gemm, "_PLACES", 3)
    case = product(WeightFormat(4, "sym", 128), 70, 64, 256, dtype, bias=True)
    y = case.empty()
    multiply(sm80_packed_gemm, case.x, case.packed, y, case.bias, x_scale=case.x_scale)
    assert grids == [64, 6] and case.error(y) < TOLERANCE[case.output]


@pytest.mark.parametrize("shape", [(128256, 16384), (16384, 53248), (1 << 20, 16384), (1, 1)])
@pytest.mark.parametrize("m", [1, 20000, 1 << 22])
def test_any_number_of_tokens_has_a_config(shape: tuple[int, int], m: int) -> None:
    asked = problem(m, *shape, WeightFormat(4, "sym", 128), torch.float16, Device.named("sm_80"))
    part = sm80_packed_gemm.at_once(asked)
    config = sm80_packed_gemm.default(asked)
    tokens, rows, depth = sm80_packed_gemm._line(part, config)
    assert part.m == m or part.m % 64 == 0
    assert tokens * rows * depth < 2**24 and sm80_packed_gemm.scratch_bytes(part, config)[0] <= 2**30
