"""Scaling pairs of a Llama-like block: scales can move between a writer of channels and the layers that read them.

The writer, a norm's gain or a linear layer, is divided by the scales, and the readers' weights are multiplied by them:
the model computes the same function, but the readers' inputs quantize differently.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybit.models.llama_block import LlamaBlock, gain_of, llama_block, llama_blocks
from anybit.quantization.pipeline.lazy import LazyModel


@dataclass(frozen=True, eq=False)
class ScalingPair:
    """A writer, and the layers that read its channels.

    shared, size: under grouped-query attention, ``shared`` heads of ``size`` channels read each head of V.
    """

    writer: Any
    readers: dict[str, nn.Linear]
    shared: int = 1
    size: int = 1

    @property
    def channels(self) -> int:
        """Number of scales: one per writer channel."""
        return int(self.writer.weight.shape[0])

    @property
    def reader(self) -> str:
        """The name of one of the readers; all have the same input."""
        return next(iter(self.readers))

    def read(self, scale: Tensor) -> Tensor:
        """Expand scales per writer channel to scales per reader channel."""
        return scale.view(-1, 1, self.size).expand(-1, self.shared, -1).flatten()

    def apply(self, scale: Tensor) -> None:
        """Divide the writer by scales [channels], and multiply the readers' weights by them."""
        gain = self.writer.weight.data
        divisor = scale.double() if gain.ndim == 1 else scale.double()[:, None]
        self.writer.weight.data = (gain.double() / divisor).to(gain.dtype)
        bias = getattr(self.writer, "bias", None)
        if bias is not None:
            bias.data = (bias.data.double() / scale.double()).to(bias.dtype)
        for reader in self.readers.values():
            weight = reader.weight.data
            reader.weight.data = (weight.double() * self.read(scale.double())).to(weight.dtype)


def scaling_pairs(part: LlamaBlock) -> Iterator[ScalingPair]:
    """The four scaling pairs of a block. Raises LayerError, before yielding any, for norms without plain gains."""
    gain_of(part.attention_norm), gain_of(part.feed_forward_norm)
    layers = {name.rpartition(".")[2]: (name, layer) for name, layer in part.names.items()}

    def named(*kinds: str) -> dict[str, nn.Linear]:
        return dict(layers[f"{kind}_proj"] for kind in kinds)

    yield ScalingPair(part.attention_norm, named("q", "k", "v"))
    yield ScalingPair(part.feed_forward_norm, named("gate", "up"))
    yield ScalingPair(part.up, named("down"))
    heads = part.output.in_features // part.value.out_features
    yield ScalingPair(part.value, named("o"), heads, part.head_dim if heads > 1 else 1)


def all_pairs(model: LazyModel) -> Iterator[ScalingPair]:
    """The scaling pairs of all blocks, with their weights, which last until the pairs of the next block."""
    for index in range(len(model.blocks)):
        yield from scaling_pairs(llama_block(f"{model.prefix}.{index}", model.block(index, model.device)))


def put_scales(model: LazyModel, scales: Sequence[Tensor]) -> None:
    """Apply scales in the order of ``all_pairs``; the model computes the same function, up to rounding."""
    given = dict(
        zip((pair.reader for part in llama_blocks(model.model) for pair in scaling_pairs(part)), scales, strict=True)
    )

    def apply(name: str, block: nn.Module) -> None:
        for pair in scaling_pairs(llama_block(name, block)):
            pair.apply(given[pair.reader].to(pair.writer.weight.device))

    model.change(apply)
