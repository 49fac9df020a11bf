"""Functions of tensors that are recorded as CUDA graphs: rounding a layer is thousands of launches of microseconds."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from anybit.ops.capture import capture

Function = Callable[..., tuple[Tensor, ...]]

# Larger operands keep a GPU busy by themselves, and a recording would hold as much memory again.
_LARGEST = 1 << 22
# Recordings kept: a model has few shapes of layers.
_MOST = 16


class GraphRecorder:
    """Calls functions; one that comes again with the same key and shapes on a GPU is recorded, and replayed then.

    A function must do the same for the same key, wait for nothing, and may change its arguments. Its results are new.
    """

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, key: Hashable, function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """function(*tensors)."""
        if not tensors[0].is_cuda or max(tensor.numel() for tensor in tensors) > _LARGEST:
            return function(*tensors)
        # As they will be in a recording, so that the first call gives the same bits.
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        key = (key, tensors[0].device, *((tensor.shape, tensor.dtype) for tensor in tensors))
        self._seen[key] += 1
        if key not in self._graphs:
            if self._seen[key] == 1 or len(self._graphs) == _MOST:
                return function(*tensors)
            self._record(key, function, tensors)
        graph, places, results = self._graphs[key]
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        return tuple(result.clone() for result in results)

    def _record(self, key: Hashable, function: Function, tensors: tuple[Tensor, ...]) -> None:
        graph: Any = torch.cuda.CUDAGraph()
        places = [tensor.detach().clone() for tensor in tensors]
        with capture(graph):
            results = function(*places)
        self._graphs[key] = graph, places, results
