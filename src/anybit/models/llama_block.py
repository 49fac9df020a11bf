"""The parts of a Llama-like block that scales and rotations move between; other architectures raise LayerError."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybit.errors import LayerError
from anybit.models.blocks import find_blocks

# Parts of some families that sit between a block and the residual stream, and do not commute with a rotation.
_OBSTACLES = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "residual_multiplier")
_PLACES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Where a block keeps each part."""


@dataclass(frozen=True, eq=False)
class LlamaBlock:
    """A block: two norms, the four attention projections, and a gated MLP."""

    name: str
    attention_norm: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    feed_forward_norm: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_dim: int

    @property
    def names(self) -> dict[str, nn.Linear]:
        """The linear layers by their full names."""
        return {f"{self.name}.{path}": getattr(self, part) for part, path in _PLACES.items() if "norm" not in path}


def llama_blocks(model: nn.Module) -> Iterator[LlamaBlock]:
    """The parts of every block. Raises LayerError as ``llama_block`` does."""
    prefix, blocks = find_blocks(model)
    for index, block in enumerate(blocks):
        yield llama_block(f"{prefix}.{index}", block)


def gain_of(norm: nn.Module) -> Tensor:
    """The gain of an RMSNorm. Raises LayerError for norms that center, or store their gain differently (Gemma)."""
    kind = type(norm).__name__
    if "RMSNorm" not in kind or "Gemma" in kind:
        raise LayerError(f"{kind} is not a plain RMSNorm, so scales and rotations cannot be moved through it")
    assert isinstance(norm.weight, Tensor)
    return norm.weight.data


def llama_block(name: str, block: nn.Module) -> LlamaBlock:
    """The parts of a block of that name. Raises LayerError, naming what it lacks, if it is not Llama-like."""
    obstacle = next((part for part in _OBSTACLES if hasattr(block, part)), None)
    if obstacle is not None:
        raise LayerError(
            f"{name} has {obstacle}: this architecture cannot be smoothed or rotated; gptq and distill can quantize it"
        )
    parts: dict[str, Any] = {}
    for part, path in _PLACES.items():
        try:
            parts[part] = block.get_submodule(path)
        except AttributeError:
            raise LayerError(
                f"{name} has no {path}: only blocks built like Llama's can be smoothed or rotated; gptq and distill "
                "can quantize it"
            ) from None
    attention: Any = block.self_attn
    return LlamaBlock(name, head_dim=int(attention.head_dim), **parts)
