"""The KV cache's kernels as torch.library ops, which torch.compile sees as one node each.

An op takes tensors and numbers: the cache travels as its number (``kvcache.live``), beside
the tensors that the op reads and writes. Lengths are counted before (``KVCache.extend``), outside of what is compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from anybit import attention
from anybit.attention import NO_MASKS, Masks
from anybit.kvcache import KVCache, live


def write(store: KVCache, layer: int, rows: Sequence[int], k: Tensor, v: Tensor) -> None:
    """``KVCache.write`` as the op ``anybit::kv_write``."""
    torch.ops.anybit.kv_write(k, v, store.pages, store.residual, store.lengths, store.number, layer, list(rows))


def decode(
    q: Tensor, store: KVCache, layer: int, rows: Sequence[int], masks: Masks = NO_MASKS
) -> Tensor:  # fmt: skip
    """``attention.decode`` as the op ``anybit::kv_decode``; without its log-sum-exp."""
    out: Tensor = torch.ops.anybit.kv_decode(
        q, store.pages, store.residual, store.lengths, store.number, layer, list(rows),
        masks.scale, masks.window, masks.softcap, masks.sinks, masks.alibi,
    )  # fmt: skip
    return out


@contextmanager
def _over(number: int, pages: Tensor, residual: Tensor) -> Iterator[KVCache]:
    """The cache, on the memory that the op was given: a compiler may hand over a copy, and copy it back."""
    store = live(number)
    own = store.pages, store.residual
    store.pages, store.residual = pages, residual
    try:
        yield store
    finally:
        store.pages, store.residual = own


def _write(
    k: Tensor, v: Tensor, pages: Tensor, residual: Tensor, lengths: Tensor, store: int, layer: int, rows: list[int]
) -> None:
    with _over(store, pages, residual) as cache:
        cache.write(layer, rows, k, v)


def _decode(
    q: Tensor, pages: Tensor, residual: Tensor, lengths: Tensor, store: int, layer: int, rows: list[int],
    scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None, alibi: Tensor | None,
) -> Tensor:  # fmt: skip
    with _over(store, pages, residual) as cache:
        return attention.decode(q, cache, layer, rows, Masks(scale, window, softcap, sinks, alibi))[0]


_library = torch.library.Library("anybit", "FRAGMENT")
_library.define(
    "kv_write(Tensor k, Tensor v, Tensor(a!) pages, Tensor(b!) residual, Tensor lengths, int store, int layer, "
    "int[] rows) -> ()"
)
_library.define(
    "kv_decode(Tensor q, Tensor pages, Tensor residual, Tensor lengths, int store, int layer, int[] rows, "
    "float? scale, int? window, float? softcap, Tensor? sinks, Tensor? alibi) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("kv_write", _write, _device)
    _library.impl("kv_decode", _decode, _device)
torch.library.register_fake("anybit::kv_write", lambda *_: None)
torch.library.register_fake(
    "anybit::kv_decode", lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format)
)
