"""Shared by tests of calibrated methods: a tiny random model, token sequences of several lengths, an error metric."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from anybit.codes.rtn import quantize_weight
from anybit.models.blocks import find_blocks
from anybit.scheme import Scheme


def tiny(seed: int = 0, layers: int = 3):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


class Interrupted(Exception):
    """Raised by ``interrupt``."""


def interrupt(what: str, done: int, total: int) -> None:
    """Progress that ends the run with its first block."""
    if what.startswith("block"):
        raise Interrupted


def names_of(model) -> set[str]:
    prefix, blocks = find_blocks(model)
    return {f"{prefix}.{n}" for n, m in blocks.named_modules() if isinstance(m, torch.nn.Linear)}


def rounded(model, text: str):
    """(weights rounded to nearest, what gives every layer its scheme)."""
    scheme = Scheme.parse(text)
    weights = {n: quantize_weight(model.get_submodule(n).weight.data, scheme.weights) for n in sorted(names_of(model))}
    return weights, lambda name: scheme


def sequences(count: int = 12, seed: int = 1) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (40 + 7 * (i % 3),), generator=g) for i in range(count)]


def divergence(model, weights, tokens) -> float:
    with torch.no_grad():
        before = model(tokens).logits.log_softmax(-1)
        kept = {n: model.get_submodule(n).weight.data for n in weights}
        for n, w in weights.items():
            model.get_submodule(n).weight.data = w if isinstance(w, torch.Tensor) else w.dequantize()
        after = model(tokens).logits.log_softmax(-1)
        for n, w in kept.items():
            model.get_submodule(n).weight.data = w
    return float((before.exp() * (before - after)).sum(-1).mean())


def sweep_case(channels: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Values, coupling, scale, zero and reference for ``anybit.ops.gptq_update``."""
    g = torch.Generator().manual_seed(seed)
    values, reference = torch.randn(2, channels, columns, generator=g)
    coupling = torch.randn(channels, channels, generator=g) * 0.1
    scale = torch.rand(columns, generator=g) * 0.3 + 0.2
    return values, coupling, scale, torch.randint(0, 8, (columns,), generator=g).float(), reference


def loud(model):
    """Make a model resemble trained ones: varied gains, and a few outlier channels."""
    g = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = torch.rand(parameter.shape, generator=g) + 0.5
            parameter.data[5] = 8
        if "bias" in name:
            parameter.data = torch.randn(parameter.shape, generator=g) * 0.1
    return model


def models():
    torch.manual_seed(0)
    odd = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    yield loud(tiny(layers=2))
    llama = LlamaConfig(**odd, num_attention_heads=9, num_key_value_heads=3, head_dim=8, tie_word_embeddings=False)
    yield loud(AutoModelForCausalLM.from_config(llama).eval())
    qwen = Qwen2Config(**odd, num_attention_heads=9, num_key_value_heads=3)
    yield loud(AutoModelForCausalLM.from_config(qwen).eval())


def layer_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr((W - Q) H (W - Q)^T) / tr(W H W^T): the fraction of a layer's output energy lost to quantization."""
    difference = (weight - quantized).double()
    h, w = hessian.double(), weight.double()
    return float((difference @ h * difference).sum() / (w @ h * w).sum())
