"""sm80_packed_gemm.cuh on an H200: its own case list, int8 activations, repeated runs."""

import pytest
import torch

from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.scheme import WeightFormat
from cases_packed import FOREIGN, check_on_gpu, product, scheme_of


def check(format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check_on_gpu(sm80_packed_gemm, product(format, m, n, k, dtype, seed=m, device="cuda"))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 118, 128, 152, 768, 1024])
def test_gemm_is_right_for_marlin_cases(m: int) -> None:
    check(WeightFormat(4, "sym", 128), m, 512, 1024, torch.float16)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 4096, 4096), (257, 128, 4096), (257, 4224, 4160)])
def test_gemm_is_right_for_machete_cases(m: int, n: int, k: int) -> None:
    check(WeightFormat(4, "asym", 128), m, n, k, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("bits", "code", "group"), [(8, "sym", None), (3, "bipolar", 64), (2, "asym", 32), (4, "sym", 128)]
)
def test_gemm_multiplies_all_formats(bits: int, code: str, group: int | None, dtype: torch.dtype) -> None:
    check(WeightFormat(bits, code, group), 20, 640, 1024, dtype)


@pytest.mark.parametrize("format", FOREIGN, ids=scheme_of)
def test_formats_of_other_tools(format: WeightFormat) -> None:
    check(format, 20, 640, 712, (torch.float16, torch.bfloat16)[FOREIGN.index(format) % 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("bits", "code", "group"), [(4, "sym", 128), (3, "asym", 32), (7, "asym", None)])
def test_sparse_weights(bits: int, code: str, group: int | None, dtype: torch.dtype) -> None:
    check(WeightFormat(bits, code, group, True), 20, 640, 1028, dtype)  # type: ignore[arg-type]
