"""The parts of a Llama-like block that scales and rotations move between; other architectures raise LayerError."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybit.errors import LayerError
from anybit.models.blocks import find_blocks

# Parts of some families that sit between a block and the residual stream, and do not commute with a rotation.
_OBSTACLES = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "residual_multiplier")


@dataclass(frozen=True, eq=False)
class LlamaBlock:
    """A block: two norms, the four attention projections, and a gated MLP."""

    name: str
    attention_norm: Any
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    feed_forward_norm: Any
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_dim: int

    @property
    def names(self) -> dict[str, nn.Linear]:
        """The linear layers by their full names."""
        attention = {"q_proj": self.query, "k_proj": self.key, "v_proj": self.value, "o_proj": self.output}
        feed_forward = {"gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down}
        return {f"{self.name}.self_attn.{k}": v for k, v in attention.items()} | {
            f"{self.name}.mlp.{k}": v for k, v in feed_forward.items()
        }


def llama_blocks(model: nn.Module) -> Iterator[LlamaBlock]:
    """The parts of every block. Raises LayerError, naming the block and what it lacks, if it is not Llama-like."""
    prefix, blocks = find_blocks(model)
    for index, block in enumerate(blocks):
        yield _llama_block(f"{prefix}.{index}", block)


def gain_of(norm: Any) -> Tensor:
    """The gain of an RMSNorm. Raises LayerError for norms that center, or store their gain differently (Gemma)."""
    kind = type(norm).__name__
    if "RMSNorm" not in kind or "Gemma" in kind:
        raise LayerError(f"{kind} is not a plain RMSNorm, so scales and rotations cannot be moved through it")
    gain: Tensor = norm.weight.data
    return gain


def _llama_block(name: str, block: nn.Module) -> LlamaBlock:
    obstacle = next((part for part in _OBSTACLES if hasattr(block, part)), None)
    if obstacle is not None:
        raise LayerError(f"{name} has {obstacle}: this architecture cannot be smoothed or rotated here")
    parts: list[Any] = []
    for path in (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ):
        part: Any = block
        for step in path.split("."):
            part = getattr(part, step, None)
        if part is None:
            raise LayerError(f"{name} has no {path}: only blocks built like Llama's can be smoothed or rotated")
        parts.append(part)
    attention: Any = block.self_attn
    return LlamaBlock(name, *parts, int(attention.head_dim))  # type: ignore[call-arg]
