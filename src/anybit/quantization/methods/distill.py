"""End-to-end distillation: learn rounding and scales against the original model's predictions.

Per-layer and per-block methods minimize errors where they arise; only the model's output shows what they cost. At 2 and
3 bits a few hundred steps on the calibration text, from a calibrated start, gain more than any of those.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight
from anybit.codes.sparse import SparseWeight
from anybit.errors import CalibrationError, TextError
from anybit.models.blocks import weight_of
from anybit.quantization.learn.fake_quant import Bank, FakeQuantWeight, GivenLinear, L, banks, parameter_groups
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.norms import fuse_norms
from anybit.quantization.learn.rounding import Shared, rounded_through
from anybit.scheme import ActivationFormat

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Distillation:
    """Settings of a distillation.

    passes: over the text.  step_tokens: tokens per optimizer step.  run_tokens: tokens per forward pass.
    place_rate: Adam's learning rate of code positions, in code units.  scale_rate: of the scales' logarithms.
    gain_rate: of the norms' gains.  half: run forward and backward in bfloat16.
    For 2:4 masks: weight_rate: learning rate of weights, relative to their row's root mean square.
    choosing: the fraction of steps in which masks may change.  decay: of pruned weights, per such step.
    """

    passes: float = 1.0
    step_tokens: int = 1024
    run_tokens: int = 1024
    place_rate: float = 0.006
    scale_rate: float = 0.003
    gain_rate: float = 0.0
    weight_rate: float = 0.003
    choosing: float = 0.5
    decay: float = 0.0
    half: bool = True
    device: torch.device | str = "cpu"

    def batch_rows(self, tokens: Tensor) -> int:
        """Rows of a batch per forward pass."""
        return max(self.run_tokens // tokens.shape[1], 1)


def distill(
    model: Any,
    weights: dict[str, QuantizedWeight],
    sequences: Sequence[Tensor],
    settings: Distillation | None = None,
    activations: ActivationFormat | None = None,
    progress: Progress | None = None,
    tuned: dict[str, Tensor] | None = None,
    teacher: Any = None,
) -> dict[str, QuantizedWeight]:
    """Improve a model's quantized weights; the model itself, with its original weights, is not changed.

    sequences: token ids, any lengths; those of equal length are batched within a step.  activations: their format.
    progress: called with steps done, steps in all, and the last loss (nats per token).
    tuned: if given, norms' gains are learned too (at ``gain_rate``) and stored here by name.
    teacher: the model to imitate; by default ``model``.
    Raises CalibrationError if the loss is not finite.
    """
    settings = settings or Distillation()
    learned = _banks(model, weights, settings, FakeQuantWeight)
    groups = parameter_groups(learned, settings.place_rate, settings.scale_rate)
    _learn(teacher or model, model, learned, groups, sequences, settings, activations, progress, tuned)
    hard = {name: weight.to("cpu") for bank in learned for name, weight in bank.harden().items()}
    return {name: hard[name] for name in weights}


def learn_masks(
    model: Any,
    start: dict[str, QuantizedWeight],
    sequences: Sequence[Tensor],
    settings: Distillation | None = None,
    progress: Progress | None = None,
    tuned: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Learn 2:4 masks and the remaining weights of a model's layers: float32 [N, K] by name, zero where pruned.

    start: sparse weights to start from, such as gptq's in 8 bits.  The rest as in ``distill``.
    """
    settings = settings or Distillation()

    def learnable(weight: QuantizedWeight, original: Tensor) -> SparseWeight:
        return SparseWeight(weight, original, decay=settings.decay)

    learned = _banks(model, start, settings, learnable)
    groups: list[dict[str, object]] = [{"params": [bank.soft.latent for bank in learned], "lr": settings.weight_rate}]

    def choose(done: float) -> None:
        for bank in learned:
            bank.soft.choosing = done < settings.choosing

    _learn(model, model, learned, groups, sequences, settings, None, progress, tuned, choose)
    return {name: weight.cpu() for bank in learned for name, weight in bank.harden().items()}


def _banks(
    model: Any,
    weights: dict[str, QuantizedWeight],
    settings: Distillation,
    learnable: Callable[[QuantizedWeight, Tensor], L],
) -> list[Bank[L]]:
    """Learnable weights of a model, on the settings' device."""
    device = torch.device(settings.device)
    originals = {name: weight_of(model.get_submodule(name)).to(device) for name in weights}
    kind = torch.bfloat16 if settings.half else torch.float32
    return banks({name: weight.to(device) for name, weight in weights.items()}, originals, kind, learnable)


def _learn(
    teacher: Any,
    model: Any,
    learned: Sequence[Bank[L]],
    groups: list[dict[str, object]],
    sequences: Sequence[Tensor],
    settings: Distillation,
    activations: ActivationFormat | None,
    progress: Progress | None,
    tuned: dict[str, Tensor] | None,
    before_step: Callable[[float], None] | None = None,
) -> None:
    """Train a model's learnable layers to match its teacher. before_step: called with the fraction of steps done."""
    device = torch.device(settings.device)
    teacher, model = teacher.to(device), model.to(device)
    student = copy.deepcopy(model).requires_grad_(False)
    _replace_layers(model, student, {name: leaf for bank in learned for name, leaf in bank.leaves.items()}, activations)
    if device.type == "cuda":
        fuse_norms(student)
    gains = gains_of(student) if tuned is not None and settings.gain_rate > 0 else {}
    for gain in gains.values():
        gain.data = gain.data.float()
        gain.requires_grad_()
    if gains:
        groups = [*groups, {"params": list(gains.values()), "lr": settings.gain_rate}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=device.type == "cuda")
    ahead = batches_of(sequences, settings.step_tokens)
    steps = max(math.ceil(len(ahead) * settings.passes), 1)
    warm = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    run = KLGradient(teacher, student, settings.half, device)
    for step in range(steps):
        ahead = ahead or batches_of(shuffled(sequences, step), settings.step_tokens)
        if before_step is not None:
            before_step(step / steps)
        for bank in learned:
            bank.refresh()
        for gain in gains.values():
            gain.grad = torch.zeros_like(gain) if gain.grad is None else gain.grad.zero_()
        loss = run([part for tokens in ahead.pop(0) for part in tokens.split(settings.batch_rows(tokens))])
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the loss of step {step} is not finite; lower place_rate, scale_rate and weight_rate"
            )
        for bank in learned:
            bank.receive()
        optimizer.step()
        for bank in learned:
            bank.soft.project()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps, loss)
    if tuned is not None:
        tuned.update({name: gain.detach().cpu() for name, gain in gains.items()})


def _replace_layers(
    teacher: Any, student: Any, leaves: dict[str, Tensor], activations: ActivationFormat | None
) -> None:
    """Replace the student's layers, by name, by GivenLinears over the learnable weights."""
    rounding = [rounded_through(activations)] if activations is not None and activations.quantized else []
    shared: dict[object, Shared] = {}
    for name, leaf in leaves.items():
        module = teacher.get_submodule(name)
        bias = getattr(module, "bias", None)
        layer = GivenLinear(leaf, None if bias is None else bias.detach())
        # Hooks transform the input, such as an online rotation; neighbours with the same input share the result.
        hooks = [*module._forward_pre_hooks.values(), *rounding]
        if hooks:
            key = (name.rpartition(".")[0], *map(id, hooks))
            layer.register_forward_pre_hook(shared.setdefault(key, Shared(hooks)))
        student.set_submodule(name, layer, strict=False)


def gains_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The gains of a model's norms, by name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        gain = getattr(module, "weight", None)
        if isinstance(gain, nn.Parameter) and gain.ndim == 1 and "Norm" in type(module).__name__:
            found[f"{name}.weight"] = gain
    return found


def shuffled(sequences: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The sequences in a random order, so that passes do not repeat the same steps."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    return [sequences[i] for i in order.tolist()]


def batches_of(sequences: Sequence[Tensor], step_tokens: int) -> list[list[Tensor]]:
    """The batches of each step, int64 [B, L] for each length in it, in the order of the text."""
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
