"""What tests of vLLM's layers share."""

from collections.abc import Callable

import pytest
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding


def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """What makes this process a rank of so many; it is the only one until then."""

    def become(number: int, count: int) -> None:
        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: number)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: count)

    monkeypatch.setattr(linear, "tensor_model_parallel_all_reduce", lambda x: x)
    become(0, 1)
    return become
