"""Shared by tests of vLLM's layers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from anybit.codes.rtn import quantize_weight
from anybit.layers.linear import QuantLinear
from anybit.scheme import CODES, Scheme
from cases import random_weight


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
