"""Quantize-and-pack on a GPU: codes, scales, sums and zeros equal the reference's, bit for bit."""

import pytest
import torch

from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import quantize_activations as activation_kernel
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.scheme import ActivationFormat
from cases import BITS, EXHAUSTIVE, assert_codes_equal, assert_codes_near

CODES = ("sym", "asym", "bipolar")
FORMATS = [ActivationFormat(b, c) for b in BITS for i, c in enumerate(CODES) if EXHAUSTIVE or b % 3 == i or b == 2]
BYTE_FORMATS = [
    *(ActivationFormat(8, code) for code in ("sym", "asym", "bipolar", "float")),
    ActivationFormat(4, "sym"),
]
# Widths that share few configs: every config is compiled for every format.
SHAPES = [(1, 1), (1, 7), (3, 576), (5, 1024), (4097, 64), (17, 4096), (9, 1031)] + [(2, 14336)] * EXHAUSTIVE


def matrix(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[:, ::17] *= 8  # outliers
    return x.to(dtype)


def hard_rows(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, constant rows, ties, the largest and the smallest numbers, NaN and infinities, one kind per row."""
    largest = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal / 4  # a subnormal
    x = torch.zeros(10, 136)
    x[1, 5] = 3.0
    x[2] = torch.arange(136) / 4 - 17
    x[3] = largest
    x[3, ::2] = -largest
    x[4] = tiny
    x[5] = -tiny
    x[6, 9], x[7, 135], x[8, 0] = torch.nan, torch.inf, -torch.inf
    x[9] = -2.5
    return x.to(dtype)


def check(
    x: torch.Tensor, format: ActivationFormat, target: Target, config: activation_kernel.Config | None = None
) -> None:
    """Compare one launch over poisoned memory with the reference on the CPU."""
    device = x.cuda()  # no copy if already there, strides included
    problem = activation_kernel.problem_of(device, format, target)
    packed = activation_kernel.Packed(problem.m, problem.k, format, target, device.device)
    packed.buffer.fill_(0xA5)
    activation_kernel.launch(problem, config or activation_kernel.default(problem), packed, device)
    assert_codes_equal(packed, x, format, mean=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantize_writes_planes(format: ActivationFormat, dtype: torch.dtype) -> None:
    for m, k in SHAPES:
        check(matrix(m, k, dtype), format, Target.planes)
    check(hard_rows(dtype), format, Target.planes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", BYTE_FORMATS, ids=str)
def test_quantize_writes_bytes(format: ActivationFormat, dtype: torch.dtype) -> None:
    for m, k in SHAPES:
        check(matrix(m, k, dtype), format, Target.bytes)
    check(hard_rows(dtype), format, Target.bytes)


def test_every_config_and_strided_rows() -> None:
    format = ActivationFormat(4, "asym")
    wide = matrix(9, 4096 + 24, torch.float16).cuda()  # slice on the device: copying a slice makes it dense
    for x in (wide[:, :4096], wide[:, 8:2056], wide[:, 3:1030]):  # aligned rows, aligned, not aligned
        assert not x.is_contiguous()
        problem = activation_kernel.problem_of(x, format)
        for config in activation_kernel.configs(problem):
            check(x, format, Target.planes, config)


def check_fused(
    source: Source, x: torch.Tensor, expected: torch.Tensor, format: ActivationFormat, **more: object
) -> None:
    """Run a fused source: its codes stand for ``expected`` [m, k]."""
    m, k = expected.shape
    problem = activation_kernel.problem_of(x, format, Target.planes, source)
    packed = activation_kernel.Packed(m, k, format, Target.planes, x.device)
    activation_kernel.launch(problem, activation_kernel.default(problem), packed, x, **more)
    assert_codes_near(bitplane_layout.unpack(packed.codes.cpu(), m, k), packed.scale.cpu(), expected.cpu(), format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [576, 4096, 1031])
def test_quantize_fuses_rms_norm(k: int, dtype: torch.dtype) -> None:
    x, residual = matrix(5, k, dtype).cuda(), matrix(5, k, dtype, 1).cuda()
    gamma = (matrix(1, k, dtype, 2)[0] * 0.1 + 1).cuda()
    format = ActivationFormat(4, "sym")
    norm = torch.nn.RMSNorm(k, eps=1e-5)

    def reference(v: torch.Tensor) -> torch.Tensor:  # as transformers' LlamaRMSNorm
        v = v.float()
        return gamma * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + norm.eps)).to(dtype)

    total = torch.empty_like(x)
    given = {"gamma": gamma, "epsilon": 1e-5}
    check_fused(Source.rms_norm, x, reference(x + residual), format, residual=residual, residual_sum=total, **given)
    assert torch.equal(total, x + residual)
    check_fused(Source.rms_norm, x, reference(x), format, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1536, 14336, 24])
def test_quantize_fuses_silu_mul(k: int, dtype: torch.dtype) -> None:
    x = matrix(3, 2 * k, dtype).cuda()
    check_fused(Source.silu_mul, x, torch.nn.functional.silu(x[:, :k]) * x[:, k:], ActivationFormat(8, "sym"))
