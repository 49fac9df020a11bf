"""transformers' config of a GGUF file, with what its reader leaves out: RoPE (``gguf_rotary``), and experts."""

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, MixtralConfig

from anybit.checkpoints.gguf import GgufHeader
from anybit.checkpoints.gguf_rotary import scale_rotary
from anybit.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = {"ffn_gate_exps.weight": "moe_intermediate_size", "ffn_gate_shexp.weight": "shared_expert_intermediate_size"}
"""Tensors of a block -> the entry of a config that says how many outputs they have an expert."""


def config_of(folder: Path, file: Path, header: GgufHeader) -> "PretrainedConfig":
    """The config of a file. folder: holds a link to it.

    Raises CheckpointError for what transformers misreads.
    """
    if header.metadata["general.architecture"] == "gpt-oss":  # its rotary embedding is read wrong, or not at all
        raise CheckpointError("transformers does not read its settings; use the model's own folder, in MXFP4")
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
    scale_rotary(config, file, header)
    if config.model_type in ("llama", "mistral") and header.metadata.get("llama.expert_count"):
        config = _mixtral(config, header)
    if config.model_type == "minimax_m2":  # without which vLLM's router has no bias
        config.use_routing_bias = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    for name, tensor in header.tensors.items():
        entry = _SIZES.get(name.split(".", 2)[-1])
        if entry is not None and hasattr(config, entry) and len(tensor.shape) > 1:
            setattr(config, entry, tensor.shape[1])
    return config


def _mixtral(config: "PretrainedConfig", header: GgufHeader) -> MixtralConfig:
    """The config of a Llama with experts, which transformers takes for one without."""
    known = MixtralConfig().to_dict().keys() - {"architectures", "model_type", "sliding_window"}
    counts = (header.metadata.get(f"llama.{name}") for name in ("expert_count", "expert_used_count"))
    experts = dict(zip(("num_local_experts", "num_experts_per_tok"), counts, strict=True))
    return MixtralConfig(**{name: value for name, value in config.to_dict().items() if name in known} | experts)
