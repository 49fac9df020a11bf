"""Elementwise kernels against their plain torch forms."""

from dataclasses import replace

import pytest
import torch

from anybit import QuantLinear
from anybit.codes.rtn import quantize_weight
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs
from anybit.ops import elementwise, pages
from anybit.ops.elementwise import add_rms_norm, rms_norm, rotate, rotate_store, silu_mul
from anybit.scheme import Scheme

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual, expected, dtype):
    return torch.allclose(actual.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def turned(actual, expected, dtype):
    """Whether heads agree within a rounding or two of each rotated pair of channels: one of them may be small."""
    size = torch.hypot(*expected.float().chunk(2, dim=-1))
    return bool(((actual.float() - expected.float()).abs() <= TOLERANCE[dtype] * torch.cat((size, size), -1)).all())


def product_of(dtype, m, n, k, text="w4a16g128", bias=True, order=False):
    """A layer, and x, residual and gamma for it."""
    scheme = Scheme.parse(text)
    weight = quantize_weight(torch.randn(n, k, device="cuda").half(), scheme.weights)
    if order:
        weight = replace(weight, group_index=(torch.randperm(k, device="cuda") // 128).int())
    added = torch.randn(n, device="cuda").to(dtype) if bias else None
    layer = QuantLinear.from_weight(weight, scheme, added, "packed").prepare()
    return layer, *(torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (m, k), (k,)))


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
@pytest.mark.parametrize("head_dim", [16, 64, 96, 100, 128, 256])
@pytest.mark.parametrize("norms", [False, True])
def test_rotary_embedding(dtype, head_dim, norms):
    tokens, heads, kv_heads = 5, 6, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    angles = torch.rand(tokens, head_dim, device="cuda") * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    gammas = [torch.randn(head_dim, device="cuda").to(dtype) for _ in range(2)] if norms else [None, None]
    actual = rotate(qkv, cosine, sine, heads, kv_heads, (*gammas, 1e-6))
    wide = [None if g is None else g.float() for g in gammas]
    expected = elementwise._rotate_cpu(qkv.float(), cosine.float(), sine.float(), heads, kv_heads, *wide, 1e-6, False)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert close(a, b, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_keys_and_values_go_to_the_ring(dtype, head_dim):
    tokens, batch, heads, kv_heads, ring = 2, 3, 6, 2, 160
    rows = tokens * batch
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    angles = torch.rand(rows, head_dim, device="cuda") * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    lengths = torch.tensor([300, 0, 161, 2], dtype=torch.int32, device="cuda")
    sequences = torch.tensor([3, 0, 2], dtype=torch.int32, device="cuda")
    got, wanted = torch.zeros(2, 4, kv_heads, 2, ring * head_dim, dtype=dtype, device="cuda")
    q = rotate_store(qkv, RopeStoreArgs(cosine, sine, got, lengths, sequences, heads, kv_heads, tokens))
    wide = [x.float() for x in (qkv, cosine, sine)]
    expected = elementwise._rotate_store_cpu(
        *wide, wanted, lengths, sequences.cpu(), heads, kv_heads, tokens, None, None, 0.0, False
    )
    assert close(q, expected, dtype) and close(got, wanted, dtype)


@pytest.mark.parametrize(("scheme", "backend"), [("w4a8", "packed"), ("w4a8fp", "packed"), ("w4a4", "bitwise")])
@pytest.mark.parametrize("m", [1, 5, 70])
def test_codes_made_by_norms_and_silu(scheme, backend, m):
    parsed, n, k = Scheme.parse(scheme), 384, 512
    weight = quantize_weight(torch.randn(n, k, device="cuda").half(), parsed.weights)
    layer = QuantLinear.from_weight(weight, parsed, None, backend).prepare()
    x, residual, gamma = torch.randn(m, k).half(), torch.randn(m, k).half(), torch.rand(k).half()
    x, residual, gamma, gate_up = (t.cuda() for t in (x, residual, gamma, torch.randn(m, 2 * k).half()))
    y, total = layer.norm_linear(x, residual, gamma, 1e-5)
    normed, expected = add_rms_norm(x, residual, gamma, 1e-5)
    assert torch.equal(total, expected)
    pairs = [(y, layer(normed)), (layer.norm_linear(x, None, gamma, 1e-5)[0], layer(rms_norm(x, gamma, 1e-5)))]
    pairs.append((layer.silu_linear(gate_up), layer(silu_mul(gate_up))))
    for got, wanted in pairs:  # norms round alike except for a sum's last bit, which may flip a code
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 6144, 4096), (2, 28672, 4096), (1, 7168, 5120), (3, 512, 1024), (1, 576, 576)]
)
def test_products_that_norm_their_activations(dtype, m, n, k):
    """One launch if the kernel can, else the same by two. Also while x is still being written."""
    layer, x, residual, gamma = product_of(dtype, m, n, k, bias=False)
    normed, expected = add_rms_norm(x, residual, gamma, 1e-5)
    wanted = layer(normed)
    for _ in range(5):
        made = x + 0
        y, total = layer.norm_linear(made, residual, gamma, 1e-5)
        again, sum_again = layer.norm_linear(y[:, :k].contiguous() if n >= k else x, total, gamma, 1e-5)
        assert torch.equal(total, expected)
        error = float((y.float() - wanted.float()).abs().mean() / wanted.float().abs().mean())
        assert error < (1e-3 if dtype == torch.float16 else 8e-3)
        if n >= k:
            second, second_sum = add_rms_norm(y[:, :k].contiguous(), total, gamma, 1e-5)
            assert torch.equal(sum_again, second_sum)
            assert float((again.float() - layer(second).float()).abs().mean() / again.float().abs().mean()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 28672, 4096), (2, 3072, 576), (1, 1040, 512), (3, 512, 1024), (40, 512, 512), (300, 1040, 512)],
)
@pytest.mark.parametrize("text", ["w4a16g128", "w4a8", "w4a8fp"])
def test_products_that_end_with_silu(dtype, m, n, k, text):
    """Bitwise equal to the product, then SiLU of its rows interleaved in eights."""
    layer, x, residual, gamma = product_of(dtype, m, n, k, text)
    for _ in range(5):
        plain, total = layer.norm_linear(x + 0, residual, gamma, 1e-5)
        y, same = layer.norm_linear(x + 0, residual, gamma, 1e-5, silu=True)
        assert torch.equal(total, same) and y.shape == (m, n // 2)
        assert torch.equal(y, silu_mul(plain, paired=True))
        assert close(y, elementwise._silu_mul_cpu(plain.float(), paired=True), dtype)


@pytest.mark.parametrize("m", [3, 300])
def test_products_in_activation_order_end_with_silu(m):
    """The same for layers whose calls are not cached: fused for many tokens, a second kernel for few."""
    layer, x, residual, gamma = product_of(torch.float16, m, 1040, 512, bias=False, order=True)
    for _ in range(3):
        plain, total = layer.norm_linear(x + 0, residual, gamma, 1e-5)
        y, same = layer.norm_linear(x + 0, residual, gamma, 1e-5, silu=True)
        assert torch.equal(total, same) and torch.equal(y, silu_mul(plain, paired=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "tokens", "heads", "kv_heads", "dim", "k"),
    [
        (1, 1, 32, 8, 128, 4096),
        (2, 1, 9, 3, 64, 512),
        (1, 1, 9, 3, 64, 576),
        (2, 2, 40, 8, 128, 5120),
        (5, 5, 4, 2, 64, 512),
    ],
)
def test_products_that_turn_and_store(dtype, m, tokens, heads, kv_heads, dim, k):
    """Equal to product, rotary embedding and store, up to the last bit of a rotated pair."""
    ring = 160
    layer, x, residual, gamma = product_of(dtype, m, (heads + 2 * kv_heads) * dim, k)
    angles = torch.rand(m, dim // 2, device="cuda").repeat(1, 2) * 6
    lengths = torch.tensor([300, 9, 161], dtype=torch.int32, device="cuda")
    sequences = torch.tensor([2, 0], dtype=torch.int32, device="cuda")[: m // tokens]
    got, wanted = torch.zeros(2, 3, kv_heads, 2, ring * dim, dtype=dtype, device="cuda")
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    step = RopeStoreArgs(cosine, sine, got, lengths, sequences, heads, kv_heads, tokens)
    for _ in range(5):
        q, total = layer.norm_linear_rope(x + 0, residual, gamma, 1e-5, step)
        qkv, same = layer.norm_linear(x + 0, residual, gamma, 1e-5)
        assert torch.equal(total, same)
        wide = [t.float() for t in (qkv, cosine, sine)]
        expected = elementwise._rotate_store_cpu(
            *wide, wanted, lengths, sequences.cpu(), heads, kv_heads, tokens, None, None, 0.0, True
        )
        scale = float(qkv.abs().max())
        assert close(q / scale, expected / scale, dtype) and close(got / scale, wanted / scale, dtype)


def _paged(m: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple:
    """Two caches in vLLM's layout, and steps of m tokens for the first and the second."""
    caches = torch.zeros(2, 40, 16, kv_heads, 2 * dim, dtype=dtype, device="cuda").transpose(2, 3)
    angles = torch.rand(700, dim // 2, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    positions = torch.randint(700, (m,), device="cuda")
    slots = torch.randperm(640, device="cuda")[:m]
    slots[m // 2] = -1 if m > 2 else slots[m // 2]

    def step(which: int, heads: int) -> RopePagesArgs:
        keys, values = caches[which].transpose(1, 2).split(dim, dim=-1)
        return RopePagesArgs(table, positions, keys, values, slots, heads, kv_heads)

    return caches, step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "heads", "kv_heads", "dim"), [(1, 32, 8, 128), (37, 9, 3, 64), (500, 4, 2, 256)])
@pytest.mark.parametrize(("paired", "norms"), [(False, True), (True, False)])
def test_keys_and_values_go_to_pages(dtype, m, heads, kv_heads, dim, paired, norms):
    caches, step = _paged(m, kv_heads, dim, dtype)
    qkv = torch.randn(m, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    gammas = [torch.rand(dim, device="cuda").to(dtype) + 0.5 for _ in range(2)] if norms else [None, None]
    here = step(0, heads)
    names = ("table", "positions", "keys", "values", "slots")
    there = replace(step(1, heads), **{name: getattr(step(1, heads), name).cpu() for name in names})
    q = pages.rotate_pages(here, qkv, *gammas, 1e-6, paired)
    mine = [None if gamma is None else gamma.cpu() for gamma in gammas]
    expected = pages.rotate_pages(there, qkv.cpu(), *mine, 1e-6, paired)
    assert turned(q.cpu(), expected, dtype) and there.keys.any() and caches[0].any()
    assert turned(here.keys.cpu(), there.keys, dtype) and torch.equal(here.values.cpu(), there.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "heads", "kv_heads", "dim", "k"),
    [(1, 32, 8, 128, 4096), (2, 9, 3, 64, 512), (1, 9, 3, 64, 576), (5, 4, 2, 64, 512)],
)
def test_products_that_turn_and_store_in_pages(dtype, m, heads, kv_heads, dim, k):
    """Equal to product, then rotary embedding and store, up to the last bit of a rotated pair."""
    caches, step = _paged(m, kv_heads, dim, dtype)
    layer, x, residual, gamma = product_of(dtype, m, (heads + 2 * kv_heads) * dim, k)
    prepared = layer._prepared
    for _ in range(5):
        rest = (residual, gamma, 1e-5, prepared.tensors, layer.bias, prepared.spec_text)
        q, total = pages.norm_rotate_pages(step(0, heads), x + 0, *rest)
        qkv, same = layer.norm_linear(x + 0, residual, gamma, 1e-5)
        expected = pages.rotate_pages(step(1, heads), qkv, paired=True)
        scale = float(qkv.abs().max())
        assert torch.equal(total, same) and close(q / scale, expected / scale, dtype)
        assert close(caches[0] / scale, caches[1] / scale, dtype) and caches[1].any()
