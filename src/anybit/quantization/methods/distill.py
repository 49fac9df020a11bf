"""Distillation: all weights learn together, rounded as they will be stored, to predict what the 16-bit model predicts.

Methods that work layer by layer minimize errors where they arise; only the model's output shows what they cost. From a
calibrated start weights move freely, with their scales, zeros and the norms' gains (``anybit.quantization.learn``).
Few bits need millions of tokens, so the model also writes text to learn from.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight
from anybit.device import memory_of
from anybit.errors import CalibrationError
from anybit.models.blocks import weight_of
from anybit.quantization.learn.fuse import fuser, unfused
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.latent import Rates, banks
from anybit.quantization.learn.loop import Course, Progress, learn, steps_of
from anybit.quantization.learn.norms import Gains, fuse_norms
from anybit.quantization.learn.student import placed, student_of, without_rotations
from anybit.quantization.pipeline.resume import SavedState
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Seconds between saved states at least, and how many times as long as saving one.
_SAVE, _TIMES = 240, 20
# Share of a GPU's memory that weights, gradients and moments may take.
_SHARE = 0.75
# The largest norm of a step's gradient. A coarse start has gradients many times those of later steps, and Adam would
# take small steps until it has forgotten them.
_CLIP = 1.0
# Tokens and seconds from which on compiling pays.
_LONG, _LONG_SECONDS = 1 << 20, 60


@dataclass(frozen=True, slots=True)
class Distillation:
    """Settings of a distillation.

    tokens: to learn from in all, repeats included; or, if 0, seconds: as long as these last.
    step_tokens: tokens per step.  choosing: for 2:4 schemes, the fraction of the course in which masks may change.
    half: run forward and backward in bfloat16.  nested: widths of slices to learn in turn with the scheme's own.
    """

    tokens: int = 49152
    seconds: float = 0.0
    step_tokens: int = 1024
    rates: Rates = field(default_factory=Rates)
    choosing: float = 0.0
    half: bool = True
    device: torch.device | str = "cpu"
    seed: int = 0
    nested: Sequence[int] = ()

    @property
    def long(self) -> bool:
        """Whether it lasts so long that compiling pays."""
        return self.tokens >= _LONG or self.seconds >= _LONG_SECONDS

    @property
    def course(self) -> Course:
        """The course at its start."""
        return Course(max(-(-self.tokens // self.step_tokens), 1) if self.tokens else 0, self.seconds)


@dataclass(frozen=True, eq=False)
class Learned:
    """What a distillation changed: quantized weights, and gains of norms, by name; and how it went."""

    weights: dict[str, QuantizedWeight]
    gains: dict[str, Tensor]
    course: Course


def distill(
    model: "PreTrainedModel",
    weights: Mapping[str, QuantizedWeight],
    text: Sequence[Tensor],
    scheme_of: Callable[[str], Scheme],
    settings: Distillation | None = None,
    progress: Progress | None = None,
    saved: SavedState | None = None,
) -> Learned:
    """Learn a model's quantized weights; the model itself, with its original weights, is not changed.

    weights: the start, of linear layers and the input embedding.  text: token ids, any lengths; those of equal length
    are batched.  scheme_of: the scheme of a layer; "" for the whole model's.  saved: where an interrupted run goes on.
    Raises CalibrationError if the loss is not finite, or the model does not fit on the GPU.
    """
    settings = settings or Distillation()
    device = torch.device(settings.device)
    half = torch.bfloat16 if settings.half else None
    latent_dtype, run_tokens = _room(model, weights, settings)
    teacher = placed(model, device, half)
    start = {name: weight.to(device) for name, weight in weights.items()}

    def original(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).to(device)

    fuse = fuser(device) if settings.long else unfused
    nested = {scheme_of("").weights: settings.nested}
    learned = banks(start, original, half or torch.float32, latent_dtype, fuse, nested)
    leaves = {name: leaf for bank in learned for name, leaf in bank.leaves.items()}
    student = student_of(teacher, leaves, lambda name: scheme_of(name).activations, scheme_of("").kv)
    without_rotations(teacher, model)
    if device.type == "cuda":
        fuse_norms(student)
    gains = Gains(student)
    course = settings.course
    state = {f"{i}.{name}": tensor for i, bank in enumerate(learned) for name, tensor in bank.state().items()}
    state |= gains.moving.state("gains")
    if saved is not None:
        _restore(saved, course, state)
    for bank in learned:
        bank.refresh(course.step)
    last, cost = time.monotonic(), 0.0

    def update(rate: float) -> None:
        nonlocal last, cost
        count, rates = course.step + 1, settings.rates.times(rate)
        size = torch.stack([*(bank.size() for bank in learned), gains.gradient.norm()]).norm()
        factor = (_CLIP / size).clamp(max=1.0)
        for bank in learned:
            bank.step(rates, count, course.done < settings.choosing, factor)
        gains.step(rates.gain, count, factor)
        began = time.monotonic()
        if saved is not None and began - last > max(_SAVE, _TIMES * cost):
            saved.write({"step": count, "elapsed": course.elapsed}, state)
            last, cost = time.monotonic(), time.monotonic() - began

    losses = deque[float](maxlen=len(settings.nested) + 1)

    def tell(done: int, total: int, loss: float) -> None:
        losses.append(loss)
        if progress is not None:
            progress(done, total, fmean(losses))

    gradient = KLGradient(teacher, student, run_tokens, settings.half, fuse, repeatable=not settings.seconds)
    learn(gradient, steps_of(text, settings.step_tokens, settings.seed), course, update, tell)
    hard = {name: weight for bank in learned for name, weight in bank.harden().items()}
    learned_gains = {name: gain.detach().cpu() for name, gain in gains.named.items() if settings.rates.gain}
    return Learned(hard, learned_gains, course)


def _restore(saved: SavedState, course: Course, state: Mapping[str, Tensor]) -> None:
    """Continue where an interrupted run saved its state, if it did."""
    found = saved.read()
    if found is None:
        return
    note, tensors = found
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
    course.step, course.elapsed = int(note["step"]), float(note["elapsed"])


def why_not(model: nn.Module, learned: int, device: torch.device | str) -> str | None:
    """Why a device has no room to learn ``learned`` weights of a model at once, or None."""
    total, needed = memory_of(torch.device(device)), min(_needed(model, learned, torch.device(device)).values())
    if needed < _SHARE * total:
        return None
    return f"learning all weights at once takes {needed / _SHARE / 2**30:.3g} GiB, and {device} has {total / 2**30:.3g}"


def _needed(model: nn.Module, learned: int, device: torch.device) -> dict[torch.dtype, int]:
    """Bytes by the dtype of latents and moments: teacher, weight and gradient; latent and two moments; the rest."""
    rest = 4 * sum(parameter.numel() for parameter in model.parameters()) - 4 * learned
    if device.type != "cuda":
        return {torch.float32: learned * 24 + rest}
    return {kind: learned * (6 + 3 * kind.itemsize) + rest for kind in (torch.float32, torch.bfloat16)}


def _room(
    model: "PreTrainedModel", weights: Mapping[str, QuantizedWeight], settings: Distillation
) -> tuple[torch.dtype, int]:
    """The dtype of latents and moments, and the tokens per forward pass, that a device has memory for.

    Raises CalibrationError if a GPU has not even enough for 16 bits (``learn_block`` needs less).
    """
    device, run_tokens = torch.device(settings.device), settings.step_tokens
    if device.type != "cuda":
        return torch.float32, min(run_tokens, 1024)
    learned = sum(weight.shape[0] * weight.shape[1] for weight in weights.values())
    if (reason := why_not(model, learned, device)) is not None:
        raise CalibrationError(reason)
    # Not free memory, so that every run decides alike.
    total, needed = memory_of(device), _needed(model, learned, device)
    kind = next(kind for kind, size in needed.items() if size < _SHARE * total)
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    token = config.num_hidden_layers * (40 * config.hidden_size + 12 * inner) + 10 * config.vocab_size
    return kind, max(min(run_tokens, int((0.9 * total - needed[kind]) / 2 / token)), 1)
