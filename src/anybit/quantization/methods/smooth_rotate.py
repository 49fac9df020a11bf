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
from anybit.models.llama_block import llama_blocks
from anybit.quantization.methods.rotate import rotate_input
from anybit.quantization.methods.scaling_pairs import ScalingPair, scaling_pairs
from anybit.quantization.pipeline.blocks import reduce_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def smooth_rotate(
    model: "PreTrainedModel",
    batches: Sequence[Tensor],
    strength: float = 0.5,
    seed: int = 0,
    improve: Callable[[], None] | None = None,
    quantized: Collection[str] | None = None,
) -> list[str]:
    """Smooth and rotate a Llama-like model in place; it computes the same function, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: a in ``s_j = rms(x_j)^a / |w_j|^(1 - a)``.  seed: of the random
    signs of channels before the rotation.  improve: called between scaling and rotation.  quantized: the layers to
    rotate the inputs of; None is all of the blocks'.
    Returns the names of the layers with rotated inputs; forward hooks rotate until the layers are replaced.
    Raises CalibrationError for activations that are not finite, LayerError for an unsupported architecture or width.
    """
    found = pairs_of(model)
    power = _power(model, [pair.reader for pair in found], batches)
    generator = torch.Generator().manual_seed(seed)
    for pair in found:
        scale = _scale(pair, power[pair.reader], strength)
        pair.apply(scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1).to(scale))
    if improve is not None:
        improve()
    every = {name: layer for part in llama_blocks(model) for name, layer in part.names.items()}
    layers = {name: layer for name, layer in every.items() if quantized is None or name in quantized}
    for layer in layers.values():
        layer.weight.data = hadamard.transform(layer.weight.data.double()).to(layer.weight.dtype)
        layer.register_forward_pre_hook(rotate_input)
    return list(layers)


def pairs_of(model: "PreTrainedModel") -> list[ScalingPair]:
    """All scaling pairs of a model. Raises LayerError for an unsupported architecture or width."""
    found = [pair for part in llama_blocks(model) for pair in scaling_pairs(part)]
    for pair in found:
        hadamard.factor(pair.reader.in_features)
    return found


def _power(model: "PreTrainedModel", modules: list[nn.Linear], batches: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """The mean square of every input channel of some layers over a text, float64 [K] each."""

    def add(module: nn.Module, rows: Tensor, before: Tensor | None) -> Tensor:
        total = rows.double().square().sum(0)
        return total if before is None else before + total

    count = sum(tokens.numel() for tokens in batches)
    return {module: total / count for module, total in reduce_inputs(model, modules, batches, add).items()}


def _scale(pair: ScalingPair, seen: Tensor, strength: float) -> Tensor:
    """The scales of a pair, from the mean squares of its readers' inputs."""
    weight = torch.stack([reader.weight.data.double().square().sum(0) for reader in pair.readers.values()]).sum(0)
    both = torch.stack([seen, weight]).view(2, -1, pair.shared, pair.size)
    both = both.mean(2).clamp(min=1e-12).sqrt().flatten(1)
    scale = both[0] ** strength / both[1] ** (1 - strength)
    return (scale / scale.log().mean().exp()).clamp(1e-3, 1e3)
