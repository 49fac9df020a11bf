"""The small kernels between products against their plain torch forms."""

import pytest
import torch

from anybit.ops import elementwise
from anybit.ops.elementwise import add_rms_norm, rms_norm, rotate, silu_mul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual, expected, dtype):
    return torch.allclose(actual.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 5, 576), (64, 130)])
def test_norms_and_silu(dtype, shape):
    x, residual = torch.randn(2, *shape, device="cuda").to(dtype)
    gamma = torch.randn(shape[-1], device="cuda").to(dtype)
    assert close(rms_norm(x, gamma, 1e-5), elementwise._rms_norm_cpu(x, gamma, 1e-5), dtype)
    y, total = add_rms_norm(x, residual, gamma, 1e-5)
    expected, expected_total = elementwise._add_rms_norm_cpu(x, residual, gamma, 1e-5)
    assert torch.equal(total, expected_total)
    assert close(y, expected, dtype)
    assert close(silu_mul(x), elementwise._silu_mul_cpu(x), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("norms", [False, True])
def test_rotary_embedding(dtype, head_dim, norms):
    tokens, heads, kv_heads = 5, 6, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    angles = torch.rand(tokens, head_dim, device="cuda") * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    gammas = [torch.randn(head_dim, device="cuda").to(dtype) for _ in range(2)] if norms else [None, None]
    actual = rotate(qkv, cosine, sine, heads, kv_heads, *gammas, 1e-6)
    wide = [None if g is None else g.float() for g in gammas]
    expected = elementwise._rotate_cpu(qkv.float(), cosine.float(), sine.float(), heads, kv_heads, *wide, 1e-6)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert close(a, b, dtype)
