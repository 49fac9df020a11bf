"""sm90_experts_gemv compiles without spills, and its configs fit beside one another."""

from dataclasses import replace

import pytest
import torch

from anybit import jit
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Gate, Problem
from anybit.scheme import Scheme, WeightFormat
from machine_code import check

SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "deepseek-v3": (32, 8, 7168, 2048)}


def pair(shape: str, tokens: int, format: WeightFormat, dtype: torch.dtype = torch.bfloat16) -> tuple[Problem, Problem]:
    count, top, hidden, inner = SHAPES[shape]
    first = Problem(tokens, top, count, 2 * inner, hidden, format, False, dtype=dtype)
    return first, replace(first, n=hidden, k=inner, down=True)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_do_not_spill(shape: str, tokens: int) -> None:
    for problem in pair(shape, tokens, WeightFormat(4, "sym", 128)):
        kernel = sm90_experts_gemv.kernel(sm90_experts_gemv.default(problem))
        check(kernel, "sm_90a", has="IMMA", lacks="HMMA", registers=128)


@pytest.mark.parametrize(
    ("scheme", "tokens", "dtype", "mma"),
    [
        ("w2a16g128", 1, torch.bfloat16, "IMMA"),
        ("w3a16g64asym", 2, torch.float16, "IMMA"),
        ("w8a16", 2, torch.float16, "IMMA"),
        ("w4a16g32e2m1", 1, torch.bfloat16, "HMMA"),
        ("w8a16e4m3", 4, torch.bfloat16, "HMMA"),
    ],
)
def test_other_formats(scheme: str, tokens: int, dtype: torch.dtype, mma: str) -> None:
    for problem in pair("qwen3-30b", tokens, Scheme.parse(scheme).weights, dtype):
        check(sm90_experts_gemv.kernel(sm90_experts_gemv.default(problem)), "sm_90a", has=mma, registers=128)


@pytest.mark.parametrize("gate", Gate)
def test_gates_call_nothing(gate: Gate) -> None:
    problem = replace(pair("qwen3-30b", 1, WeightFormat(4, "sym", 128))[0], gate=gate)
    check(sm90_experts_gemv.kernel(sm90_experts_gemv.default(problem)), "sm_90a", has="MUFU.EX2")


def test_down_fits_beside_gate_up() -> None:
    """At one token, so that down fills its ring of weights while gate_up runs."""
    gate_up, down = pair("qwen3-30b", 1, WeightFormat(4, "sym", 128))
    kernels = [sm90_experts_gemv.kernel(sm90_experts_gemv.default(problem)) for problem in (gate_up, down)]
    assert sum(kernel.shared_bytes + 1024 for kernel in kernels) <= gate_up.device.shared_bytes + 1024
    assert sum(jit.cached(kernel, "sm_90a").registers * kernel.threads for kernel in kernels) <= 65536
