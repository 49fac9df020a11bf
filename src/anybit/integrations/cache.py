"""A quantized KV cache for transformers: ``AnyBitCache`` as ``past_key_values``, and the attention that reads it.

    model.set_attn_implementation("anybit")
    model.generate(**inputs, past_key_values=AnyBitCache("kv4", config=model.config))

With the attention implementation "anybit" (registered on import, its mask too) new tokens attend straight over packed
pages: on a GPU by the kernel, elsewhere by the exact reference. With any other implementation, and in models that do
not go through transformers' attention interface (BLOOM), the cache hands out dequantized keys and values: the same
result, none of the speed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from anybit import attention
from anybit.attention import Masks
from anybit.errors import LayerError
from anybit.kernels.decode import MOST_QUERIES
from anybit.kvcache import KVCache
from anybit.scheme import KVFormat, Scheme

NAME = "anybit"
_GROWTH = 1024


class AnyBitCache(Cache):  # type: ignore[misc]
    """K and V of a batch of sequences in a quantized cache.

    scheme: a KV format ("kv4", "k4v2g32"), or a model's scheme that has one ("w4a16g128-kv4").
    config: the model's configuration; its ``_attn_implementation`` decides whether attention reads packed pages.
    capacity: tokens of a sequence to make room for at once (the cache grows when that is not enough).
    page, slack: see ``KVCache``.
    Left-padded batches are kept without their padding where attention is "anybit".
    """

    is_compileable = False

    def __init__(
        self,
        scheme: str | Scheme | KVFormat,
        *,
        config: Any = None,
        capacity: int = 0,
        page: int = 128,
        slack: int = 32,
    ) -> None:
        super().__init__(layers=[])
        self.format = _format(scheme)
        self.config, self.capacity, self.page, self.slack = config, capacity, page, slack
        self.store: KVCache | None = None
        self.rows: list[int] = []
        self.seen = 0  # tokens of a row, padding included
        self._counted = 0  # of the forward pass under way
        self._waiting: tuple[Tensor, Tensor, int] | None = None

    # -------- what transformers asks

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take the new keys and values [batch, kv_heads, tokens, dim] of a layer; see the module's docstring."""
        if key_states.shape != value_states.shape:
            raise LayerError(
                f"keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} must have one shape: "
                "models whose heads of K and V differ are not supported by AnyBitCache"
            )
        if self._waiting is not None:
            raise LayerError(
                f"layer {self._waiting[2]} did not run the attention {NAME!r} although the model's configuration names "
                "it: its attention does not go through transformers' interface; leave out AnyBitCache's config"
            )
        self._begin(key_states, layer_idx)
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.packed_attention:
            key_states = key_states.view_as(key_states)  # a tensor of our own to mark
            key_states.anybit_cache = self  # type: ignore[attr-defined]
            self._waiting = (k, v, layer_idx)
            return key_states, value_states
        if layer_idx == 0:
            self._store().extend(self.rows, k.shape[1])
        old = self.seen - k.shape[1]
        store = self._store()
        store.write(layer_idx, self.rows, k.to(store.dtype), v.to(store.dtype))
        if old == 0:
            return key_states, value_states  # a prompt attends over its own 16-bit values
        both = [store.read(layer_idx, row, newest=k.shape[1]) for row in self.rows]
        keys, values = (torch.stack(x) for x in zip(*both, strict=True))
        if store.rotation is not None:
            keys, values = (x @ store.rotation.to(x.dtype) for x in (keys, values))
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @property
    def packed_attention(self) -> bool:
        """Whether attention reads packed pages itself."""
        return getattr(self.config, "_attn_implementation", None) == NAME

    def _begin(self, k: Tensor, layer: int) -> None:
        batch, heads, tokens, dim = k.shape
        if layer == 0:
            self.seen += tokens
            self._counted = 0
        if self.store is None:
            capacity = max(self.capacity, self.seen + _GROWTH)
            dtype = k.dtype if k.dtype in (torch.float16, torch.bfloat16) else torch.float16
            self.store = KVCache(
                self.format,
                layers=getattr(self.config, "num_hidden_layers", 1) or 1,
                kv_heads=heads,
                head_dim=dim,
                sequences=batch,
                capacity=-(-capacity // self.page) * self.page,
                page=self.page,
                slack=self.slack,
                dtype=dtype,
                device=k.device,
            )
            self.rows = [self.store.add() for _ in range(batch)]
        if batch != len(self.rows):
            raise LayerError(f"the batch has {batch} rows, and this cache was filled with {len(self.rows)}")
        if (heads, dim) != (self.store.kv_heads, self.store.head_dim):
            raise LayerError(
                f"layer {layer} has {heads} KV heads of {dim} channels, and earlier ones {self.store.kv_heads} of "
                f"{self.store.head_dim}: AnyBitCache needs all layers alike"
            )
        if layer >= self.store.layers or self.seen > self.store.ledger.capacity:
            self.store.grow(max(layer + 1, self.store.layers), self.seen + (_GROWTH if layer == 0 else 0))

    def _store(self) -> KVCache:
        if self.store is None:
            raise LayerError("the KV cache is empty")
        return self.store

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit: the cache grows."""
        return -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit: the cache grows."""
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask covers, and the first one's position."""
        length = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.seen + length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on as row ``beam_idx[i]`` was; only what differs is copied."""
        if self.store is not None:
            self.store.reorder(self.rows, beam_idx.tolist())

    def crop(self, tokens: int) -> None:
        """Take tokens back, exactly up to ``slack``: how many, or in older transformers how many stay."""
        removed = tokens if _CROP_COUNTS_REMOVED else (-tokens if tokens < 0 else self.seen - tokens)
        if self.store is None or removed <= 0:
            return
        for row in self.rows:
            self.store.crop(row, max(self.store.length(row) - removed, 0))
        self.seen -= removed

    def reset(self) -> None:
        """Forget all tokens."""
        self.store, self.rows, self.seen, self._waiting = None, [], 0, None

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first."""
        return len(self.rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether a first token has come."""
        return self.store is not None

    @property
    def is_croppable(self) -> bool:
        """Whether a few tokens can be taken back without a trace."""
        return True

    def __len__(self) -> int:
        return 0 if self.store is None else self.store.layers

    # -------- attention over packed pages

    def attend(self, q: Tensor, padding: Tensor | None, masks: Masks) -> Tensor:
        """Store what ``update`` took, and attend; q [batch, heads, tokens, dim], padding [batch, keys]."""
        if self._waiting is None:
            raise LayerError("attention was asked for before keys and values came")
        (k, v, layer), self._waiting = self._waiting, None
        store, tokens = self._store(), q.shape[2]
        q = q.transpose(1, 2).to(store.dtype)
        k, v = (x.to(store.dtype) for x in (k, v))
        counts = [tokens] * len(self.rows) if padding is None else padding[:, -tokens:].sum(1).tolist()
        if layer == 0:
            store.extend(self.rows, tokens if padding is None else counts)
        even = all(count == tokens for count in counts)
        if even and tokens <= min(MOST_QUERIES, store.ledger.slack) and self.seen > tokens:
            store.write(layer, self.rows, k, v)
            return attention.decode(q, store, layer, self.rows, masks)[0]
        out = torch.zeros_like(q)
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            if count:
                new = slice(tokens - count, tokens)
                out[i, new] = attention.prefill(q[i, new], k[i, new], v[i, new], store, layer, row, masks)
        return out


def _format(scheme: str | Scheme | KVFormat) -> KVFormat:
    if isinstance(scheme, KVFormat):
        return scheme
    if isinstance(scheme, str) and scheme.startswith("k"):
        return KVFormat.parse(scheme)
    found = Scheme.parse(scheme).kv
    if found is None:
        raise LayerError(
            f"scheme {scheme!s} says nothing about the KV cache: add -kv4, or give a KV format such as 'kv4'"
        )
    return found


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention implementation "anybit": refuses by name what a paged cache cannot do."""
    cache = getattr(key, "anybit_cache", None)
    if cache is None:
        raise LayerError(
            "attention 'anybit' needs an AnyBitCache: pass past_key_values=AnyBitCache('kv4', config=model.config)"
        )
    if dropout:
        raise LayerError(f"attention 'anybit' has no dropout, and {dropout} was asked for: call model.eval()")
    if position_bias is not None:
        raise LayerError("attention 'anybit' has no learned position bias")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise LayerError("attention 'anybit' is causal, and this layer is not")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise LayerError(f"attention 'anybit' takes padding masks [batch, keys], not {tuple(attention_mask.shape)}")
    masks = Masks(scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return cache.attend(query, attention_mask, masks).to(query.dtype), None


def mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    kv_length: int = 0,
    mask_function: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of "anybit": the padding, or None where there is none; causality and windows are the attention's own."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:] if kv_length else attention_mask
    return None if bool(attention_mask.all()) else attention_mask


_CROP_COUNTS_REMOVED = "tokens_to_remove" in inspect.signature(Cache.crop).parameters
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask)
