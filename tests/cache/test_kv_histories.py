"""Random histories of a KV cache, with invalid steps among them, against a plain model; see ``cases_kv.py``."""

import pytest
import torch

import cases_kv
from anybit.cache.kvcache import KVCache
from anybit.cache.ledger import CacheError
from anybit.errors import LayerError

SMALL = {"layers": 1, "kv_heads": 1, "head_dim": 64, "sequences": 3, "capacity": 256, "page": 64}


def test_kv_cache_survives_random_histories() -> None:
    done, refused = cases_kv.run(120)
    assert done > 1200 and refused > 600


def state(cache: KVCache) -> list[object]:
    """A cache's whole state."""
    ledger, tensors = cache.ledger, (cache.pages, cache.residual, cache.table, cache.lengths)
    return [list(ledger.entries), list(ledger.pool.references), list(ledger.pool._free), *map(bytes_of, tensors)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("step", "arguments", "said"),
    [
        ("extend", ([0, 1], 200), "sequence 1 has 100 tokens of at most 256: 200 more do not fit"),
        ("extend", ([0, 1], [1, 2, 3]), "2 sequences and 3 numbers of tokens: give one number for each"),
        ("extend", ([0, 1], 1.5), "a number of tokens must be a whole number, not 1.5"),
        ("extend", ([0, 1], [1, True]), "a number of tokens must be a whole number, not True"),
        ("extend", ([0, 1], torch.tensor(1.0)), "a number of tokens must be a whole number, not tensor"),
        ("extend", ([0], 10**400), r"0 tokens of at most 256: more than 10\^18 more do not fit"),
        ("extend", ([0, 0], 1), "sequence 0 is named 2 times"),
        ("extend", ([0, 2], 1), "sequence 2 is not in the cache"),
        ("extend", ([0, True], 1), "a sequence must be a whole number, not True"),
        ("extend", ([0, 1], [130, 140]), "2 sequences need 4 more pages for their tokens, and the KV cache has 3 of 4"),
        ("crop", (1, 101), "sequence 1 has 100 tokens and cannot be cropped to 101"),
        ("crop", (1, 99.0), "the length to crop to must be a whole number, not 99.0"),
        ("reorder", ([0, 1], [0]), "2 sequences cannot be reordered by 1 origins"),
        ("reorder", ([0, 1], [0, -1]), "origin -1 is not one of the 2 sequences"),
        ("reorder", ([0, 0], [0, 1]), "sequence 0 is named 2 times"),
        ("free", (1.0,), "a sequence must be a whole number, not 1.0"),
    ],
)
def test_kv_cache_refusal_says_why_and_changes_nothing(step: str, arguments: tuple[object, ...], said: str) -> None:
    cache = KVCache("kv4", pages=4, **SMALL)
    cache.add(), cache.add()
    cache.extend([1], 100)
    new = torch.randn(1, 100, 1, 64).half()
    cache.write(0, [1], new, new)
    before = state(cache)
    with pytest.raises(CacheError, match=said):
        getattr(cache, step)(*arguments)
    assert state(cache) == before


def test_kv_cache_unpack_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when no memory is left to unpack a window."""
    cache = KVCache("kv4", **SMALL)
    cache.add()
    cache.extend([0], 200)
    new = torch.randn(1, 200, 1, 64).half()
    cache.write(0, [0], new, new)
    before = state(cache)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("anybit.kernels.attention.kv_page.decode", fails)
    with pytest.raises(torch.OutOfMemoryError):
        cache.crop(0, 70)
    assert state(cache) == before


@pytest.mark.parametrize("size", [10**30, 2**31, 0, -1, 1.5, 2.0, True, "8"])
@pytest.mark.parametrize("name", ["layers", "kv_heads", "capacity", "sequences", "pages"])
def test_kv_cache_refuses_a_size_that_is_none(name: str, size: object) -> None:
    with pytest.raises(LayerError, match=f"{name} of a KV cache must be a whole number from 1 to .*, not {size!r}"):
        KVCache("kv4", **{**SMALL, name: size})
    cache = KVCache("kv4", **SMALL)
    before = state(cache)
    if name in ("layers", "capacity"):
        with pytest.raises(LayerError, match=f"{name} of a KV cache must be a whole number from 1 to "):
            cache.grow(**{"layers": 1, "capacity": 256, name: size})
    assert state(cache) == before


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(
        LayerError, match=r"takes 4\.\d+e\+07 GB, and cpu has .*: make it for fewer or shorter sequences"
    ):
        KVCache("kv4", **{**SMALL, "capacity": 2**31 - 1, "layers": 10**5})
    with pytest.raises(LayerError, match=r"a page holds 64, 128 or 256 tokens, not 64\.0"):
        KVCache("kv4", **{**SMALL, "page": 64.0})
