"""Model families with code of their own, a row each. Models of other families take the general paths."""

import re
from dataclasses import dataclass

_QKV = ("qkv_proj", "split", "q_size", "kv_size")
_OUTPUT = ("rotary_emb", "attn", "o_proj")
_HEAD_NORMS = ("head_dim", "num_kv_heads", "q_norm", "k_norm")


@dataclass(frozen=True)
class Family:
    """What a family's models are called and built of in other libraries.

    block: transformers' class of a decoder layer, which ``fuse`` replaces. gguf: llama.cpp's name of the architecture,
    if anybit writes such files. attention: the names that the code of vLLM's attention forward uses, by version.
    qk_norm: whether that forward norms each head. window_in_config: the sliding window is in the config, not in the
    attention module.
    """

    block: str
    gguf: str | None
    attention: tuple[tuple[str, ...], ...] = ((*_QKV, *_OUTPUT),)
    qk_norm: bool = False
    window_in_config: bool = False


_LLAMA = ((*_QKV, *_OUTPUT), (*_QKV, "use_rope", *_OUTPUT))  # the second is Granite's from 0.32 on
_SCALED = ("do_llama_4_scaling", "_get_llama_4_attn_scale", "to", "dtype")  # where the first is false
_MISTRAL = ((*_QKV, _OUTPUT[0], *_SCALED, *_OUTPUT[1:]),)
_QWEN3 = ((*_QKV, "view", "shape", "head_dim", "q_norm", "k_norm", *_OUTPUT),)
FAMILIES = {
    "llama": Family("LlamaDecoderLayer", "llama", _LLAMA),
    "mistral": Family("MistralDecoderLayer", "llama", _MISTRAL, window_in_config=True),
    "qwen2": Family(
        "Qwen2DecoderLayer",
        "qwen2",
        (
            (*_QKV, *_OUTPUT),
            (*_QKV, "qk_norm", "shape", "view", "num_heads", *_HEAD_NORMS, *_OUTPUT),  # where qk_norm is false
        ),
    ),
    "qwen3": Family("Qwen3DecoderLayer", "qwen3", _QWEN3, qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeDecoderLayer", "qwen3moe", _QWEN3, qk_norm=True),
    "mixtral": Family("MixtralDecoderLayer", None, window_in_config=True),
}
"""By transformers' ``model_type``."""
BLOCKS = {family.block: family for family in FAMILIES.values()}
"""By transformers' class of a decoder layer."""
ROUTERS = ("Qwen3MoeTopKRouter", "MixtralTopKRouter")
"""transformers' routers that take the largest of a softmax, whose sum they renormalize unless ``norm_topk_prob`` is
false."""
VLLM_ATTENTION = {names: family.qk_norm for family in FAMILIES.values() for names in family.attention}
"""Names used in the code of vLLM's attention forwards that anybit can replace -> whether each head is normed."""
VLLM_FLAGS = {"qk_norm": False, "do_llama_4_scaling": False, "use_rope": True}
"""Attributes of those attentions -> what they must be, where they have them."""
VLLM_MLP = (
    ("gate_up_proj", "act_fn", "down_proj"),
    ("gate_up_proj", "maybe_fused_act_quant", "act_fn", "down_proj"),  # 0.32: the helper calls act_fn for our layers
)
"""Names used in the code of vLLM's gated MLPs, by version."""
VLLM_HYBRIDS = ("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM")
"""Hybrid models (Mamba or linear-attention layers) with which low-bit caches are tested, on CPU and GPU."""
EXPERTS = re.compile(r"\.experts\.|\.block_sparse_moe\.(in|out)put_linear\.")
"""Names of experts in checkpoints; the second alternative is Granite 4's."""
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
"""The projections of an expert, as most families' checkpoints name them."""
ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""The last names of routers in vLLM, which stay in 16 bits: they decide, and are small."""
