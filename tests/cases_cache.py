"""Tiny random models whose heads are wide enough for a quantized cache, and prompts for them."""

import torch
import transformers as hf
from transformers import AutoModelForCausalLM

import anybit

COMMON = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
GATED = {**COMMON, "intermediate_size": 160, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GATED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GATED)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **GATED, sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GATED, sliding_window=24, num_local_experts=2, num_experts_per_tok=1)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**COMMON, ffn_dim=160, max_position_embeddings=512, word_embed_proj_dim=128)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=97, hidden_size=128, n_layer=2, n_head=2)),
}


def model_of(name: str, attention: str | None = None, spread: float | None = None):
    """A random model. attention: its implementation.  spread: std of weights, so that tokens are well separated."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters() if spread is not None else ():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


class Streamer:
    """Records its input."""

    def __init__(self):
        self.told = []

    def put(self, tokens):
        self.told += tokens.flatten().tolist()

    def end(self):
        self.told.append("end")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "max_position_embeddings": 512,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "min_new_tokens": 20}


def folder_of(config, path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(path)
    return path


def quantized(path, scheme):
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=anybit.AnyBitConfig(scheme), dtype=dtype, device_map=DEVICE
    )


def prompt(rows=2, tokens=119):  # steps go past a window of 128 tokens
    return torch.randint(1, 128, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
