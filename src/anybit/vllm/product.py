"""A quantized GEMM of a vLLM layer: the layer's buffers that it reads, and its call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from anybit import ops
from anybit.errors import LayerError

ANOTHER_LAYOUT = "weights of another layout cannot be reloaded: restart the engine with them"


@dataclass(frozen=True)
class Product:
    """One call of ``anybit::linear``. outputs: N of all its layers.  tensors, input_scale: names of buffers."""

    outputs: int
    spec: str
    tensors: tuple[str, ...]
    input_scale: str | None
    hadamard: bool

    @classmethod
    def of(
        cls, layer: Any, prefix: str, prepared: ops.Prepared, input_scale: Tensor | None, hadamard: bool = False
    ) -> "Product":
        """Register a prepared weight's tensors as buffers of the layer, named ``{prefix}_{index}``."""
        names = tuple(f"{prefix}_{index}" for index in range(len(prepared.tensors)))
        for name, tensor in zip(names, prepared.tensors, strict=True):
            layer.register_buffer(name, tensor, persistent=False)
        scale = None if input_scale is None else f"{prefix}_input_scale"
        if scale is not None:
            layer.register_buffer(scale, input_scale, persistent=False)
        return cls(prepared.spec.n, prepared.spec_text, names, scale, hadamard)

    def refill(self, layer: Any, prepared: ops.Prepared, input_scale: Tensor | None) -> None:
        """Copy a reloaded weight into the existing buffers, whose addresses CUDA graphs hold; LayerError if it differs.

        vLLM moves the buffers off the layer during a reload and restores them afterwards.
        """
        held: dict[str, Tensor] = (get_layerwise_info(layer).kernel_tensors or ({}, {}))[1]
        pairs = [(held.get(name), tensor) for name, tensor in zip(self.tensors, prepared.tensors, strict=False)]
        if input_scale is not None:
            pairs.append((held.get(self.input_scale or ""), input_scale))
        if prepared.spec_text != self.spec or any(old is None or old.shape != new.shape for old, new in pairs):
            raise LayerError(ANOTHER_LAYOUT)
        for old, new in pairs:
            assert old is not None
            old.copy_(new)

    def inputs(self, layer: Any, x: Tensor) -> Tensor:
        """X, multiplied by the layer's input scales if it has any."""
        return x if self.input_scale is None else x * getattr(layer, self.input_scale)

    def weight(self, layer: Any) -> list[Tensor]:
        """The layer's buffers with the prepared weight."""
        return [getattr(layer, name) for name in self.tensors]

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Y = x W^T + bias for x from ``inputs``: [..., K] -> [..., N], in x's dtype."""
        y: Tensor = torch.ops.anybit.linear(x, self.weight(layer), bias, self.spec)
        return y
