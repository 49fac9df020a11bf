"""SmoothQuant (Xiao et al., 2022): scales migrate from activations, which have outliers, into weights, which have not.

Channel j of a layer's input is divided by ``s_j = max|x_j|^a / max|w_j|^(1-a)`` and the weights multiplied by it. The
division costs nothing where something linear comes before: a norm's gain, the rows of V, the rows of the up projection.
How far to go, a, is one number for a whole model, or is found for each scaling pair by what quantizing loses there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import OptionError
from anybit.quantization.methods.llama_block import llama_blocks
from anybit.quantization.methods.rtn import quantize_weight
from anybit.quantization.methods.scaling_pairs import ScalingPair, scaling_pairs
from anybit.quantization.pipeline.blocks import reduce_inputs
from anybit.reference import quantize_activations
from anybit.scheme import Scheme

# What is tried for each pair when no strength is given.
_STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Tokens that these trials look at.
_SAMPLE = 512


@torch.no_grad()
def smooth(model: Any, batches: Sequence[Tensor], strength: float | None = 0.5, scheme: Scheme | None = None) -> None:
    """Smooth a Llama-like model in place; what it computes stays the same, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: a above; 0 leaves activations as they are, 1 flattens them; None
    finds it for each pair, under ``scheme``, whose weights and activations are both quantized for the trials.
    Raises CalibrationError for activations that are not finite, LayerError for another architecture.
    """
    if strength is not None and not 0 <= strength <= 1:
        raise OptionError(f"strength must be from 0 to 1, not {strength}")
    search = strength is None and scheme is not None and scheme.activations.quantized
    found = [pair for part in llama_blocks(model) for pair in scaling_pairs(part)]
    samples: dict[nn.Module, Tensor] | None = {} if search else None
    peaks = channel_peaks(model, [pair.reader for pair in found], batches, samples)

    def choose(pair: ScalingPair) -> Tensor:
        peak, weight = _by_channel(pair, peaks[pair.reader]), _by_channel(pair, _weight_peaks(pair))
        if samples is None or scheme is None:
            return _ratio(peak, weight, 0.5 if strength is None else strength)
        x, whole = samples[pair.reader], torch.cat([reader.weight.data.float() for reader in pair.readers.values()])
        tried = [_ratio(peak, weight, a) for a in _STRENGTHS]
        losses = [_loss(x, whole, pair.read(scale), scheme) for scale in tried]
        return tried[losses.index(min(losses))]

    for pair in found:
        pair.apply(choose(pair))


def _loss(x: Tensor, weight: Tensor, scale: Tensor, scheme: Scheme) -> float:
    """What quantizing loses of x W^T with scales between the two: of every token alike, and of all that there is.

    A few tokens are hundreds of times as large as all others: in a plain sum nothing else would count, and among
    relative errors they would not.
    """
    wanted = x @ weight.T
    coded = quantize_activations(x / scale, scheme.activations).dequantize()
    found = coded @ quantize_weight(weight * scale, scheme.weights, search=False).dequantize().T
    lost, size = (found - wanted).square().sum(1), wanted.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return float((lost / size).mean() + lost.sum() / size.sum())


@torch.no_grad()
def channel_peaks(
    model: Any, modules: list[nn.Linear], batches: Sequence[Tensor], samples: dict[nn.Module, Tensor] | None = None
) -> dict[nn.Module, Tensor]:
    """The largest magnitude of every input channel of some layers over a text, float32 [K] each.

    samples: filled with some of the inputs, float32 [tokens, K] each, spread over all of the text.
    """
    share = -(-_SAMPLE // max(len(batches), 1))

    def peak(module: nn.Module, rows: Tensor, before: Tensor | None) -> Tensor:
        if samples is not None:
            some = rows[:: max(len(rows) // share, 1)].float()
            samples[module] = torch.cat([samples[module], some]) if module in samples else some
        largest = rows.abs().amax(0).float()
        return largest if before is None else torch.maximum(before, largest)

    return reduce_inputs(model, modules, batches, peak)


def _by_channel(pair: ScalingPair, peak: Tensor) -> Tensor:
    """The largest of the channels read that come from one that is written."""
    return peak.view(-1, pair.shared, pair.size).amax(1).flatten()


def _weight_peaks(pair: ScalingPair) -> Tensor:
    return torch.stack([reader.weight.data.float().abs().amax(0) for reader in pair.readers.values()]).amax(0)


def _ratio(peak: Tensor, weight: Tensor, strength: float) -> Tensor:
    """The scales, centred on 1 so that 16-bit weights and norms keep their range; 1 for channels that are dead."""
    live = (peak > 0) & (weight > 0) & (strength > 0)
    ratio = torch.where(live, peak.clamp(min=1e-6) ** strength / weight.clamp(min=1e-6) ** (1 - strength), 1.0)
    if not bool(live.any()):
        return ratio
    middle = ratio[live].log().mean().exp()
    return torch.where(live, (ratio / middle).clamp(1e-3, 1e3), 1.0)
