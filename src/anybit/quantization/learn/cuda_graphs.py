"""Replay functions of tensors as CUDA graphs: rounding a layer is thousands of microsecond launches."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from anybit.ops.capture import capture

Function = Callable[..., tuple[Tensor, ...]]

# Larger operands keep a GPU busy anyway, and a graph would double their memory.
_LARGEST = 1 << 22
# Most graphs kept: a model has few layer shapes.
_MOST = 16


class GraphRecorder:
    """Calls functions; on a GPU, the second call with the same key and shapes is captured, and later ones replayed.

    A function must do the same work for the same key, without synchronizing; it may overwrite its arguments.
    """

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, key: Hashable, function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return function(*tensors), by replaying a graph if there is one."""
        if not tensors[0].is_cuda or max(tensor.numel() for tensor in tensors) > _LARGEST:
            return function(*tensors)
        # As in a captured call, so that the first call gives the same bits.
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
