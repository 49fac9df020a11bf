"""RoPE and the KV cache write as one kernel, or in the epilogue of the QKV GEMM.

vLLM applies RoPE in one or two kernels and stores keys and values in another. If a model's attention is qkv_proj, RoPE,
vLLM's Attention over FlashAttention's 16-bit pages, and o_proj, its forward becomes one of the following, chosen by
the ``fusion`` pass:

    linear -> anybit::rotate_cache          any number of tokens
    add + norm -> anybit::norm_rotate_cache one launch at one or two tokens, with 16-bit activations

Both find the layer's pages as vLLM's ``unified_kv_cache_update`` does, and store nothing while there are none.
"""

from dataclasses import dataclass
from types import CodeType, MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    canonicalize_singleton_dim_strides,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionType

from anybit.models.families import VLLM_ATTENTION, VLLM_FLAGS
from anybit.ops import pages
from anybit.ops.elementwise import paired_channels
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaAttention  # and those like it


@dataclass(frozen=True)
class Heads:
    """One rank's query and KV heads of ``dim`` channels. paired: qkv_proj's outputs follow ``paired_channels``."""

    query: int
    key: int
    dim: int
    paired: bool

    @property
    def order(self) -> Tensor | None:
        """The order of qkv_proj's outputs; None for the model's own."""
        return paired_channels(self.query, self.key, self.dim) if self.paired else None


def heads_of(parent: "LlamaAttention | None", dtype: torch.dtype, scheme: Scheme, plain: bool) -> Heads | None:
    """The heads of an attention module whose forward can be replaced; None if it cannot.

    parent: the module whose qkv_proj is being prepared.  plain: qkv_proj is one GEMM, and no LoRA adds to its outputs.
    """
    norms = None if parent is None else _norms_heads(type(parent).forward.__code__)
    attention: Attention = getattr(parent, "attn", None)
    rotary: RotaryEmbedding = getattr(parent, "rotary_emb", None)
    other = any(bool(getattr(parent, flag, wanted)) != wanted for flag, wanted in VLLM_FLAGS.items())
    if norms is None or other or type(attention) is not Attention:
        return None
    if not (stores_pages(attention, dtype) and _is_plain(rotary, attention.head_size)):
        return None
    gammas = [getattr(parent, name, None) for name in ("q_norm", "k_norm")] if norms else []
    if any(getattr(gamma, "weight", None) is None or type(gamma) is not RMSNorm for gamma in gammas):
        return None
    heads = Heads(
        attention.num_heads, attention.num_kv_heads, attention.head_size,
        plain and not norms and not scheme.activations.quantized,
    )  # fmt: skip
    return None if pages.why_not(heads.query, heads.key, heads.dim, dtype) else heads


def _norms_heads(code: CodeType) -> bool | None:
    """Whether a supported attention forward has a per-head QK norm; None for any other forward."""
    arguments = code.co_varnames[: code.co_argcount]
    return VLLM_ATTENTION.get(code.co_names) if arguments == ("self", "positions", "hidden_states") else None


def stores_pages(attention: Attention, dtype: torch.dtype) -> bool:
    """Whether an attention layer stores plain 16-bit pages, in a cache update separate from its attention kernel."""
    return (
        attention.attn_backend.get_name() == "FLASH_ATTN"
        and not attention.attn_backend.forward_includes_kv_cache_update
        and attention.attn_type == AttentionType.DECODER
        and attention.kv_sharing_target_layer_name is None
        and attention.kv_cache_torch_dtype == dtype
        and attention.head_size_v == attention.head_size
        and attention.query_quant is None
        and not getattr(attention, "calculate_kv_scales", False)
        and not attention.use_direct_call
        and getattr(attention.impl, "dcp_world_size", 1) <= 1
    )


def _is_plain(rotary: RotaryEmbedding, head_size: int) -> bool:
    """Whether a rotary embedding is NeoX-style over whole heads, with vLLM's own cos/sin table and forward."""
    own = isinstance(rotary, RotaryEmbedding) and rotary.is_neox_style and rotary.rotary_dim == head_size
    return own and all(
        getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in ("forward_native", "forward_cuda")
    )


def replace_forward(parent: "LlamaAttention", heads: Heads) -> None:
    """Have an attention module run ``rotate_cache`` between its projection and its attention."""
    parent.anybit_paired, parent.attn.anybit_stores = heads.paired, True
    parent.forward = MethodType(_forward, parent)
    _take_frequencies_of_a_cpu(parent.rotary_emb)


def _take_frequencies_of_a_cpu(rotary: RotaryEmbedding) -> None:
    """Compute RoPE frequencies on the CPU, as transformers does: a GPU's powers round differently."""
    table, plain = rotary.cos_sin_cache, rotary._compute_inv_freq
    if hasattr(plain, "anybit"):  # layers share their rotary embedding
        return

    def frequencies(*given: float) -> Tensor:
        with torch.device("cpu"):
            found: Tensor = plain(*given)
        return found.to(table.device)

    frequencies.anybit = True  # type: ignore[attr-defined]
    rotary._compute_inv_freq = frequencies
    with torch.device(table.device):
        table.copy_(rotary._compute_cos_sin_cache())


def _forward(self: "LlamaAttention", positions: Tensor, hidden_states: Tensor) -> Tensor:
    attention, norm = self.attn, getattr(self, "q_norm", None)
    qkv, _ = self.qkv_proj(hidden_states)
    gammas = (None, None, 0.0) if norm is None else (norm.weight, self.k_norm.weight, norm.variance_epsilon)
    table, name = self.rotary_emb._match_cos_sin_cache_dtype(qkv), _encode_layer_name(attention.layer_name)
    q = torch.ops.anybit.rotate_cache(
        qkv, positions, table, attention.num_heads, attention.num_kv_heads, *gammas, self.anybit_paired, name
    )
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Keys and values are in the cache: FlashAttention reads them there alone.
    torch.ops.vllm.unified_attention_with_output(q, q, q, output, name)
    y, _ = self.o_proj(output.view(-1, attention.num_heads * attention.head_size))
    return y  # type: ignore[no-any-return]


def pages_of(layer: Attention, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values [pages, tokens, heads, dim] of a layer's cache [pages, heads, tokens, keys | values]."""
    known = getattr(layer, "anybit_pages", None)
    if known is None or known[0] is not cache:
        halves = cache.transpose(1, 2).split(layer.head_size, dim=-1)
        known = layer.anybit_pages = (cache, [canonicalize_singleton_dim_strides(half) for half in halves])
    keys, values = known[1]
    return keys, values


def _arguments(
    positions: Tensor, table: Tensor, query_heads: int, key_heads: int, name: LayerNameType
) -> pages.RopePagesArgs:
    """Arguments for RoPE and the cache write of a layer in this step."""
    _, layer, cache, slots = get_attention_context(_resolve_layer_name(name))
    keys = values = None
    if slots is not None:
        keys, values = pages_of(layer, cache)
    return pages.RopePagesArgs(table, positions, keys, values, slots, query_heads, key_heads)


def _rotate_cache(
    qkv: Tensor, positions: Tensor, table: Tensor, query_heads: int, key_heads: int, q_gamma: Tensor | None,
    k_gamma: Tensor | None, epsilon: float, paired: bool, layer_name: LayerNameType,
) -> Tensor:  # fmt: skip
    args = _arguments(positions, table, query_heads, key_heads, layer_name)
    return pages.rotate_pages(args, qkv, q_gamma, k_gamma, epsilon, paired)


def _rotate_cache_fake(qkv: Tensor, positions: Tensor, table: Tensor, query_heads: int, *_: object) -> Tensor:
    return qkv.new_empty(qkv.shape[0], query_heads, table.shape[1])


def _norm_rotate_cache(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    positions: Tensor, table: Tensor, query_heads: int, key_heads: int, layer_name: LayerNameType,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args = _arguments(positions, table, query_heads, key_heads, layer_name)
    return pages.norm_rotate_pages(args, x, residual, gamma, epsilon, weight, bias, spec)


def _norm_rotate_cache_fake(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    positions: Tensor, table: Tensor, query_heads: int, *_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape[0], query_heads, table.shape[1]), x.new_empty(x.shape)


_library = torch.library.Library("anybit", "FRAGMENT")
# As with vLLM's own op, the cache that they write is no argument: attention reads their output, which keeps the order.
direct_register_custom_op("rotate_cache", _rotate_cache, [], _rotate_cache_fake, _library)
direct_register_custom_op("norm_rotate_cache", _norm_rotate_cache, [], _norm_rotate_cache_fake, _library)
