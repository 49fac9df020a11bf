"""sm90_packed_skinny.cuh becomes machine code without spills, with the tensor-core instruction that was meant."""

from dataclasses import replace

import pytest
import torch
from machine_code import check

from anybit.device import Device
from anybit.kernels.gemm import sm90_packed_skinny
from anybit.kernels.gemm.packed_problem import Problem
from anybit.scheme import WeightFormat

HOPPER = Device.named("sm_90a")


@pytest.mark.parametrize(
    ("bits", "m", "dtype", "split", "instruction"),
    [
        (4, 1, torch.float16, False, "HMMA"),
        (3, 1, torch.bfloat16, False, "HMMA"),
        (8, 16, torch.float16, False, "HMMA"),
        (2, 1, torch.float16, True, "IMMA"),
        (4, 8, torch.int8, False, "IMMA"),
    ],
)
def test_no_spills(bits: int, m: int, dtype: torch.dtype, split: bool, instruction: str) -> None:
    output = dtype if dtype.is_floating_point else torch.float16
    for n, k in ((4096, 4096), (28672, 4096)):
        problem = Problem(m, n, k, WeightFormat(bits, "sym", 128), dtype, output, HOPPER, k)
        config = (
            sm90_packed_skinny.fitted(problem, 8, 1, 2, 64, 1, split) if split else sm90_packed_skinny.default(problem)
        )
        assert sm90_packed_skinny.why_not(problem, config) is None
        check(sm90_packed_skinny.kernel(config), "sm_90a", has=instruction)


def test_why_not_elsewhere() -> None:
    problem = Problem(1, 64, 128, WeightFormat(4, "sym", 128), torch.float16, torch.float16, HOPPER, 128)
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert "sm80_packed_gemm" in str(sm90_packed_skinny.why_not(replace(problem, device=Device.named(arch))))
