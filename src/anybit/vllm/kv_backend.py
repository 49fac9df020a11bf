"""A vLLM attention backend for a KV cache of 8, 4 or 2 bits in vLLM's own blocks.

``kv_spec`` describes the blocks to vLLM, ``kernels.attention.kv_rows`` their contents. Decodes (one new token, or one
and its drafts) run anybit's kernels, which never wait for the host and can be captured in CUDA graphs. Prompts run
vLLM's FlashAttention over unpacked pages (``kv_step``). On a CPU everything runs in plain torch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from anybit.cache.blocks import Pool, step
from anybit.cache.kvcache import hadamard, turn
from anybit.device import Device
from anybit.errors import LayerError
from anybit.ops import kv_rows
from anybit.ops.compile_ahead import Kernel
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import PAGE, RowLayout
from anybit.ops.kv_rows import layout as row_layout
from anybit.scheme import KVFormat
from anybit.vllm.kv_spec import RowSpec
from anybit.vllm.kv_step import Batch, most_pages, run
from anybit.vllm.warmup import get_ready

_logger = init_logger("vllm.anybit")


class RowBackend(AttentionBackend):  # type: ignore[misc]
    """The backend of one cache format; ``backend_of`` makes the subclass."""

    format: ClassVar[KVFormat]
    slack: ClassVar[int]
    impl: ClassVar[type["RowImpl"]]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = True  # pages are packed before attention, the ring is written after it

    @staticmethod
    def get_name() -> str:
        """CUSTOM: vLLM's name for the backend of a plug-in."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type["RowImpl"]:
        """The class that runs a layer."""
        return cls.impl

    @staticmethod
    def get_builder_cls() -> type["RowBuilder"]:
        """The class that describes a step's batch to all layers."""
        return RowBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int]:
        """128 tokens: pages are never split."""
        return [PAGE]

    @classmethod
    def rows(cls, head_dim: int, together: int = 1) -> RowLayout:
        """The layout of a request's blocks; together: pages in a block."""
        return row_layout(cls.format, head_dim, cls.slack, together)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> RowSpec:
        """The spec that replaces a layer's 16-bit one, with as many tokens in a block."""
        rows = cls.rows(spec.head_size, max(spec.block_size // PAGE, 1))
        return RowSpec.of(replace(spec, dtype=torch.uint8), rows)

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, KV heads, 1, bytes of a page]."""
        return (num_blocks, num_kv_heads, 1, cls.rows(head_size).layout.page_bytes)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: a connector expects block i to hold tokens from 128 i, and the first blocks here hold the ring."""
        return False


@cache
def backend_of(format: KVFormat, slack: int) -> type[RowBackend]:
    """The backend of a format; slack: the most tokens that a step may reject (drafts)."""
    name = f"RowBackend_{format}_{slack}"
    backend: type[RowBackend] = type(name, (RowBackend,), {"format": format, "slack": slack, "__qualname__": name})
    backend.impl = type(f"RowImpl_{name}", (RowImpl,), {"backend": backend})
    return backend


class RowBuilder(AttentionMetadataBuilder[Batch]):  # type: ignore[misc]
    """Describes a step's batch once for all layers."""

    reorder_batch_threshold: int = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Full graphs for batches of one token each, or of one and its drafts if the kernels take so many."""
        graphs = AttentionCGSupport
        return graphs.UNIFORM_BATCH if most_of(vllm_config) > 1 else graphs.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = most_of(vllm_config)
        if not isinstance(kv_cache_spec, RowSpec):
            raise LayerError(
                f"layers {layer_names[:2]} ... were given a cache of {type(kv_cache_spec).__name__} in the place of "
                "anybit's: leave out --disable-hybrid-kv-cache-manager, and other plug-ins (VLLM_PLUGINS=anybit)"
            )
        self.room = _room(vllm_config)
        # A scheduler that runs ahead of drafts knows only the most tokens that a request can have.
        self.exact = not (vllm_config.speculative_config and vllm_config.scheduler_config.async_scheduling)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        for impl in impls:
            impl.layout = impl.backend.rows(impl.head_size, kv_cache_spec.together)
        if device.type == "cuda":
            dtype = _tokens_dtype(vllm_config.model_config.dtype)
            _compile(impls, dtype, vllm_config.scheduler_config.max_num_seqs, self.reorder_batch_threshold, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """The batch of a step. Waits for the device only where drafts and prompts are in one batch."""
        m, most = common_attn_metadata, self.reorder_batch_threshold
        decodes, prefills, few, _ = split_decodes_and_prefills(m, decode_threshold=most)
        table, lengths = m.block_table_tensor, m.seq_lens
        if m.max_query_len == 1:
            most, few = 1, decodes
        batch = Batch(table, lengths, m.query_start_loc, m.num_actual_tokens, decodes, few, most)
        if self.device.type == "cpu":
            batch.in_rows()
        elif prefills:
            found = m.seq_lens_cpu_upper_bound
            if found is None or not self.exact:
                found = lengths.cpu()
            starts = m.query_start_loc_cpu[decodes : m.num_reqs + 1].numpy().astype(np.int64)
            batch.add_prompts(starts, found[decodes : m.num_reqs].numpy().astype(np.int64), self.room)
        return batch


class RowImpl(AttentionImpl[Batch]):  # type: ignore[misc]
    """One layer's attention; ``backend_of`` makes the subclass of a backend."""

    backend: ClassVar[type[RowBackend]]

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.layout = self.backend.rows(head_size)
        self.masks = Masks(scale, sliding_window or None, logits_soft_cap or None, sinks)
        config = get_current_vllm_config()
        self.capacity = config.model_config.max_model_len
        self.room = _room(config)

    def forward(
        self, layer: Attention, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Batch | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store a batch's new tokens in the cache, and attend."""
        batch = attn_metadata
        if batch is None:  # vLLM is measuring memory
            if query.is_cuda:
                self._space(query, 0)
            return output.zero_()
        dtype, rotates = _tokens_dtype(query.dtype), self.layout.layout.format.rotate
        q, k, v, out = [_by_head(x, self.head_size) for x in (query, key, value, output)]
        if batch.rows or rotates or q.dtype != dtype:  # our kernels skip padding, but torch would not
            q, k, v, out = (x[: batch.tokens] for x in (q, k, v, out))
        if q.dtype != dtype:  # as in anybit's own generate
            q, k, v = (x.to(dtype) for x in (q, k, v))
        pages = kv_cache.view(torch.uint8).squeeze(2)
        rotation = None
        if rotates:
            rotation = _rotation(self.head_size, q.dtype, q.device)
            q, k, v = (turn(x, rotation, dtype) for x in (q, k, v))
        if batch.rows:
            found = step(Pool(self.layout, pages, dtype), batch.rows, q, k, v, self.masks)
        else:
            found = out if rotation is None and out.dtype == dtype else torch.empty_like(q)
            space = partial(self._space, q)
            run(
                batch, self.layout, pages, q, k, v, self.masks, found,
                capacity=self.capacity, space=space, prompts=self._prompts,
            )  # fmt: skip
        if found is not out:
            out.copy_(found if rotation is None else turn(found, rotation, dtype))
        return output

    def _prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, seen: Tensor, table: Tensor | None, most: int,
        out: Tensor,
    ) -> None:  # fmt: skip
        window = self.masks.window
        # Without a page table each sequence reads its own new tokens.
        where = {"cu_seqlens_k": starts} if table is None else {"seqused_k": seen, "block_table": table}
        _flash_attention(self.head_size)(
            q, keys, values, cu_seqlens_q=starts, max_seqlen_k=most, softmax_scale=self.masks.scale,
            window_size=[window - 1, 0] if window else None, softcap=self.masks.softcap or 0.0, out=out,
            s_aux=self.masks.sinks, **where,
        )  # fmt: skip

    def _space(self, like: Tensor, pages: int) -> Tensor:
        """Scratch memory for unpacked pages, [pages, 2, KV heads, 128, channels], shared by all layers."""
        pages = max(pages, self.room)
        shape = (pages, 2, self.num_kv_heads, PAGE, self.head_size)
        key = like.device, like.dtype, shape[1:]
        if key not in _spaces or _spaces[key].shape[0] < pages:
            _spaces[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return _spaces[key]


_spaces: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], Tensor] = {}
_rotation = cache(hadamard)


@cache
def _flash_attention(head_size: int) -> Callable[..., Tensor]:
    """FlashAttention as vLLM has it, causal, for at most a page of queries a sequence."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=head_size)
    return partial(flash_attn_varlen_func, max_seqlen_q=PAGE, causal=True, fa_version=version)


def _by_head(x: Tensor, head_size: int) -> Tensor:
    """[tokens, heads, head_size]; x itself if it has that shape, since a view costs time, too."""
    return x if x.dim() == 3 else x.view(x.shape[0], -1, head_size)


def _room(config: VllmConfig) -> int:
    return most_pages(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens)


def _tokens_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 16-bit tokens in the cache of a model of this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def drafts_of(config: VllmConfig) -> int:
    """The most drafts of a request in a step."""
    return config.speculative_config.num_speculative_tokens if config.speculative_config else 0


def most_of(config: VllmConfig) -> int:
    """The most new tokens of a decoding request: one and its drafts, or one if the kernels cannot take so many."""
    most = 1 + drafts_of(config)
    if most <= kv_rows.MOST_QUERIES:
        return most
    _logger.warning_once(
        "anybit: steps with %d drafts run as prompts, which is slow: the cache's kernel takes at most %d",
        most - 1, kv_rows.MOST_QUERIES - 1,
    )  # fmt: skip
    return 1


def _compile(impls: list[RowImpl], dtype: torch.dtype, sequences: int, most: int, device: torch.device) -> None:
    """Compile all kernels of the layers ahead of the first request; most: new tokens of a decode."""
    found, of = list[Kernel](), Device.of(torch.empty(0, device=device))
    alike = {(x.layout, x.num_heads, x.num_kv_heads, x.masks.window, x.masks.softcap): x for x in impls}
    for x in alike.values():
        found += kv_rows.kernels_for(
            x.layout, x.num_heads, x.num_kv_heads, x.masks, dtype, x.capacity, sequences, of, most
        )  # fmt: skip
    get_ready(found, device, "the KV cache")
