"""Machine code of experts' kernels for many tokens: nothing spills, products on wgmma."""

import pytest

from anybit.jit import Slot
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.experts.sm90_grouped_gemm.sm90_grouped_gemm import Operands, Problem
from anybit.scheme import Scheme
from machine_code import check


@pytest.mark.parametrize(
    "scheme, tokens",
    [
        ("w4a16g128", 16),
        ("w4a16g128", 256),
        ("w4a16g32e2m1", 16),
        ("w4a16g128", 1024),
        ("w2a16g128", 256),
        ("w4a8", 1024),
        ("w4a8g128", 1024),
    ],
)
def test_nothing_spills(scheme: str, tokens: int) -> None:
    form = Scheme.parse(scheme)
    problem = Problem(tokens, 8, 128, 2048, 768, form.weights, form.weights, form.activations)
    operands = Operands(0, 2048, 0, 0, (0, 0, 0), (0, 0, 0), 0, Slot("scratch"))
    for launch in sm90_grouped_gemm.launches(problem, operands):
        if launch.kernel.header.startswith("experts/"):  # the others have tests of their own
            check(launch.kernel, "sm_90a", has="[HI]G?MMA" if "sm90" in launch.kernel.entry else "LDG")


def test_token_tiles_must_agree() -> None:
    form = Scheme.parse("w4a16g128")
    problem = Problem(64, 8, 128, 2048, 768, form.weights, form.weights)
    first, other = sm90_grouped_gemm.configs(problem, 16), sm90_grouped_gemm.configs(problem, 32)
    assert first and other and "share token tiles" in str(sm90_grouped_gemm.why_not(problem, (first[0], other[1])))
