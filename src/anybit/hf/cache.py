"""A quantized KV cache for transformers: ``AnyBitCache`` as ``past_key_values``, and the attention that reads it.

    model.set_attn_implementation("anybit")
    model.generate(**inputs, past_key_values=AnyBitCache("kv4", config=model.config))

The attention implementation "anybit" (registered on import, with its mask) reads packed pages directly: by the kernel
on a GPU, by the exact reference elsewhere. With any other implementation, and in models that bypass transformers'
attention interface (BLOOM), the cache returns dequantized keys and values: the same result without the speed.
"""

import copy
from typing import NoReturn, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.utils import logging

from anybit.cache import attention
from anybit.cache.kvcache import KVCache
from anybit.cache.ledger import MOST, Independent, check_page, whole
from anybit.errors import LayerError
from anybit.hf.cache_attention import NAME, check_padding
from anybit.ops import kv
from anybit.ops.backend import RopeStoreArgs
from anybit.ops.kv import MOST_QUERIES, Masks
from anybit.scheme import KVFormat, Scheme, is_whole

_GROWTH = 1024
_logger = logging.get_logger("anybit")

Waiting = tuple[Tensor, Tensor, int]
"""(keys, values, layer index): new keys and values [batch, tokens, kv_heads, dim], not yet stored."""


class _NoLayers(list[object]):
    """The layers of a cache that has none: a model that asks for one keeps more than keys and values in it."""

    def __getitem__(self, index: object) -> NoReturn:
        raise LayerError(
            "this model keeps more than keys and values in its cache (a state of linear attention or convolution, or "
            "an index), and an AnyBitCache holds only those: use transformers' own cache"
        )


class AnyBitCache(Independent, Cache):  # type: ignore[misc]
    """A quantized KV cache for a batch of sequences.

    scheme: a KV format ("kv4", "k4v2g32"), or a scheme that has one ("w4a16g128-kv4").
    config: the model's configuration; its ``_attn_implementation`` decides whether attention reads packed pages.
    capacity: tokens per sequence to allocate up front (the cache grows beyond that).
    page, slack: see ``KVCache``.
    static: never grow beyond ``capacity``: addresses stay fixed, so a step can be a CUDA graph (``graph.py``).
    With attention "anybit", the padding of left-padded batches is not stored.
    Copies (``copy.deepcopy``, ``pickle``, ``torch.save``) are independent; those in this process share ``config``.

    After an error the cache is as it was before the forward pass. (If a layer after the first fails, ``KVCache.crop``
    removes the pass's tokens: exact for up to ``slack`` tokens, and if the cache holds no others.)
    """

    is_compileable = False

    def __init__(
        self,
        scheme: str | Scheme | KVFormat,
        *,
        config: PreTrainedConfig | None = None,
        capacity: int = 0,
        page: int = 128,
        slack: int = 32,
        static: bool = False,
    ) -> None:
        super().__init__(layers=_NoLayers())
        self.format = _format(scheme)
        if config is not None and hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        self.config = config
        self.capacity, self.page, self.slack = capacity, page, slack
        self.static = static
        check_page(page, slack)
        if not is_whole(capacity) or not 0 <= capacity <= MOST:
            raise LayerError(f"capacity of an AnyBitCache must be a whole number of tokens, not {capacity!r}")
        if static and capacity < 1:
            raise LayerError(f"a static AnyBitCache needs a capacity of at least 1 token, not {capacity}")
        self.store: KVCache | None = None
        self.rows: list[int] = []
        self.seen = 0  # tokens of a row, padding included
        self._waiting: Waiting | None = None
        self._counted_ahead = 0  # tokens of the current forward pass that ``count`` counted before it ran
        self._pass: tuple[int, list[int]] = 0, []  # tokens counted by the current pass: padding included, and per row
        self.packs_later = False  # full windows are packed by ``counted`` after the forward pass, not during it

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo.setdefault(id(self.config), self.config)  # the model's: it says how attention runs now
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__ |= copy.deepcopy(self.__dict__, memo)
        return copied

    # -------- transformers' Cache interface

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values, [batch, kv_heads, tokens, dim] each.

        Returns the keys and values that attention takes: all tokens, dequantized (a first prompt's as passed in); only
        the new tokens if attention is "anybit", which reads the pages itself.
        Raises LayerError if batch, shape or device changed, or a static cache is full.
        """
        if key_states.shape != value_states.shape:
            raise LayerError(
                f"keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} must have the same shape: "
                "AnyBitCache does not support models whose K and V heads differ"
            )
        if self._waiting is not None:
            layer, self._waiting = self._waiting[2], None
            raise LayerError(
                f"layer {layer} did not run attention {NAME!r}, although the cache's configuration names it: call "
                f"model.set_attn_implementation({NAME!r}). If the model bypasses transformers' attention interface, "
                "create the AnyBitCache without config"
            )
        if layer_idx > 0 and self.seen == 0:
            raise LayerError(
                f"layer {layer_idx} is the first that stores keys and values, so earlier ones keep a state elsewhere, "
                "which an AnyBitCache cannot hold: use transformers' own cache"
            )
        self._begin(tuple(key_states.shape), layer_idx, key_states)
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.packed_attention:
            key_states = key_states.view_as(key_states)  # a tensor of our own to mark
            key_states.anybit_cache = self  # type: ignore[attr-defined]
            self._waiting = (k, v, layer_idx)
            return key_states, value_states
        self._count(layer_idx, k.shape[1])
        old = self.seen - k.shape[1]
        store = self._store()
        store.write(layer_idx, self.rows, k.to(store.dtype), v.to(store.dtype))
        if old == 0:
            return key_states, value_states  # a first prompt attends to its own unquantized keys and values
        if k.is_cuda:
            _logger.warning_once(
                f"an AnyBitCache is dequantized whole at every step, which is slow: where the model supports attention "
                f"{NAME!r}, call model.set_attn_implementation({NAME!r}) and pass config=model.config to the cache"
            )
        both = [store.read(layer_idx, row, newest=k.shape[1]) for row in self.rows]
        keys, values = (store.turn(torch.stack(x)) for x in zip(*both, strict=True))
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @property
    def packed_attention(self) -> bool:
        """Whether attention reads packed pages itself."""
        return getattr(self.config, "_attn_implementation", None) == NAME

    @property
    def unpadded(self) -> bool:
        """Whether rows hold fewer tokens than the cache has seen: those of padding are not stored."""
        return any(self._store().length(row) < self.seen for row in self.rows)

    def _begin(self, shape: tuple[int, ...], layer: int, k: Tensor | None = None) -> None:
        """Make room for a layer's new keys [batch, kv_heads, tokens, dim].

        Counts no tokens. Raises LayerError if they do not fit, after removing those that this pass already counted.
        """
        counted = layer > 0 or self._counted_ahead > 0
        total = self.seen + (0 if counted else shape[2])
        try:
            self._check(shape, layer, total, k)
        except LayerError:
            if counted:
                self.take_back()
            raise
        if self.store is None and k is not None:
            self._allocate(shape, k, total)
        store = self._store()
        if layer >= store.layers or total > store.ledger.capacity:
            store.grow(max(layer + 1, store.layers), total + (_GROWTH if layer == 0 else 0))

    def _check(self, shape: tuple[int, ...], layer: int, total: int, k: Tensor | None) -> None:
        (batch, heads, _, dim), store = shape, self.store
        if self.static:
            self._check_room(total)
        if store is None:
            return
        if batch != len(self.rows):
            raise LayerError(f"the batch has {batch} rows, and this cache was filled with {len(self.rows)}")
        if (heads, dim) != (store.kv_heads, store.head_dim):
            raise LayerError(
                f"layer {layer} has {heads} KV heads of {dim} channels, and earlier ones {store.kv_heads} of "
                f"{store.head_dim}: AnyBitCache needs the same in all layers"
            )
        if k is not None and k.device != store.pages.device:
            raise LayerError(f"keys are on {k.device}, and the KV cache on {store.pages.device}: move one of them")
        if self.static and layer >= store.layers:
            raise LayerError(
                f"layer {layer} is beyond a static AnyBitCache of {store.layers} layers: pass config=model.config"
            )

    def _check_room(self, total: int) -> None:
        """Raise LayerError if a static cache has no room for ``total`` tokens per row."""
        room = self._pages(self.capacity)
        if total > room:
            raise LayerError(f"{total} tokens do not fit a static AnyBitCache of {room}: create it with more capacity")

    def _pages(self, tokens: int) -> int:
        """``tokens`` rounded up to whole pages."""
        return -(-tokens // self.page) * self.page

    def _allocate(self, shape: tuple[int, ...], k: Tensor, total: int) -> None:
        """Create the KVCache for a batch of keys like k, [batch, kv_heads, tokens, dim]."""
        batch, heads, _, dim = shape
        capacity = self.capacity if self.static else max(self.capacity, total + _GROWTH)
        self.store = KVCache(
            self.format,
            layers=getattr(self.config, "num_hidden_layers", 1) or 1,
            kv_heads=heads,
            head_dim=dim,
            sequences=batch,
            capacity=self._pages(capacity),
            page=self.page,
            slack=self.slack,
            dtype=k.dtype if k.dtype in (torch.float16, torch.bfloat16) else torch.float16,
            device=k.device,
        )
        self.rows = [self.store.add() for _ in range(batch)]

    def _count(self, layer: int, tokens: int, of_rows: list[int] | None = None) -> None:
        """At layer 0, count the pass's tokens unless ``count`` already has. of_rows: per row, without padding."""
        if layer == 0 and not self._counted_ahead:
            of_rows = [tokens] * len(self.rows) if of_rows is None else of_rows
            extend = self._store().extend
            if torch.compiler.is_dynamo_compiling():  # compiled code would extend only behind the ops that read lengths
                extend = torch.compiler.disable(extend)
            extend(self.rows, of_rows)
            self.seen, self._pass = self.seen + tokens, (tokens, of_rows)

    def take_back(self) -> None:
        """Remove the tokens that a forward pass which failed has counted."""
        store, (tokens, of_rows) = self._store(), self._pass
        for row, n in zip(self.rows, of_rows, strict=False):
            store.crop(row, store.length(row) - n)
        self.seen, self._counted_ahead, self._pass = self.seen - tokens, 0, (0, [])

    def count(self, tokens: int) -> None:
        """Count a step's tokens before its forward pass: all the host work, so the pass can be a CUDA graph."""
        store, tokens = self._store(), whole(tokens, "the tokens of a step")
        total = self.seen + tokens
        if self.static:
            self._check_room(total)
        elif total > store.ledger.capacity:
            store.grow(store.layers, total + _GROWTH)
        self._counted_ahead = 0
        self._count(0, tokens)
        self._counted_ahead = tokens

    def counted(self) -> None:
        """Finish the step begun by ``count``, after its forward pass: pack the windows that it filled."""
        store, tokens, self._counted_ahead = self._store(), self._counted_ahead, 0
        if self.packs_later and store.completes(self.rows, tokens):
            for layer in range(store.layers):
                store.pack(layer, self.rows, tokens)

    def takes_step(self, tokens: int) -> bool:
        """Whether packed attention can run ``tokens`` new tokens per row, without padding, as a decode step."""
        before = self.seen - self._counted_ahead
        return self.packed_attention and before > 0 and self._in_one_launch(tokens)

    def _in_one_launch(self, tokens: int) -> bool:
        """Whether ``tokens`` new tokens per row are few enough for the decode kernel."""
        return self.store is not None and tokens <= min(MOST_QUERIES, self.store.ledger.slack)

    def _store(self) -> KVCache:
        if self.store is None:
            raise LayerError("this AnyBitCache holds no tokens yet: run a forward pass over a prompt first")
        return self.store

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        waits = self._waiting is not None and self._waiting[2] == 0 and not self._counted_ahead
        return self.seen + (self._waiting[0].shape[1] if waits and self._waiting else 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, no limit: the cache grows."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """No layer is linear attention. Never empty: generate takes all([]) as true and reprocesses a chat."""
        return [False] * max(len(self), 1)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """(number of keys that a mask covers, position of the first)."""
        length = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.seen + length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues row ``beam_idx[i]``; full pages are shared, not copied."""
        if self.store is not None:
            self.store.reorder(self.rows, beam_idx.tolist())

    def crop(self, tokens: int) -> None:
        """Remove n newest tokens, exactly up to ``slack``; tokens: n or -n."""
        removed = min(abs(whole(tokens, "the tokens to crop")), self.seen)
        for row in self.rows:
            self._store().crop(row, max(self._store().length(row) - removed, 0))
        self.seen -= removed

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported (the base class works layer by layer, and this cache has no layer objects)."""
        raise LayerError("an AnyBitCache cannot repeat its rows: pass generate a batch that is already repeated")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported, like ``batch_repeat_interleave``."""
        raise LayerError("an AnyBitCache cannot select rows: use reorder_cache")

    def reset(self) -> None:
        """Forget all tokens; a static cache keeps its memory."""
        self.seen, self._waiting, self._counted_ahead, self._pass = 0, None, 0, (0, [])
        if self.store is None or not self.static:
            self.store, self.rows = None, []
            return
        for row in self.rows:
            self.store.free(row)
        self.rows = [self.store.add() for _ in self.rows]

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first."""
        return len(self.rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether any token has been stored."""
        return self.store is not None

    def __len__(self) -> int:
        return 0 if self.store is None else self.store.layers

    def __repr__(self) -> str:
        kind = "static " if self.static else ""
        return f"AnyBitCache({kind}{self.format}: {len(self)} layers, {len(self.rows)} rows of {self.seen} tokens)"

    # -------- attention over packed pages

    def step(
        self, layer: int, cosine: Tensor, sine: Tensor, heads: tuple[int, int], batch: int, dtype: torch.dtype
    ) -> RopeStoreArgs | None:
        """Count a layer's step and return where a kernel can store its keys and values directly after RoPE.

        cosine, sine: [batch * tokens, head_dim].  heads: (query heads, KV heads).  dtype: of keys and values.
        None, and nothing counted, if the format rotates its keys or the dtypes differ: then ``attend_new``.
        """
        store, tokens = self._store(), len(cosine) // batch
        if store.rotation is not None or dtype != store.dtype:
            return None
        self._begin((batch, heads[1], tokens, cosine.shape[1]), layer)
        self._count(layer, tokens)
        store = self._store()
        store.newest_are_few = True
        where = store.residual[layer], store.lengths, store.row_pointer(self.rows)
        return RopeStoreArgs(cosine, sine, *where, *heads, tokens)

    def attend_new(self, layer: int, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, masks: Masks) -> Tensor:
        """Store a layer's new keys and values, and attend to all: q, k, v [batch, tokens, heads, dim] after RoPE.

        padding: [batch, keys]; None for none.  Returns q's shape and dtype.
        """
        batch, tokens, heads, dim = k.shape
        self._begin((batch, heads, tokens, dim), layer, k)
        return self._attend(layer, q, k, v, padding, masks)

    def attend_turned(self, layer: int, q: Tensor, masks: Masks) -> Tensor:
        """Attention of queries after RoPE [batch, tokens, heads, head_dim]; keys and values are stored (``step``)."""
        store, tokens = self._store(), q.shape[1]
        if not self.packs_later and store.completes(self.rows, tokens):
            store.pack(layer, self.rows, tokens)
        return kv.attend(q, store, layer, self.rows, masks)

    def taken(self) -> Waiting | None:
        """Take the keys and values that ``update`` left for this attention call; None if there are none."""
        found, self._waiting = self._waiting, None
        return found

    def attend(self, q: Tensor, new: Waiting | None, padding: Tensor | None, masks: Masks) -> Tensor:
        """Store the keys and values from ``taken`` and attend; q [batch, heads, tokens, dim], padding [batch, keys]."""
        if new is None:
            raise LayerError(
                "attention ran without an update of the cache before it: this layer shares another's keys and values. "
                "Create the AnyBitCache without config"
            )
        k, v, layer = new
        return self._attend(layer, q.transpose(1, 2), k, v, padding, masks)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, masks: Masks) -> Tensor:
        store, tokens, dtype = self._store(), q.shape[1], q.dtype
        if layer == 0:
            counts = [tokens] * len(self.rows) if padding is None else (padding[:, -tokens:] != 0).sum(1).tolist()
            if padding is not None:
                check_padding(padding)
            self._count(layer, tokens, counts)
        if dtype != store.dtype:
            q, k, v = (x.to(store.dtype) for x in (q, k, v))
        counts = self._pass[1]
        even = counts.count(tokens) == len(counts)
        if even and self.seen == tokens and attention.is_plain(masks, tokens):
            store.write(layer, self.rows, k, v)
            out = attention.attend_prompts(q, k, v, masks)
        elif even and self.seen > tokens and self._in_one_launch(tokens):
            kv.write(store, layer, self.rows, k, v)
            out = kv.attend(q, store, layer, self.rows, masks)
        elif even and len(counts) == 1:
            out = attention.prefill(q[0], k[0], v[0], store, layer, self.rows[0], masks)[None]
        else:
            out = torch.zeros_like(q)
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
                if count:
                    own = slice(tokens - count, tokens)
                    out[i, own] = attention.prefill(q[i, own], k[i, own], v[i, own], store, layer, row, masks)
        return out.to(dtype)


def _format(scheme: str | Scheme | KVFormat) -> KVFormat:
    if isinstance(scheme, KVFormat):
        return scheme
    if isinstance(scheme, str) and scheme.startswith("k"):
        return KVFormat.parse(scheme)
    found = Scheme.parse(scheme).kv
    if found is None:
        raise LayerError(f"scheme {scheme!s} names no KV format: add -kv4, or pass a KV format such as 'kv4'")
    return found
