"""sm90_bitplane_stacked.cuh on a GPU: exact results, stationary activations, ragged sizes."""

from typing import Any

import pytest
import torch

from anybit.errors import KernelError
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Config, Stationary
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from cases_bitplane import H200, check_on_gpu, code_pairs, multiply, operands, stacked

SHAPES = [(1024, 4096, 4096), (65, 8, 77), (1000, 4104, 3000), (4097, 136, 1024), (300, 30000, 1024)]
WAYS: list[tuple[int, dict[str, Any]]] = [
    (128, {"weight_stages": 4, "activation_stages": 3, "stationary": Stationary.activations}),
    (128, {"weight_stages": 3, "activation_stages": 2}),
    (64, {"weight_stages": 6, "activation_stages": 6, "epilogue_tile": 64, "epilogue_stages": 2}),
]


def asked(m: int, n: int, k: int, scheme: str | Scheme, output: Output = Output.f16) -> LinearProblem:
    parsed = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, output.dtype, H200)


def schemes() -> list[str]:
    """Weights of 1 to 8 bits, and all pairs of codes."""
    pairs = [f"w3a2{'' if w == 'sym' else w}{'' if x == 'sym' else '-x' + x}" for w, x in code_pairs()]
    return [*(f"w{bits}a2" for bits in range(1, 9)), *pairs]


def check(problem: LinearProblem, config: Config | None = None, *, padding: int = 0, bias: bool = False) -> None:
    """``check_on_gpu``, and compare bit for bit with sm90_bitplane_gemm."""
    y = check_on_gpu(problem, config or sm90_bitplane_stacked.default(problem), padding, bias)
    other = check_on_gpu(problem, sm90_bitplane_gemm.default(problem), bias=bias)
    assert torch.equal(y.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@pytest.mark.parametrize("scheme", ["w1a2", "w2a2"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_stacked_takes_ragged_shapes(m: int, n: int, k: int, scheme: str) -> None:
    check(asked(m, n, k, scheme))


@pytest.mark.parametrize("scheme", schemes())
def test_every_width_and_code(scheme: str) -> None:
    check(asked(700, 1032, 2100, scheme), bias=True)


@pytest.mark.parametrize(("tile_m", "change"), WAYS, ids=str)
def test_every_kind_of_config(tile_m: int, change: dict[str, Any]) -> None:
    problem = asked(1030, 4104, 2100, "w2a2")
    config = stacked(problem, tile_m, **change)
    assert sm90_bitplane_stacked.why_not(problem, config) is None
    check(problem, config, padding=8)


def test_rows_of_results_start_on_16_bytes() -> None:
    problem = asked(300, 264, 1500, "w2a2-xasym", Output.bf16)
    check(problem)
    given = operands(300, 264, 1500, problem.weights, problem.activations, "cuda")
    y = torch.empty(300, 267, dtype=torch.bfloat16, device="cuda")[:, :264]
    config = sm90_bitplane_stacked.default(problem)
    with pytest.raises(KernelError, match="16-byte aligned rows"):
        multiply(given.x, given.weight, y, config)
