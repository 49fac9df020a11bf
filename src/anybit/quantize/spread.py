"""Smoothing, then a Hadamard rotation of every linear layer's input, on line: for activations of four bits.

A rotated input is spread evenly, so rounding adds noise of one size to all of its channels, in proportion to the
length of the input. In front of the rotation, channel j may still be divided by ``s_j``, the weights multiplied by it:
the noise that reaches the output is ``mean |x/s|^2 * |W s|^2``, least for ``s_j = sqrt(rms(x_j) / |w_j|)`` (Cauchy and
Schwarz). A rotation that is merged into the residual stream cannot have that: norms' gains do not commute with it. So
the stream stays as it is, gains keep their channels (and learn with the codes), and rotations run on line.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit import hadamard
from anybit.quantize.anatomy import Anatomy, anatomies, gain_of
from anybit.quantize.blocks import reduce_inputs


@torch.no_grad()
def spread(model: Any, batches: Sequence[Tensor], strength: float = 0.4, seed: int = 0) -> list[str]:
    """Smooth and rotate a Llama-like model in place; what it computes stays the same, up to rounding.

    batches: token ids, int64 [B, L] each.  strength: ``s_j = rms(x_j)^a / |w_j|^(1 - a)``.  seed: of the signs that
    channels get before they are rotated.  Returns the names of the layers whose inputs are transformed on line, which
    is all of them; forward hooks do it until the layers are replaced.
    Raises CalibrationError for activations that are not finite, LayerError for another architecture or size.
    """
    parts = list(anatomies(model))
    for part in parts:
        gain_of(part.attention_norm), gain_of(part.feed_forward_norm)
        for module in (part.query, part.output, part.down):
            hadamard.factor(module.in_features)
    power = _power(model, [m for p in parts for m in (p.query, p.output, p.gate, p.down)], batches)
    generator = torch.Generator().manual_seed(seed)
    names: list[str] = []
    for part in parts:
        _spread_block(part, power, strength, generator)
        for name, layer in part.names.items():
            layer.weight.data = hadamard.transform(layer.weight.data.double()).to(layer.weight.dtype)
            layer.register_forward_pre_hook(online)
            names.append(name)
    return names


def online(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward hook that rotates a layer's input."""
    return (hadamard.transform(args[0]), *args[1:])


def _power(model: Any, modules: list[nn.Linear], batches: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """The mean square of every input channel of some layers over a text, float64 [K] each."""

    def add(module: nn.Module, rows: Tensor, before: Tensor | None) -> Tensor:
        total = rows.double().square().sum(0)
        return total if before is None else before + total

    count = sum(tokens.numel() for tokens in batches)
    return {module: total / count for module, total in reduce_inputs(model, modules, batches, add).items()}


def _spread_block(part: Anatomy, power: dict[nn.Module, Tensor], strength: float, generator: torch.Generator) -> None:
    def scale_of(seen: Tensor, readers: list[nn.Linear], shared: int = 1, size: int = 1) -> Tensor:
        """Scales with signs; ``shared`` heads of ``size`` channels each have one and the same."""
        weight = torch.stack([reader.weight.data.double().square().sum(0) for reader in readers]).sum(0)
        both = torch.stack([seen, weight]).view(2, -1, shared, size).mean(2).clamp(min=1e-12).sqrt().flatten(1)
        scale = both[0] ** strength / both[1] ** (1 - strength)
        scale = (scale / scale.log().mean().exp()).clamp(1e-3, 1e3)
        return scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1).to(scale)

    for norm, readers in (
        (part.attention_norm, [part.query, part.key, part.value]),
        (part.feed_forward_norm, [part.gate, part.up]),
    ):
        scale = scale_of(power[readers[0]], readers)
        norm.weight.data = (norm.weight.data.double() / scale).to(norm.weight.dtype)
        _stretch(readers, scale)
    scale = scale_of(power[part.down], [part.down])
    _shrink(part.up, scale)
    _stretch([part.down], scale)
    # Several query heads may read one head of V: they share its scales.
    heads = part.output.in_features // part.value.out_features
    scale = scale_of(power[part.output], [part.output], heads, part.head_dim)
    _shrink(part.value, scale)
    _stretch([part.output], scale.view(-1, 1, part.head_dim).expand(-1, heads, -1).flatten())


def _stretch(readers: list[nn.Linear], scale: Tensor) -> None:
    for reader in readers:
        reader.weight.data = (reader.weight.data.double() * scale).to(reader.weight.dtype)


def _shrink(writer: nn.Linear, scale: Tensor) -> None:
    writer.weight.data = (writer.weight.data.double() / scale[:, None]).to(writer.weight.dtype)
    if writer.bias is not None:
        writer.bias.data = (writer.bias.data.double() / scale).to(writer.bias.dtype)
