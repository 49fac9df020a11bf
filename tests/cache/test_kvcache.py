"""The KV cache on tensors, and its attention reference, against plain attention."""

import pytest
import torch

from anybit.cache.attention import Masks, attend, decode
from anybit.cache.kvcache import KVCache, hadamard
from anybit.cache.ledger import CacheError
from anybit.errors import LayerError, SchemeError


def make(format="kv16", **kw):
    options = {"layers": 2, "kv_heads": 2, "head_dim": 64, "sequences": 4, "capacity": 512, "page": 64, "slack": 32}
    return KVCache(format, **{**options, **kw})


def tokens(n, generator, heads=2, dim=64):
    return [torch.randn(2, 1, n, heads, dim, generator=generator).half() for _ in range(2)]  # K, V: [layers, 1, n, ...]


def put(cache, sequence, kv):
    cache.extend([sequence], kv[0].shape[2])
    for layer in range(2):
        cache.write(layer, [sequence], kv[0][layer], kv[1][layer])


@pytest.mark.parametrize("format", ["kv8", "kv4", "kv2g32", "kv4t", "k4v2g32t", "k16v4", "kv4rot"])
def test_packed_tokens_are_the_dequantized_ones_and_the_newest_are_exact(format):
    generator = torch.Generator().manual_seed(1)
    cache = make(format)
    s = cache.add()
    kv = tokens(100, generator)
    put(cache, s, kv)
    rotation = hadamard(64) if "rot" in format else torch.eye(64)
    for got, want in zip(cache.read(1, s), kv, strict=True):
        want = (want[1, 0].float() @ rotation).transpose(0, 1)
        torch.testing.assert_close(got[:, 64:], want[:, 64:], rtol=0, atol=2e-3)
        step = (want.amax() - want.amin()) / (3 if "2" in format.split("g")[0] else 15)
        assert (got[:, :64] - want[:, :64]).abs().max() <= step


def test_rolling_back_a_few_tokens_is_exact_even_across_a_packed_window():
    generator = torch.Generator().manual_seed(2)
    cache = make("kv2")
    s = cache.add()
    kv = tokens(60, generator)
    put(cache, s, kv)
    before = cache.read(0, s)
    put(cache, s, tokens(16, generator))  # packs the first 64
    cache.crop(s, 60)
    after = cache.read(0, s)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("format", ["kv16", "kv4", "kv2t", "kv8rot"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "masks",
    [Masks(), Masks(window=20), Masks(softcap=5.0, scale=0.3), Masks(sinks=torch.randn(4), alibi=torch.rand(4))],
    ids=["plain", "window", "softcap", "sinks-alibi"],
)
def test_attention_is_attention_over_what_the_cache_holds(format, queries, masks):
    generator = torch.Generator().manual_seed(3)
    cache = make(format)
    a, b = cache.add(), cache.add()
    put(cache, a, tokens(90, generator))
    put(cache, b, tokens(3, generator))
    new = [torch.randn(2, queries, 2, 64, generator=generator).half() for _ in range(2)]
    cache.extend([a, b], queries)
    for layer in range(2):
        cache.write(layer, [a, b], *new)
    q = torch.randn(2, queries, 4, 64, generator=generator).half()
    out, lse = decode(q, cache, 1, [a, b], masks)
    for row, s in enumerate((a, b)):
        rotation = hadamard(64) if cache.rotation is not None else torch.eye(64)
        k, v = (x @ rotation for x in cache.read(1, s, newest=queries))
        for i in range(queries):
            for h in range(4):
                visible = k.shape[1] - queries + i + 1
                first = 0 if masks.window is None else max(0, visible - masks.window)
                logits = (k[h // 2, first:visible] @ q[row, i, h].float()) * (masks.scale or 64**-0.5)
                if masks.softcap:
                    logits = masks.softcap * torch.tanh(logits / masks.softcap)
                if masks.alibi is not None:
                    logits = logits + masks.alibi[h] * (torch.arange(first, visible) - visible + 1)
                extra = logits if masks.sinks is None else torch.cat((logits, masks.sinks[h : h + 1]))
                want = torch.exp(logits - extra.logsumexp(0)) @ v[h // 2, first:visible]
                torch.testing.assert_close(out[row, i, h].float(), want, rtol=4e-3, atol=4e-3)
                torch.testing.assert_close(lse[row, i, h], extra.logsumexp(0), rtol=2e-3, atol=2e-3)


def test_attention_over_nothing_is_zero():
    out, total = attend(torch.randn(1, 2, 8), torch.zeros(1, 1, 8)[:, :0], torch.zeros(1, 1, 8)[:, :0])
    assert out.eq(0).all() and total.eq(-torch.inf).all()


def test_kv_cache_refuses_what_does_not_fit():
    cache = make("kv4", capacity=64, pages=1)
    s = cache.add()
    k = torch.zeros(1, 1, 2, 64).half()
    with pytest.raises(CacheError, match="call extend first"):
        cache.write(0, [s], k, k)
    cache.extend([s], 1)
    with pytest.raises(LayerError, match="float32"):
        cache.write(0, [s], k.float(), k)
    with pytest.raises(LayerError, match="heads, dim"):
        cache.write(0, [s], k[..., :32], k)
    with pytest.raises(LayerError, match="share 2 KV heads"):
        decode(torch.zeros(1, 1, 3, 64).half(), cache, 0, [s])
    with pytest.raises(LayerError, match="fewer than the 2 queries"):
        decode(torch.zeros(1, 2, 4, 64).half(), cache, 0, [s])
    with pytest.raises(LayerError, match=r"alibi is \(3,\), and must be a value for each of 4 heads"):
        decode(torch.zeros(1, 1, 4, 64).half(), cache, 0, [s], Masks(alibi=torch.zeros(3)))
    for layer in (-1, 2):
        with pytest.raises(LayerError, match=f"layer {layer} is not in this KV cache, which has layers 0 to 1"):
            decode(torch.zeros(1, 1, 4, 64).half(), cache, layer, [s])
        with pytest.raises(LayerError, match=f"layer {layer} is not in this KV cache"):
            cache.write(layer, [s], k, k)
    with pytest.raises(LayerError, match="k is on meta, and the KV cache on cpu"):
        cache.write(0, [s], k.to("meta"), k)
    with pytest.raises(LayerError, match="q is on meta, and the KV cache on cpu"):
        decode(torch.zeros(1, 1, 4, 64, device="meta").half(), cache, 0, [s])
    with pytest.raises(LayerError, match="power of two"):
        make("k4v4g32rot", head_dim=96)
    with pytest.raises(LayerError, match="slack must be a multiple of 32 tokens, 0 or more, not -32"):
        make(slack=-32)
    with pytest.raises(SchemeError, match="a KV format is a string such as 'kv4', not int"):
        make(4)
