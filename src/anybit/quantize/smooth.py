"""SmoothQuant (Xiao et al., 2022): scales migrate from activations, which have outliers, into weights, which have not.

Channel j of a layer's input is divided by ``s_j = max|x_j|^a / max|w_j|^(1-a)`` and the weights multiplied by it. The
division costs nothing where something linear comes before: a norm's gain, the rows of V, the rows of the up projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import CalibrationError, OptionError
from anybit.quantize.anatomy import Anatomy, anatomies, gain_of


@torch.no_grad()
def smooth(model: Any, batches: Sequence[Tensor], strength: float = 0.5) -> None:
    """Smooth a Llama-like model in place; what it computes stays the same, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: a above; 0 leaves activations as they are, 1 flattens them.
    Raises CalibrationError for activations that are not finite, LayerError for another architecture.
    """
    if not 0 <= strength <= 1:
        raise OptionError(f"strength must be from 0 to 1, not {strength}")
    parts = list(anatomies(model))
    for part in parts:
        gain_of(part.attention_norm), gain_of(part.feed_forward_norm)
    peaks = channel_peaks(model, [m for p in parts for m in (p.query, p.output, p.gate, p.down)], batches)
    for part in parts:
        _smooth_block(part, peaks, strength)


@torch.no_grad()
def channel_peaks(model: Any, modules: list[nn.Linear], batches: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """The largest magnitude of every input channel of some layers over a text, float32 [K] each."""
    peaks: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        peak = args[0].detach().abs().flatten(0, -2).amax(0).float()
        peaks[module] = torch.maximum(peaks[module], peak) if module in peaks else peak

    handles = [module.register_forward_pre_hook(record) for module in modules]
    try:
        for tokens in batches:
            model.base_model(input_ids=tokens.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for name, module in model.named_modules():
        if module in peaks and not bool(peaks[module].isfinite().all()):
            raise CalibrationError(f"the inputs of {name} hold NaN or infinity during calibration")
    return peaks


def _smooth_block(part: Anatomy, peaks: dict[nn.Module, Tensor], strength: float) -> None:
    for norm, readers in (
        (part.attention_norm, [part.query, part.key, part.value]),
        (part.feed_forward_norm, [part.gate, part.up]),
    ):
        scale = _scale(peaks[readers[0]], readers, strength)
        norm.weight.data = (norm.weight.data / scale).to(norm.weight.dtype)
        _stretch(readers, scale)
    scale = _scale(peaks[part.down], [part.down], strength)
    _shrink(part.up, scale)
    _stretch([part.down], scale)
    # Several query heads may read one head of V: they share its scales.
    shared = part.value.out_features
    heads = part.output.in_features // shared
    by_head = peaks[part.output].view(-1, heads, part.head_dim).amax(1).flatten()
    weight = part.output.weight.data.float().abs().amax(0).view(-1, heads, part.head_dim).amax(1).flatten()
    scale = _ratio(by_head, weight, strength)
    _shrink(part.value, scale)
    _stretch([part.output], scale.view(-1, 1, part.head_dim).expand(-1, heads, -1).flatten())


def _scale(peak: Tensor, readers: list[nn.Linear], strength: float) -> Tensor:
    weight = torch.stack([reader.weight.data.float().abs().amax(0) for reader in readers]).amax(0)
    return _ratio(peak, weight, strength)


def _ratio(peak: Tensor, weight: Tensor, strength: float) -> Tensor:
    """The scales, centred on 1 so that 16-bit weights and norms keep their range; 1 for channels that are dead."""
    live = (peak > 0) & (weight > 0)
    ratio = torch.where(live, peak.clamp(min=1e-6) ** strength / weight.clamp(min=1e-6) ** (1 - strength), 1.0)
    if not bool(live.any()):
        return ratio
    middle = ratio[live].log().mean().exp()
    return torch.where(live, (ratio / middle).clamp(1e-3, 1e3), 1.0)


def _stretch(readers: list[nn.Linear], scale: Tensor) -> None:
    for reader in readers:
        reader.weight.data = (reader.weight.data.float() * scale).to(reader.weight.dtype)


def _shrink(writer: nn.Linear, scale: Tensor) -> None:
    writer.weight.data = (writer.weight.data.float() / scale[:, None]).to(writer.weight.dtype)
    if writer.bias is not None:
        writer.bias.data = (writer.bias.data.float() / scale).to(writer.bias.dtype)
