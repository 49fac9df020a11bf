"""A quantized GEMM of a vLLM layer: the layer's buffers that it reads, and its call."""

from dataclasses import dataclass

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from anybit import ops
from anybit.errors import LayerError

ANOTHER_LAYOUT = "weights of another layout cannot be reloaded: restart the engine with them"


@dataclass(frozen=True)
class Product:
    """One call of ``anybit::linear``. outputs: N of all its layers.  tensors: names of buffers."""

    outputs: int
    spec: str
    tensors: tuple[str, ...]
    hadamard: bool

    @classmethod
    def of(cls, layer: nn.Module, prefix: str, prepared: ops.Prepared, hadamard: bool = False) -> "Product":
        """Register a prepared weight's tensors as buffers of the layer, named ``{prefix}_{index}``."""
        names = tuple(f"{prefix}_{index}" for index in range(len(prepared.tensors)))
        for name, tensor in zip(names, prepared.tensors, strict=True):
            layer.register_buffer(name, tensor, persistent=False)
        return cls(prepared.spec.n, prepared.spec_text, names, hadamard)

    def refill(self, layer: nn.Module, prepared: ops.Prepared) -> None:
        """Copy a reloaded weight into the existing buffers, whose addresses CUDA graphs hold; LayerError if it differs.

        vLLM moves the buffers off the layer during a reload and restores them afterwards.
        """
        held: dict[str, Tensor] = (get_layerwise_info(layer).kernel_tensors or ({}, {}))[1]
        pairs = [(held.get(name), tensor) for name, tensor in zip(self.tensors, prepared.tensors, strict=False)]
        if prepared.spec_text != self.spec or any(old is None or old.shape != new.shape for old, new in pairs):
            raise LayerError(ANOTHER_LAYOUT)
        for old, new in pairs:
            assert old is not None
            old.copy_(new)

    def weight(self, layer: nn.Module) -> list[Tensor]:
        """The layer's buffers with the prepared weight."""
        return [getattr(layer, name) for name in self.tensors]
