"""Shared by tests of vLLM's layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.activation import SiluAndMul

from anybit.codes.rtn import quantize_weight
from anybit.layers.linear import QuantLinear
from anybit.scheme import CODES, Scheme
from anybit.vllm.config import AnyBitConfig
from cases import random_weight

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def configured(scheme: str | Scheme, names: list[str] | None, **words: Any) -> AnyBitConfig:
    """The configuration of a model whose checkpoint stores codes of these layers; None: one that is not quantized."""
    config = AnyBitConfig(scheme, **words)
    config.packed_modules_mapping, config.stored = PARTS, names
    return config


def made(kind: type[nn.Module], *sizes: Any, prefix: str, config: AnyBitConfig, **words: Any) -> Any:
    """A layer of vLLM in float32; a linear one without bias, unless words say otherwise."""
    given = {"bias": False} if issubclass(kind, linear.LinearBase) else {}
    return kind(*sizes, params_dtype=torch.float32, prefix=prefix, quant_config=config, **(given | words))


def hand(layer: Any, tensors: dict[str, Tensor], shard: Any = None) -> None:
    """Pass tensors to a layer's loaders, as vLLM's models do. shard: which part of a fused layer they are."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor.clone(), *(() if shard is None else (shard,)))


def load(layer: Any, parts: dict[Any, Any]) -> Any:
    """Load a layer from ``QuantLinear``s or their tensors, by shard, and finish loading."""
    for shard, part in parts.items():
        hand(layer, part.state_dict() if isinstance(part, QuantLinear) else part, shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def outputs(layer: Any, x: Tensor) -> Tensor:
    return layer.quant_method.apply(layer, x)


def row_parallel(rank: Callable[[int, int], None], ranks: int, part: QuantLinear, x: Tensor, **words: Any) -> Tensor:
    """The sum of what ranks compute of a layer, each of its own inputs. words: of the configuration."""
    total = torch.zeros(len(x), part.out_features)
    for number in range(ranks):
        rank(number, ranks)
        config, sizes = configured(part.scheme, ["o_proj"], **words), (part.in_features, part.out_features)
        layer = made(linear.RowParallelLinear, *sizes, prefix="o_proj", config=config)
        total += outputs(load(layer, {None: part}), x.chunk(ranks, -1)[number])
    return total


class Mlp(nn.Module):
    """The plain MLP of vLLM's models: 64 inputs, 128 channels."""

    def __init__(self, config: AnyBitConfig, bias: bool = False) -> None:
        super().__init__()
        kinds = linear.MergedColumnParallelLinear, linear.RowParallelLinear
        self.gate_up_proj = made(kinds[0], 64, [128, 128], prefix="m.gate_up_proj", config=config, bias=bias)
        self.down_proj = made(kinds[1], 128, 64, prefix="m.down_proj", config=config)
        self.act_fn: nn.Module = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        x, _ = self.down_proj(x)
        return x


def layer_of(scheme: str, n: int, k: int, seed: int = 0, order: bool = False) -> QuantLinear:
    """A quantized layer as anybit would save it."""
    generator = torch.Generator().manual_seed(seed)
    fmt = Scheme.parse(scheme).weights
    if fmt.code in CODES:
        weight = quantize_weight(torch.randn(n, k, generator=generator) / k**0.5, fmt, False)
    else:
        weight = random_weight(n, k, fmt, seed)
    layer = QuantLinear(k, n, scheme, False, group_index=order, dtype=torch.float32)
    if order:
        index = torch.randperm(k, generator=generator).to(torch.int32) // fmt.group
        weight = replace(weight, group_index=index)
    layer.load_weight(weight)
    return layer


def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process rank I of N; it is the only one until then."""

    def become(number: int, count: int) -> None:
        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: number)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: count)

    monkeypatch.setattr(linear, "tensor_model_parallel_all_reduce", lambda x: x)
    become(0, 1)
    return become
