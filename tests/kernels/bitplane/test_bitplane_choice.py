"""Which bit-plane kernel runs a problem without measurements, and the enums that host and device share."""

import re
from dataclasses import replace
from enum import Enum

import pytest

from anybit.device import Device
from anybit.jit.source import KERNELS
from anybit.kernels.bitplane import bitplane
from anybit.kernels.bitplane.sm90_gemm.sm90_bitplane_gemm import Schedule
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand
from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Stationary
from anybit.kernels.common.types import Code, Operand, Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from cases_bitplane import default


def problem(scheme: str, m: int, n: int = 4096, k: int = 4096, arch: str = "sm_90a") -> LinearProblem:
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, device=Device.named(arch))


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "name"),
    [
        ("w2a2", 1, 4096, 4096, "sm90_bitplane_skinny"),
        ("w4a4", 64, 2048, 2048, "sm90_bitplane_skinny"),
        ("w2a4", 1024, 28672, 4096, "sm90_bitplane_gemm"),
    ],
)
def test_token_count_decides_where_nothing_was_measured(scheme: str, m: int, n: int, k: int, name: str) -> None:
    asked = problem(scheme, m, n, k)
    chosen = bitplane.family(asked)
    assert chosen is not None and chosen.__name__.rpartition(".")[2] == name
    config = chosen.default(asked)
    assert bitplane.family_of(config) is chosen and chosen.why_not(asked, config) is None


def test_rows_that_begin_anywhere_leave_by_threads() -> None:
    for m in (1, 64, 1024):
        assert not default(replace(problem("w2a2", m, 28672), y_aligned=False)).tma_rows
    assert default(problem("w2a2", 1024, 28672)).tma_rows


def test_architectures_decide() -> None:
    for arch in ("sm_80", "sm_86", "sm_89"):
        chosen = bitplane.family(problem("w2a2", 64, arch=arch))
        assert chosen is not None and chosen.__name__.endswith("sm80_bitplane_gemm")
    assert bitplane.family(problem("w2a2", 64, arch="sm_100a")) is None


@pytest.mark.parametrize(
    ("twin", "header"),
    [
        (Code, "common/types"),
        (Operand, "common/types"),
        (Output, "common/types"),
        (Schedule, "bitplane/sm90_gemm/sm90_bitplane_gemm"),
        (AOperand, "bitplane/sm90_skinny/sm90_bitplane_skinny_tile"),
        (Stationary, "bitplane/sm90_stacked/sm90_bitplane_stacked"),
    ],
)
def test_enums_have_the_members_of_their_twins(twin: type[Enum], header: str) -> None:
    found = re.findall(rf"enum class {twin.__name__} {{ ([^}}]*) }};", (KERNELS / f"{header}.cuh").read_text())
    assert [names.split(", ") for names in found] == [list(twin.__members__)]
