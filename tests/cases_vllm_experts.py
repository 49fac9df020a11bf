"""Small mixtures of experts with quantized experts: the model, and the folder that vLLM reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from anybit.checkpoints.configuration import configuration
from anybit.codes.rtn import quantize_weight
from anybit.layers.linear import QuantLinear
from anybit.models.experts import unfuse
from anybit.scheme import Scheme
from cases_models import save_byte_tokenizer

CONTEXT = 256
_COMMON = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": CONTEXT, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"num_experts": 6, "moe_intermediate_size": 192, "intermediate_size": 256, "norm_topk_prob": True}
KINDS = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 128},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 192},
}
"""Settings by model_type. qwen2_moe has a shared expert beside its routed ones."""
_STORED = {"mixtral": (("w1", "w3", "w2"), ("mlp", "block_sparse_moe"))}
"""Names of an expert's projections, and of the layer's block in the model and in the folder, where they differ."""


def save_mixture(kind: str, scheme: str, folder: Path) -> PreTrainedModel:
    """Save a random mixture of experts with all but router and head quantized by RTN; returns the model."""
    torch.manual_seed(0)
    size = save_byte_tokenizer(folder)
    ids = AutoTokenizer.from_pretrained(folder)
    special = {name: getattr(ids, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(kind, **_COMMON, **KINDS[kind], vocab_size=size, **special)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 0.12)
    names, (block, stored) = _STORED.get(kind, (("gate_proj", "up_proj", "down_proj"), ("mlp", "mlp")))
    assert not unfuse(model, names)
    fmt = Scheme.parse(scheme).weights
    kept = [name for name, one in model.named_modules() if name.endswith(("lm_head", "shared_expert_gate"))]
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name not in kept:
            weight = quantize_weight(layer.weight.detach(), fmt)
            model.set_submodule(name, QuantLinear.from_weight(weight, scheme, layer.bias))
    tensors = {name.replace(f".{block}.", f".{stored}."): one.clone() for name, one in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    described["quantization_config"] = configuration(Scheme.parse(scheme), kept)
    (folder / "config.json").write_text(json.dumps(described))
    return model
