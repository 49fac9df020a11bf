"""Small mixtures of experts that vLLM serves."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cases_models import save_byte_tokenizer

CONTEXT = 256
_COMMON = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": CONTEXT, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"num_experts": 6, "moe_intermediate_size": 192, "intermediate_size": 256, "norm_topk_prob": True}
_MIXTRAL = {"num_local_experts": 6, "intermediate_size": 192}
KINDS = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 128},
    "mixtral": _MIXTRAL,
    "phimoe": {**_MIXTRAL, "attention_bias": True, "lm_head_bias": True},
}
"""Settings by model_type. qwen2_moe has a shared expert beside its routed ones."""
_ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}
"""The hub's, by which vLLM finds its models, where transformers has others."""


def save_mixture(kind: str, folder: Path) -> Path:
    """Save a random mixture of experts with a byte tokenizer; returns the folder."""
    torch.manual_seed(0)
    size = save_byte_tokenizer(folder)
    ids = AutoTokenizer.from_pretrained(folder)
    special = {name: getattr(ids, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(kind, **_COMMON, **KINDS[kind], vocab_size=size, **special)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 0.12)
    model.save_pretrained(folder)
    words = json.loads((folder / "config.json").read_text())
    words["architectures"] = [_ARCHITECTURES.get(kind, type(model).__name__)]
    (folder / "config.json").write_text(json.dumps(words))
    return folder
