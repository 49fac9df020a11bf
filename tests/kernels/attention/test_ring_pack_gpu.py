"""Windows packed from the ring alone, as by a replayed step, equal those packed while tokens are stored."""

import pytest
import torch

from anybit.cache.kvcache import KVCache


@pytest.mark.parametrize("format", ["kv4", "kv2g32t", "kv16"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_pages_are_the_same(format: str, tokens: int) -> None:
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 64, "sequences": 2, "capacity": 512, "device": "cuda"}
    whole, apart = KVCache(format, **sizes), KVCache(format, **sizes)
    rows = [whole.add(), whole.add()]
    assert rows == [apart.add(), apart.add()]
    k, v = torch.randn(2, 2, 126, 2, 64, device="cuda").half()
    for cache in (whole, apart):
        cache.extend(rows, 126)
        cache.write(0, rows, k, v)
    packed = 0
    for _ in range(3):
        k, v = torch.randn(2, 2, tokens, 2, 64, device="cuda").half()
        whole.extend(rows, tokens)
        whole.write(0, rows, k, v)
        apart.extend(rows, tokens)
        for row in rows:
            newest = (new[row].transpose(0, 1) for new in (k, v))
            apart.tokens(0).write_ring(apart.row_index((row,)), apart.length(row) - tokens, *newest)
        if apart.completes(rows, tokens):
            apart.pack(0, rows, tokens)
            packed += 1
        assert torch.equal(whole.residual, apart.residual)
        assert torch.equal(whole.pages, apart.pages)
    assert packed == 1 and whole.pages.any()
