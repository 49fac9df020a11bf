"""Tiny models of every supported architecture, with random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from anybit import QuantLinear

_SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def configs() -> dict[str, Any]:
    """Architecture -> configuration. Widths are not multiples of groups of 64 and 128 where the architecture allows."""
    t = transformers
    return {
        "llama": t.LlamaConfig(**_LLAMA, **_SIZES, num_key_value_heads=2),
        # Head sizes that a KV format needs.
        "llama-wide": t.LlamaConfig(**_LLAMA, **_SIZES, num_key_value_heads=2, head_dim=64),
        "llama-tied": t.LlamaConfig(**_LLAMA, **_SIZES, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen2": t.Qwen2Config(**_LLAMA, **_SIZES, num_key_value_heads=2),
        "qwen3": t.Qwen3Config(**_LLAMA, **_SIZES, num_key_value_heads=2, head_dim=16),
        "gemma3": t.Gemma3TextConfig(**_LLAMA, **_SIZES, num_key_value_heads=1, head_dim=16, sliding_window=16),
        "opt": t.OPTConfig(
            hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
            max_position_embeddings=64, **_SIZES,
        ),
        "bloom": t.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **_SIZES),
        "falcon": t.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **_SIZES),
        "gpt2": t.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **_SIZES),
    }  # fmt: skip


ARCHITECTURES = ("llama", "llama-tied", "qwen2", "qwen3", "gemma3", "opt", "bloom", "falcon", "gpt2")


def tiny_model(architecture: str) -> Any:
    """A tiny float32 model whose greedy tokens have clear margins."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configs()[architecture]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def save_tiny(architecture: str, folder: Path) -> Path:
    """Save a tiny model into a folder."""
    tiny_model(architecture).save_pretrained(folder)
    return folder


def tokens_of(model: Any, count: int = 12, **options: Any) -> list[int]:
    """Greedy tokens after a fixed prompt."""
    prompt = torch.tensor([[5, 17, 42, 3, 88, 61]])
    with torch.inference_mode():
        result = model.generate(
            prompt.to(model.device), max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
        )
    return result[0, prompt.shape[1] :].tolist()


def logits_of(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of ids, or of the first eight tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(8)[None] if ids is None else ids).logits
    return found


def layers_of(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def schemes_of(model: nn.Module) -> dict[str, str]:
    return {name: str(layer.scheme) for name, layer in layers_of(model).items()}


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def imitate(plain: nn.Module, quantized: nn.Module) -> None:
    """Give a plain model the weights that a quantized one's layers stand for."""
    for name, layer in layers_of(quantized).items():
        module, weight = plain.get_submodule(name), layer.dequantize()
        module.weight.data = weight.T.contiguous() if isinstance(module, Conv1D) else weight


def save_byte_tokenizer(folder: Path) -> int:
    """Save a byte tokenizer with a chat template beside a model; returns its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)
    return len(vocabulary)
