"""SmoothQuant (Xiao et al., 2022): migrate scales from activations, which have outliers, into weights.

Channel j of a layer's input is divided by ``s_j = max|x_j|^a / max|w_j|^(1-a)`` and the weights multiplied by it. The
division folds into whatever linear comes before: a norm's gain, the rows of V, the rows of the up projection.
The migration strength a is one number for the whole model, or is chosen per scaling pair by its quantization error.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from anybit.codes.reference import quantize_activations
from anybit.codes.rtn import quantize_weight
from anybit.errors import OptionError
from anybit.models.llama_block import llama_blocks
from anybit.quantization.methods.scaling_pairs import ScalingPair, all_pairs, put_scales, scaling_pairs
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.scheme import Scheme

# Strengths to try for each pair if none is given.
_STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Tokens that these trials use.
_SAMPLE = 512


@torch.no_grad()
def smooth(
    model: LazyModel, batches: Sequence[Tensor], strength: float | None = 0.5, scheme: Scheme | None = None
) -> None:
    """Smooth a Llama-like model; it computes the same function, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: the exponent a; 0 leaves the model unchanged, 1 flattens
    activations; None chooses it per pair by trials that quantize weights and activations to ``scheme`` (0.5 if it
    quantizes no activations, or is None).
    Raises CalibrationError for activations that are not finite, LayerError for an unsupported architecture, OptionError
    for a strength outside 0 to 1.
    """
    if strength is not None and not 0 <= strength <= 1:
        raise OptionError(f"strength must be from 0 to 1, not {strength}")
    search = strength is None and scheme is not None and scheme.activations.quantized
    found = [pair.reader for part in llama_blocks(model.model) for pair in scaling_pairs(part)]
    samples: dict[str, Tensor] | None = {} if search else None
    peaks = channel_peaks(model, found, batches, samples)

    def choose(pair: ScalingPair) -> Tensor:
        peak, weight = _by_channel(pair, peaks[pair.reader]), _by_channel(pair, _weight_peaks(pair))
        if samples is None or scheme is None:
            return _ratio(peak, weight, 0.5 if strength is None else strength)
        x, whole = samples[pair.reader], torch.cat([reader.weight.data.float() for reader in pair.readers.values()])
        tried = [_ratio(peak, weight, a) for a in _STRENGTHS]
        losses = [_loss(x, whole, pair.read(scale), scheme) for scale in tried]
        return tried[losses.index(min(losses))]

    put_scales(model, [choose(pair) for pair in all_pairs(model)])


def _loss(x: Tensor, weight: Tensor, scale: Tensor, scheme: Scheme) -> float:
    """The relative quantization error of x W^T, smoothed by ``scale``: averaged over tokens, plus of the total.

    A few tokens are hundreds of times larger than all others: the total alone would see only them, the average over
    tokens would all but ignore them.
    """
    wanted = x @ weight.T
    coded = quantize_activations(x / scale, scheme.activations).dequantize()
    found = coded @ quantize_weight(weight * scale, scheme.weights, search=False).dequantize().T
    lost, size = (found - wanted).square().sum(1), wanted.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return float((lost / size).mean() + lost.sum() / size.sum())


@torch.no_grad()
def channel_peaks(
    model: LazyModel, layers: Sequence[str], batches: Sequence[Tensor], samples: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The largest magnitude of every input channel of some layers over a text, float32 [K] each.

    samples: if given, filled with inputs sampled across the text, float32 [tokens, K] each.
    """
    share = -(-_SAMPLE // max(len(batches), 1))

    def peak(layer: str, rows: Tensor, before: Tensor | None) -> Tensor:
        if samples is not None:
            some = rows[:: max(len(rows) // share, 1)].float()
            samples[layer] = torch.cat([samples[layer], some]) if layer in samples else some
        largest = rows.abs().amax(0).float()
        return largest if before is None else torch.maximum(before, largest)

    return model.reduce_inputs(layers, batches, peak)


def _by_channel(pair: ScalingPair, peak: Tensor) -> Tensor:
    """Reduce values per reader channel to values per writer channel, by the maximum."""
    return peak.view(-1, pair.shared, pair.size).amax(1).flatten()


def _weight_peaks(pair: ScalingPair) -> Tensor:
    return torch.stack([reader.weight.data.float().abs().amax(0) for reader in pair.readers.values()]).amax(0)


def _ratio(peak: Tensor, weight: Tensor, strength: float) -> Tensor:
    """The scales, with a geometric mean of 1 so that 16-bit weights and gains keep their range; 1 for dead channels."""
    live = (peak > 0) & (weight > 0) & (strength > 0)
    ratio = torch.where(live, peak.clamp(min=1e-6) ** strength / weight.clamp(min=1e-6) ** (1 - strength), 1.0)
    if not bool(live.any()):
        return ratio
    middle = ratio[live].log().mean().exp()
    return torch.where(live, (ratio / middle).clamp(1e-3, 1e3), 1.0)
