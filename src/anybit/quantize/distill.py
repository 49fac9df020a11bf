"""Distillation, end to end: rounding and scales learned against the original model's predictions.

Per-layer and per-block methods see an error where it arises; only the output says what it costs. A few hundred steps
on the calibration text, from a calibrated start, are worth more at two and three bits than any of them.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import CalibrationError, TextError
from anybit.packing import QuantizedWeight
from anybit.quantize.blocks import weight_of
from anybit.quantize.soft import SoftLinear, parameter_groups
from anybit.reference import quantize_activations
from anybit.scheme import ActivationFormat

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Distillation:
    """How to distil.

    passes: how often the text is gone through.  step_tokens: tokens a step.  run_tokens: how many of these run at
    once.  place_rate: how far a code may move in a step, in units of code.  scale_rate: the same of the logarithm of
    the scales.  half: passes in bfloat16.
    """

    passes: float = 1.0
    step_tokens: int = 1024
    run_tokens: int = 1024
    place_rate: float = 0.006
    scale_rate: float = 0.003
    half: bool = True
    device: torch.device | str = "cpu"

    def batch_rows(self, tokens: Tensor) -> int:
        """How many rows of a batch run at once."""
        return max(self.run_tokens // tokens.shape[1], 1)


def distill(
    model: Any,
    weights: dict[str, QuantizedWeight],
    sequences: Sequence[Tensor],
    settings: Distillation | None = None,
    activations: ActivationFormat | None = None,
    progress: Progress | None = None,
) -> dict[str, QuantizedWeight]:
    """Improve quantized weights of a model; the model, which holds the original weights, is left as it is.

    sequences: token ids, any lengths; runs of equal lengths share a step.  activations: their format, if quantized.
    progress: called with steps done, steps in all, and the last loss (nats a token).
    Raises CalibrationError when the loss is not finite.
    """
    settings = settings or Distillation()
    device = torch.device(settings.device)
    teacher = model.to(device)
    student = copy.deepcopy(teacher).requires_grad_(False)
    soft: dict[str, SoftLinear] = {}
    for name, weight in weights.items():
        module = teacher.get_submodule(name)
        bias = getattr(module, "bias", None)
        soft[name] = SoftLinear(weight.to(device), weight_of(module), None if bias is None else bias.detach())
        # What the layer's input goes through, such as an online rotation.
        for hook in list(module._forward_pre_hooks.values()):
            soft[name].register_forward_pre_hook(hook)
        if activations is not None and activations.quantized:
            soft[name].register_forward_pre_hook(_rounded_through(activations))
        student.set_submodule(name, soft[name], strict=False)
    layers = list(soft.values())
    optimizer = torch.optim.Adam(parameter_groups(layers, settings.place_rate, settings.scale_rate), betas=(0.9, 0.99))
    batches = _batches(sequences, settings.step_tokens)
    steps = max(math.ceil(len(batches) * settings.passes), 1)
    warm = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    kind = torch.bfloat16 if settings.half else torch.float32
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for layer in layers:
            layer.freeze(kind)
        parts = [part for tokens in batches[step % len(batches)] for part in tokens.split(settings.batch_rows(tokens))]
        total = sum(part.numel() for part in parts)
        loss = 0.0
        for part in parts:
            divergence = _divergence(teacher, student, part.to(device), settings.half) * (part.numel() / total)
            loss += divergence.item()
            divergence.backward()
        if not math.isfinite(loss):
            raise CalibrationError(f"the loss of step {step} is not finite; lower place_rate and scale_rate")
        for layer in layers:
            layer.thaw()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps, loss)
    return {name: layer.soft.harden().to("cpu") for name, layer in soft.items()}


def _divergence(teacher: Any, student: Any, tokens: Tensor, half: bool) -> Tensor:
    """Mean KL(teacher || student) over all positions, in nats."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
        with torch.no_grad():
            wanted = teacher(input_ids=tokens, use_cache=False).logits
        found = student(input_ids=tokens, use_cache=False).logits
    wanted = wanted.float().log_softmax(-1)
    return nn.functional.kl_div(
        found.float().log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
    )


def _rounded_through(format: ActivationFormat) -> Callable[..., tuple[Tensor, ...]]:
    """A hook that quantizes a layer's input and lets gradients through."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        rounded = quantize_activations(x.detach(), format).dequantize().reshape(x.shape).to(x.dtype)
        return (x + (rounded - x).detach(), *args[1:])

    return hook


def _batches(sequences: Sequence[Tensor], step_tokens: int) -> list[list[Tensor]]:
    """The tokens of each step, [B, L] for each length in it, in the order of the text."""
    steps: list[dict[int, list[Tensor]]] = [{}]
    held = 0
    for sequence in sequences:
        if held and held + len(sequence) > step_tokens:
            steps.append({})
            held = 0
        if len(sequence) > 1:
            steps[-1].setdefault(len(sequence), []).append(sequence)
            held += len(sequence)
    batches = [[torch.stack(rows) for rows in step.values()] for step in steps if step]
    if not batches:
        raise TextError("distillation needs sequences of at least 2 tokens")
    return batches
