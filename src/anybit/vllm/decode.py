"""vLLM's FlashAttention backend with anybit's decode kernel for pure decode steps, over the same 16-bit pages.

    vllm serve MODEL --additional-config '{"anybit_attention": false}'     # FlashAttention in every step

Everything else is vLLM's: the KV cache write, prefill, prefix caching, scheduling. The kernel reads lengths and block
tables on the device, so it can be captured in CUDA graphs. Which kernel runs is decided once per step, when the
metadata is built. What this relies on in vLLM's sources:

    Padded rows of a batch have length 0; FlashAttention leaves their outputs untouched.
    vLLM's V2 model runner also captures graphs of mixed batches with one token per request, so max_query_len == 1
    does not imply decode when such a graph is replayed: with full graphs of mixed batches, FlashAttention stays.
    FlashAttention 3's ahead-of-time schedule (three launches a step) is skipped for steps that this kernel runs,
    except the first step, in which vLLM 0.26 determines the window for all later schedules.
    vLLM 0.26 uses one window for all layers of a group, 0.32 each layer's own: groups that mix windows are left alone.
"""

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from anybit.device import Device
from anybit.errors import AnyBitError
from anybit.ops import kv_plain
from anybit.ops.compile_ahead import Kernel
from anybit.ops.kv import Masks
from anybit.vllm.rotary import pages_of, stores_pages
from anybit.vllm.warmup import get_ready

_logger = init_logger("vllm.anybit")
_RANGES = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")
"""Metadata fields that are set if attention is anything but causal with at most a sliding window."""


class DecodeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's backend with ``DecodeBuilder`` and ``DecodeImpl``."""

    @staticmethod
    def get_impl_cls() -> type["DecodeImpl"]:
        """The implementation that runs a layer."""
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type["DecodeBuilder"]:
        """The builder of a batch's metadata."""
        return DecodeBuilder


class DecodeBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Decides for each batch whether anybit's kernel runs its attention."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.windows = {impl.sliding_window for impl in impls}
        self.scheduled, self.most = False, 0
        if (reason := why_not(vllm_config, impls)) is None:
            self.most, reason = _compile(impls, kv_cache_spec.block_size, vllm_config, device)
        if reason is not None:
            _logger.info("anybit: decode attention runs on FlashAttention: %s", reason)
            return
        most, capacity = vllm_config.scheduler_config.max_num_seqs, impls[0].capacity
        _logger.info(
            "anybit: decode attention of %d layers runs on anybit's kernel%s; --additional-config "
            "'{\"anybit_attention\": false}' switches back to FlashAttention",
            len(impls),
            "" if self.most == most else f" for up to {self.most} of {most} requests of {capacity} tokens at a time",
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """FlashAttention's metadata, plus ``anybit``: whether every row is one new token that attends causally."""
        m = common_attn_metadata
        few = m.num_actual_tokens <= self.most
        single = few and m.max_query_len == 1 and not common_prefix_len and m.causal is True
        found = super().build(common_prefix_len, m, fast_build or (single and self.scheduled))
        self.scheduled = True
        found.anybit = single and self._sees_all(found)
        return found

    def _sees_all(self, found: FlashAttentionMetadata) -> bool:
        window, tokens = getattr(found, "sliding_window", None), found.num_actual_tokens
        plain = not getattr(found, "use_cascade", False) and all(getattr(found, x, None) is None for x in _RANGES)
        rows = min(found.seq_lens.shape[0], found.block_table.shape[0])
        return plain and window in (None, *self.windows) and len(self.windows) == 1 and 0 < tokens <= rows


class DecodeImpl(FlashAttentionImpl):  # type: ignore[misc]
    """One layer's attention. masks, capacity (tokens of a request): passed to ``kv_plain``."""

    masks: Masks
    capacity: int

    def forward(
        self, layer: Attention, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a batch whose keys and values are already in the cache."""
        scaled = output_scale is not None or output_block_scale is not None
        if attn_metadata is None or scaled or not getattr(attn_metadata, "anybit", False):
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


def take_over(attention: Attention, config: VllmConfig) -> None:
    """Give a newly built attention layer anybit's kernel, if it is FlashAttention over 16-bit pages."""
    impl = attention.impl
    own = type(attention) is Attention and attention.attn_backend is FlashAttentionBackend
    if not own or type(impl) is not FlashAttentionImpl or not stores_pages(attention, config.model_config.dtype):
        _logger.info_once(
            "anybit: decode attention of a %s (%s, a cache in %s) runs on FlashAttention: anybit's kernel is for "
            "decoders over 16-bit pages",
            type(attention).__name__, attention.attn_type, attention.kv_cache_torch_dtype,
        )  # fmt: skip
        return
    attention.attn_backend, impl.__class__ = DecodeBackend, DecodeImpl
    window = impl.sliding_window[0] + 1  # 0: no window
    impl.masks = Masks(impl.scale, window or None, impl.logits_soft_cap or None, impl.sinks)
    impl.capacity = config.model_config.max_model_len


def why_not(config: VllmConfig, impls: list[FlashAttentionImpl]) -> str | None:
    """Why an engine's configuration rules out anybit's decode attention, as a sentence; None if it does not."""
    if impls[0].batch_invariant_enabled:
        return "VLLM_BATCH_INVARIANT requires FlashAttention without split-KV"
    if config.speculative_config is not None:
        return "with speculative decoding, steps have several new tokens per request"
    if getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism splits the keys of a request between ranks"
    if config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "full CUDA graphs of mixed batches (--compilation-config) do not tell decode steps apart"
    if any(impl.alibi_slopes is not None for impl in impls):
        return "layers with ALiBi slopes are left to FlashAttention"
    return None


def _compile(
    impls: list[DecodeImpl], page_tokens: int, config: VllmConfig, device: torch.device
) -> tuple[int, str | None]:
    """Compile the kernels of decode steps before the first request.

    Returns (most requests in one launch, None), or (0, the reason why there are no kernels).
    """
    if device.type != "cuda":
        return 0, f"its kernels run on CUDA devices, not on {device.type}"
    kernels, of = list[Kernel](), Device.of(torch.empty(0, device=device))
    alike = {(x.num_heads, x.num_kv_heads, x.head_size, x.masks.window, x.masks.softcap): x for x in impls}
    most, dtype = config.scheduler_config.max_num_seqs, config.model_config.dtype
    for shape, x in alike.items():
        try:
            asked = kv_plain.problem(page_tokens, *shape[:3], dtype, x.masks, x.capacity, most)
            found = kv_plain.kernels_for(asked, of)
        except AnyBitError as error:
            return 0, str(error)
        kernels += found
        most = len(found)
    get_ready(kernels, device, "attention")
    return most, None
