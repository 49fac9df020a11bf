"""Quantize-and-pack on the emulator: the reference's codes, in the layout of the GEMMs."""

import pytest
import torch
from torch.nn.functional import silu

import emulate
from anybit.codes.reference import quantize_activations
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import hadamard
from anybit.kernels.block import quantize_activations as activation_kernel
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.scheme import ActivationFormat
from cases import assert_codes_near

pytestmark = pytest.mark.emulate

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


def run(x: torch.Tensor, format: ActivationFormat, target: Target, seed: int) -> None:
    m, k = x.shape
    problem = activation_kernel.Problem(m, k, format, x.dtype, Source.plain, target, k % 8 == 0)
    config = activation_kernel.default(problem)
    width = bitplane_layout.chunks(k) * bitplane_layout.CHUNK if target is Target.planes else activation_kernel.pitch(k)
    size = bitplane_layout.size(m, k, format.bits) if target is Target.planes else m * width
    codes = torch.full((size,), 0xA5, dtype=torch.uint8)
    scale, sum, zero = torch.full((m,), 7.0), torch.zeros(m, dtype=torch.int32), torch.zeros(m, dtype=torch.int32)
    params = activation_kernel.Params(
        x,
        None,
        None,
        None,
        codes,
        scale,
        sum,
        zero,
        x.stride(0),
        0,
        k,
        width,
        bitplane_layout.padded_rows(m),
        0.0,
    )
    emulate.run(
        activation_kernel.kernel(config),
        params,
        activation_kernel.grid(problem, config),
        seed=seed,
        dependent=("x",),
    )
    expected = quantize_activations(x, format)
    finite = x.isfinite().all(1)
    assert torch.equal(scale.isnan(), ~finite)
    torch.testing.assert_close(scale[finite], expected.scale[finite], rtol=1e-6 * (format.bits == 1), atol=0)
    if target is Target.planes:
        stored = bitplane_layout.unpack(
            codes.view(bitplane_layout.chunks(k), format.bits, -1, bitplane_layout.ROW_BYTES), m, width
        )
        offset = 0
    else:
        stored, offset = codes.view(m, width), 2 ** (format.bits - 1)
    assert not stored[:, k:].any()
    if format.code == "float":
        assert torch.equal(stored[finite, :k], expected.codes[finite].view(torch.uint8))
        return
    got = stored[:, :k] if target is Target.planes else stored[:, :k].view(torch.int8)
    codes_expected = expected.codes.int() - offset
    assert torch.equal(got[finite].int(), codes_expected[finite])
    assert torch.equal(sum[finite], codes_expected[finite].sum(1, dtype=torch.int32))
    if format.code == "asym":
        assert torch.equal(zero[finite], expected.zero[finite].int() - offset)


@pytest.mark.parametrize(
    ("format", "dtype", "k", "target"), CASES, ids=lambda v: str(v) if isinstance(v, int) else None
)
def test_codes(format: ActivationFormat, dtype: torch.dtype, k: int, target: Target) -> None:
    for seed in range(2):
        run(hard(7, k, dtype), format, target, seed)


def test_rms_norm_with_residual() -> None:
    m, k, format = 2, 200, ActivationFormat(4, "sym")
    x, residual = hard(8, k, torch.float16)[[0, 6]], hard(8, k, torch.float16)[[6, 7]]
    gamma, total = torch.rand(k).half(), torch.zeros(m, k).half()
    problem = activation_kernel.Problem(m, k, format, torch.float16, Source.rms_norm)
    codes = torch.zeros(bitplane_layout.size(m, k, 4), dtype=torch.uint8)
    scale, sum = torch.zeros(m), torch.zeros(m, dtype=torch.int32)
    params = activation_kernel.Params(
        x,
        residual,
        total,
        gamma,
        codes,
        scale,
        sum,
        None,
        k,
        k,
        k,
        bitplane_layout.CHUNK,
        bitplane_layout.padded_rows(m),
        1e-5,
    )
    config = activation_kernel.default(problem)
    emulate.run(activation_kernel.kernel(config), params, (m, 1, 1), dependent=("x", "residual"))
    assert torch.equal(total, x + residual)
    v = total.float()
    expected = gamma * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)).half()
    got = bitplane_layout.unpack(codes.view(1, 4, -1, bitplane_layout.ROW_BYTES), m, k)
    assert_codes_near(got, scale, expected, format)


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
    problem = activation_kernel.Problem(m, k, format, dtype, source, target, rotated=True)
    config = activation_kernel.default(problem)
    width = bitplane_layout.chunks(k) * bitplane_layout.CHUNK if target is Target.planes else activation_kernel.pitch(k)
    codes = torch.zeros(
        bitplane_layout.size(m, k, format.bits) if target is Target.planes else m * width, dtype=torch.uint8
    )
    scale, sum, zero = torch.zeros(m), torch.zeros(m, dtype=torch.int32), torch.zeros(m, dtype=torch.int32)
    signs = hadamard.signs(config.order, x.device)
    params = activation_kernel.Params(
        *(x, None, None, gamma, codes, scale, sum, zero, x.stride(0), 0, k, width),
        bitplane_layout.padded_rows(m), 1e-5, float(k) ** -0.5, signs,
    )  # fmt: skip
    emulate.run(activation_kernel.kernel(config), params, (m, 1, 1), dependent=("x",))
    rows = x
    if source is Source.rms_norm:
        rows = gamma * (x * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-5)).to(dtype)
    elif source is Source.silu_mul:
        rows = silu(x[:, :k]) * x[:, k:]
    own = hadamard.default(hadamard.Problem(m, k, dtype))
    rotated = torch.zeros(m, k, dtype=dtype)
    emulate.run(hadamard.kernel(own), hadamard.arguments(rows, rotated, own), (m, 1, 1))
    if target is Target.planes:
        got = bitplane_layout.unpack(
            codes.view(bitplane_layout.chunks(k), format.bits, -1, bitplane_layout.ROW_BYTES), m, width
        )
    else:
        got = (codes.view(m, width).view(torch.int8).int() + 128).to(torch.uint8)
    if source is Source.plain:
        expected = quantize_activations(rotated, format)
        assert torch.equal(got[:, :k], expected.codes) and torch.equal(scale, expected.scale)
        assert format.code != "asym" or torch.equal(zero, expected.zero.int())
    else:
        assert_codes_near(got[:, :k], scale, rotated, format, zero if format.code == "asym" else None)


def test_rows_that_no_kernel_rotates_are_named() -> None:
    def reason(k: int) -> str:
        form = ActivationFormat(4, "sym")
        return str(
            activation_kernel.why_not(activation_kernel.Problem(1, k, form, source=Source.rms_norm, rotated=True))
        )

    assert "344" in reason(11008) and "12" in reason(12)
