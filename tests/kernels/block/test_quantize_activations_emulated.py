"""Quantize-and-pack on the emulator: the reference's codes, in the layout of the GEMMs."""

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

import emulate
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import hadamard
from anybit.kernels.block import quantize_activations as activation_kernel
from anybit.kernels.block.quantize_activations import Packed, Problem, Source, Target
from anybit.scheme import ActivationFormat
from cases import assert_codes_equal, assert_codes_near

# Every code width, code, dtype and way of loading, a few at a time: each config takes a second.
CASES = [
    (ActivationFormat(1, "bipolar"), torch.float16, 1100, Target.planes),
    (ActivationFormat(1, "sym"), torch.bfloat16, 72, Target.planes),
    (ActivationFormat(2, "sym"), torch.float16, 2048, Target.planes),
    (ActivationFormat(3, "asym"), torch.float16, 1031, Target.planes),
    (ActivationFormat(4, "bipolar"), torch.bfloat16, 136, Target.planes),
    (ActivationFormat(6, "asym"), torch.bfloat16, 200, Target.planes),
    (ActivationFormat(8, "sym"), torch.float16, 77, Target.planes),
    (ActivationFormat(8, "asym"), torch.float16, 100, Target.bytes),
    (ActivationFormat(8, "float"), torch.bfloat16, 64, Target.bytes),
]


def hard(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k))
    x[1] = 0
    x[2, k // 2] = torch.nan
    x[3, 0] = -torch.inf
    x[4] = torch.finfo(dtype).max * (1 - 2 * (torch.arange(k) % 2))
    x[5] = -torch.finfo(dtype).smallest_normal / 2
    return x.to(dtype)


def run(problem: Problem, x: torch.Tensor, seed: int = 0, **more: Any) -> Packed:
    """Codes of x, written over poisoned memory."""
    packed = Packed(problem.m, problem.k, problem.format, problem.target, x.device)
    packed.buffer.fill_(0xA5)
    config = activation_kernel.default(problem)
    one = activation_kernel.made(problem, config, packed.pointers, x, x.stride(0), x.device, **more)
    emulate.launched(one, seed=seed, dependent=("x", "residual") if "residual" in more else ("x",))
    return packed


@pytest.mark.parametrize(
    ("format", "dtype", "k", "target"), CASES, ids=lambda v: str(v) if isinstance(v, int) else None
)
def test_quantize_writes_the_references_codes(format, dtype, k, target) -> None:
    x = hard(7, k, dtype)
    for seed in range(2):
        assert_codes_equal(run(Problem(7, k, format, dtype, target=target, aligned=k % 8 == 0), x, seed), x, format)


def test_rms_norm_with_residual() -> None:
    m, k, format = 2, 200, ActivationFormat(4, "sym")
    x, residual = hard(8, k, torch.float16)[[0, 6]], hard(8, k, torch.float16)[[6, 7]]
    gamma, total = torch.rand(k).half(), torch.zeros(m, k).half()
    problem = Problem(m, k, format, torch.float16, Source.rms_norm)
    packed = run(problem, x, residual=residual, residual_sum=total, gamma=gamma, epsilon=1e-5)
    assert torch.equal(total, x + residual)
    v = total.float()
    expected = gamma * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)).half()
    assert_codes_near(bitplane_layout.unpack(packed.codes, m, k), packed.scale, expected, format)


@pytest.mark.parametrize(
    ("k", "format", "dtype", "source"),
    [
        (64, ActivationFormat(4, "asym"), torch.float16, Source.plain),
        (288, ActivationFormat(6, "asym"), torch.bfloat16, Source.silu_mul),
        (96, ActivationFormat(8, "sym"), torch.float16, Source.rms_norm),
    ],
)
def test_rotated_on_the_way_as_by_a_kernel_of_its_own(k, format, dtype, source) -> None:
    """The same codes as for rows written by hadamard.cuh."""
    m, target = 3, Target.bytes if format.bits == 8 else Target.planes
    x = torch.randn(m, 2 * k if source is Source.silu_mul else k, generator=torch.Generator().manual_seed(k)).to(dtype)
    x[1] = 0
    gamma = torch.rand(k).to(dtype)
    packed = run(Problem(m, k, format, dtype, source, target, rotated=True), x, gamma=gamma, epsilon=1e-5)
    rows = x
    if source is Source.rms_norm:
        rows = gamma * (x * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-5)).to(dtype)
    elif source is Source.silu_mul:
        rows = silu(x[:, :k]) * x[:, k:]
    own = hadamard.default(hadamard.Problem(m, k, dtype))
    rotated = torch.zeros(m, k, dtype=dtype)
    emulate.run(hadamard.kernel(own), hadamard.arguments(rows, rotated, own), (m, 1, 1))
    if source is Source.plain:
        assert_codes_equal(packed, rotated, format)
        return
    if target is Target.planes:
        got = bitplane_layout.unpack(packed.codes, m, k)
    else:
        got = (packed.codes[:, :k].int() + 128).to(torch.uint8)
    assert_codes_near(got, packed.scale, rotated, format, packed.zero)


def test_rows_that_no_kernel_rotates_are_named() -> None:
    def reason(k: int) -> str:
        form = ActivationFormat(4, "sym")
        return str(activation_kernel.why_not(Problem(1, k, form, source=Source.rms_norm, rotated=True)))

    assert "344" in reason(11008) and "12" in reason(12)
