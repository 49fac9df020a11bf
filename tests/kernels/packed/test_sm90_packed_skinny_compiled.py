"""sm90_packed_skinny.cuh compiles without spills, to the intended tensor core instruction."""

from dataclasses import replace

import pytest
import torch

from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.scheme import WeightFormat
from cases import in_turn
from cases_packed import problem
from machine_code import check


@pytest.mark.parametrize(
    ("bits", "m", "dtype", "instruction"),
    [
        (4, 1, torch.float16, "HMMA"),
        (3, 1, torch.bfloat16, "HMMA"),
        (8, 16, torch.float16, "HMMA"),
        (4, 8, torch.int8, "IMMA"),
    ],
)
def test_skinny_does_not_spill(bits: int, m: int, dtype: torch.dtype, instruction: str) -> None:
    for n, k in in_turn((4096, 4096), (28672, 4096), at=m > 1):
        asked = problem(m, n, k, WeightFormat(bits, "sym", 128), dtype)
        config = sm90_packed_skinny.default(asked)
        assert sm90_packed_skinny.why_not(asked, config) is None
        check(sm90_packed_skinny.kernel(config), "sm_90a", has=instruction)


def test_why_not_elsewhere() -> None:
    asked = LinearProblem(1, 64, 128, WeightFormat(4, "sym", 128))
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert "sm80_packed_gemm" in str(sm90_packed_skinny.why_not(replace(asked, device=Device.named(arch))))
