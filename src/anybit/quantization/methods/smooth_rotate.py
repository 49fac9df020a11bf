"""Smoothing, then an online Hadamard rotation of every linear layer's input: for 4-bit activations.

Rotation spreads an input evenly, so rounding adds noise of equal size to all its channels, in proportion to the input's
norm. Before the rotation channel j can still be divided by ``s_j``, and the weights multiplied by it: the noise at the
output is ``mean |x/s|^2 * |W s|^2``, least for ``s_j = sqrt(rms(x_j) / |w_j|)`` (Cauchy-Schwarz). A rotation merged
into the residual stream rules that out: norms' gains do not commute with it. So the stream is not rotated, gains stay
per channel (and can be learned with the codes), and rotations run online.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anybit.codes import hadamard
from anybit.models.llama_block import llama_block, llama_blocks
from anybit.quantization.methods.rotate import rotate_input
from anybit.quantization.methods.scaling_pairs import ScalingPair, all_pairs, put_scales, scaling_pairs
from anybit.quantization.pipeline.lazy import LazyModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def smooth_rotate(
    model: LazyModel,
    batches: Sequence[Tensor],
    strength: float = 0.5,
    seed: int = 0,
    improve: Callable[[], None] | None = None,
    quantized: Collection[str] | None = None,
) -> list[str]:
    """Smooth and rotate a Llama-like model; it computes the same function, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: a in ``s_j = rms(x_j)^a / |w_j|^(1 - a)``.  seed: of the random
    signs of channels before the rotation.  improve: called between scaling and rotation.  quantized: the layers to
    rotate the inputs of; None is all of the blocks'.
    Returns the names of the layers with rotated inputs; forward hooks rotate until the layers are replaced.
    Raises CalibrationError for activations that are not finite, LayerError for an unsupported architecture or width.
    """
    power = _power(model, readers_of(model.model), batches)
    generator = torch.Generator().manual_seed(seed)

    def choose(pair: ScalingPair) -> Tensor:
        scale = _scale(pair, power[pair.reader], strength)
        return scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1).to(scale)

    put_scales(model, [choose(pair) for pair in all_pairs(model)])
    if improve is not None:
        improve()
    names = [name for part in llama_blocks(model.model) for name in part.names]
    names = [name for name in names if quantized is None or name in quantized]

    def turn(block_name: str, block: nn.Module) -> None:
        for name, layer in llama_block(block_name, block).names.items():
            if name in names:
                layer.weight.data = hadamard.transform(layer.weight.data.double()).to(layer.weight.dtype)
                layer.register_forward_pre_hook(rotate_input)

    model.change(turn)
    return names


def readers_of(model: "PreTrainedModel") -> list[str]:
    """A reader of each scaling pair of a model. Raises LayerError for an unsupported architecture or width."""
    found = [pair for part in llama_blocks(model) for pair in scaling_pairs(part)]
    for pair in found:
        hadamard.factor(pair.readers[pair.reader].in_features)
    return [pair.reader for pair in found]


def _power(model: LazyModel, layers: Sequence[str], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean square of every input channel of some layers over a text, float64 [K] each."""

    def add(layer: str, rows: Tensor, before: Tensor | None) -> Tensor:
        total = rows.double().square().sum(0)
        return total if before is None else before + total

    count = sum(tokens.numel() for tokens in batches)
    return {layer: total / count for layer, total in model.reduce_inputs(layers, batches, add).items()}


def _scale(pair: ScalingPair, seen: Tensor, strength: float) -> Tensor:
    """The scales of a pair, from the mean squares of its readers' inputs."""
    weight = torch.stack([reader.weight.data.double().square().sum(0) for reader in pair.readers.values()]).sum(0)
    both = torch.stack([seen, weight]).view(2, -1, pair.shared, pair.size)
    both = both.mean(2).clamp(min=1e-12).sqrt().flatten(1)
    scale = both[0] ** strength / both[1] ** (1 - strength)
    return (scale / scale.log().mean().exp()).clamp(1e-3, 1e3)
