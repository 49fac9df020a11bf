"""vLLM's FlashAttention, whose steps of one new token a request run anybit's kernel, over the same 16-bit pages.

    vllm serve MODEL --additional-config '{"anybit_attention": false}'     # FlashAttention in every step

Nothing else changes: who stores tokens, prompts, prefix caching, how requests are scheduled. The kernel reads lengths
and tables on the device, so CUDA graphs of decode steps hold it. Which of the two runs is decided once a step, when
its metadata is built. What vLLM's sources say that matters here:

    Rows of a padded batch have a length of 0; FlashAttention leaves their outputs as they are.
    vLLM's second runner captures graphs of mixed batches with one token a request, too, so that a longest query of 1
    says nothing about what such a graph is replayed with: where mixed batches have full graphs, nothing is taken over.
    The schedule that FlashAttention 3 makes ahead (three launches a step) is not made for what this kernel attends;
    but in the first step, in which vLLM 0.26 looks up the window that all later ones are made for.
    0.26 takes a group's window for each of its layers, 0.32 the layer's own: a layer with another one stays vLLM's.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from anybit.device import Device
from anybit.errors import AnyBitError
from anybit.integrations.vllm.rotary import pages_of, stores_pages
from anybit.integrations.vllm.warmup import get_ready
from anybit.ops import kv_plain
from anybit.ops.kv import Masks

_logger = logging.getLogger("vllm.anybit")
_RANGES = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")
"""What a batch's metadata holds where attention is not causal with one window alone."""


class DecodeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's, with another builder and another implementation."""

    @staticmethod
    def get_impl_cls() -> type["DecodeImpl"]:
        """What runs a layer."""
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type["DecodeBuilder"]:
        """What describes a batch."""
        return DecodeBuilder


class DecodeBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Says of each batch whether anybit's kernel attends it."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.windows = {impl.sliding_window for impl in impls}
        self.scheduled, self.most = False, 0
        if (reason := why_not(vllm_config, impls)) is None:
            self.most, reason = _compile(impls, kv_cache_spec.block_size, vllm_config, device)
        if reason is not None:
            _logger.info("anybit: decode attention stays vLLM's: %s", reason)
            return
        most, capacity = vllm_config.scheduler_config.max_num_seqs, impls[0].capacity
        _logger.info(
            "anybit: decode attention of %d layers is anybit's%s, over vLLM's own pages; --additional-config "
            "'{\"anybit_attention\": false}' leaves it to vLLM",
            len(impls),
            "" if self.most == most else f" for up to {self.most} of {most} requests of {capacity} tokens at a time",
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """FlashAttention's metadata; ``anybit`` of it: whether each row is one new token that sees all before it."""
        m = common_attn_metadata
        few = m.num_actual_tokens <= self.most
        single = few and m.max_query_len == 1 and not common_prefix_len and m.causal is True
        found = super().build(common_prefix_len, m, fast_build or (single and self.scheduled))
        self.scheduled = True
        found.anybit = single and self._sees_all(found)
        return found

    def _sees_all(self, found: Any) -> bool:
        window, tokens = getattr(found, "sliding_window", None), found.num_actual_tokens
        plain = not getattr(found, "use_cascade", False) and all(getattr(found, x, None) is None for x in _RANGES)
        rows = min(found.seq_lens.shape[0], found.block_table.shape[0])
        return plain and window in (None, *self.windows) and len(self.windows) == 1 and 0 < tokens <= rows


class DecodeImpl(FlashAttentionImpl):  # type: ignore[misc]
    """One layer's attention. masks, capacity: what ``kv_plain`` is told of it."""

    masks: Masks
    capacity: int

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch whose tokens are stored."""
        if not getattr(attn_metadata, "anybit", False) or output_scale is not None or output_block_scale is not None:
            plain: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return plain
        m, tokens = attn_metadata, attn_metadata.num_actual_tokens
        keys, values = pages_of(layer, kv_cache)
        kv_plain.decode(
            query[:tokens], keys, values, m.block_table, m.seq_lens, self.masks, out=output[:tokens],
            capacity=self.capacity, overlaps=getattr(layer, "anybit_stores", False),
        )  # fmt: skip
        return output


def take_over(attention: Any, config: Any) -> None:
    """Let a layer that vLLM has just made run anybit's kernel, if it is FlashAttention over plain 16-bit pages."""
    impl = attention.impl
    own = type(attention) is Attention and attention.attn_backend is FlashAttentionBackend
    if not own or type(impl) is not FlashAttentionImpl or not stores_pages(attention, config.model_config.dtype):
        return
    attention.attn_backend, impl.__class__ = DecodeBackend, DecodeImpl
    window = impl.sliding_window[0] + 1  # 0: all tokens
    impl.masks = Masks(impl.scale, window or None, impl.logits_soft_cap or None, impl.sinks)
    impl.capacity = config.model_config.max_model_len


def why_not(config: Any, impls: list[Any]) -> str | None:
    """What of an engine's configuration keeps its decode attention vLLM's, in a sentence; None if nothing does."""
    if impls[0].batch_invariant_enabled:
        return "VLLM_BATCH_INVARIANT asks for FlashAttention in one split"
    if config.speculative_config is not None:
        return "steps that check drafts have several new tokens of a request"
    if getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism splits what a token sees"
    if config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "full CUDA graphs of mixed batches, which --compilation-config asks for, do not tell decode steps apart"
    if any(impl.alibi_slopes is not None for impl in impls):
        return "FlashAttention adds its ALiBi slopes"
    return None


def _compile(impls: list[Any], page_tokens: int, config: Any, device: torch.device) -> tuple[int, str | None]:
    """Compile what decode steps launch now, and not in a request.

    Returns how many requests kernels attend together, and why there are no kernels, where so.
    """
    if device.type != "cuda":
        return 0, f"its kernels run on CUDA devices, not on {device.type}"
    kernels, of = set[Any](), Device.of(torch.empty(0, device=device))
    alike = {(x.num_heads, x.num_kv_heads, x.head_size, x.masks.window, x.masks.softcap): x for x in impls}
    most, dtype = config.scheduler_config.max_num_seqs, config.model_config.dtype
    for shape, x in alike.items():
        try:
            asked = kv_plain.problem(page_tokens, *shape[:3], dtype, x.masks, x.capacity, most)
            found = kv_plain.kernels_for(asked, of)
        except AnyBitError as error:
            return 0, str(error)
        kernels.update(found)
        most = len(found)
    get_ready(list(kernels), device, "attention")
    return most, None
