"""The options of the calibrated methods, and what they come to for a method, a scheme and a device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch

from anybit.errors import OptionError
from anybit.quantization.learn.kl_gradient import fast_in_half
from anybit.quantization.learn.latent import Rates
from anybit.quantization.learn.scales import ScaleLearning
from anybit.quantization.methods.distill import Distillation
from anybit.scheme import Scheme


def _as_int(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ValueError(value)
    return number


def _as_float(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(value)
    return number


_READERS: dict[type, Callable[[Any], object]] = {int: _as_int, float: _as_float}
_KINDS: dict[type, str] = {int: "a whole number", float: "a finite number"}
_AT_LEAST_0 = ("minutes", "learn_tokens", "generated_tokens", "weight_rate", "scale_rate", "gain_rate")
_RANGES: dict[str, tuple[int, int | None]] = {
    "tokens": (1, None),
    "length": (2, None),
    "step_tokens": (1, None),
    "seed": (0, 2**64 - 1),
    **dict.fromkeys(("drift", "strength", "choosing"), (0, 1)),
    **dict.fromkeys((*_AT_LEAST_0, "scale_steps", "between_rate"), (0, None)),
}
"""The least and greatest values of options."""
# Fewer steps need larger ones.
_FEW_STEPS = 500


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the calibrated methods.

    text: a file to calibrate on; a .json file holds lists of token ids.  sequences: the same, as Python lists.
    tokens: how many to calibrate on, in sequences of ``length`` (default 16384, on a GPU 32768).
    start: how codes start: "gptq", or "nearest", which looks at no text (``gptq.nearest``); None is "gptq", and
    "nearest" for ``distill`` in minutes, but for 2:4 schemes.
    drift: how far each layer corrects earlier layers' errors, from 0 (plain GPTQ) to 1.
    order, damping, passes: see ``gptq.GPTQ``.
    minutes: of the whole run, for methods that learn.  learn_tokens: to learn from instead, repeats included; two such
    runs are the same.  By default ``distill`` takes 20 minutes on a GPU, and 49152 tokens on a CPU; on a GPU smoothing
    and rotation take 2^21 tokens if activations are quantized; nothing else learns unless given one of them.
    generated_tokens: text that the model writes itself to learn from, from pieces of the text, or of its own if there
    is none; None is a quarter of the minutes or of learn_tokens on a GPU, else 0.
    step_tokens, choosing: see ``methods.distill``.  weight_rate, scale_rate, gain_rate: see ``learn.latent.Rates``.
    strength: smoothing's exponent; None chooses it per scaling pair (0.5 if a rotation follows).
    scale_steps, between_rate: steps and learning rate to train these scales (``learn.scales``); None is 64 steps on a
    GPU, else 0.
    seed: of the rotation, of generated text and its order.
    device: to work on; None takes a GPU if there is one.
    resume: a folder for finished blocks, generated text and the state of learning.
    spill: a folder for activations beyond the memory budget.
    """

    text: Path | None = None
    sequences: list[list[int]] | None = None
    tokens: int | None = None
    length: int = 512
    start: str | None = None
    drift: float = 0.5
    order: str = "grouped"
    damping: float = 0.01
    passes: int = 3
    minutes: float | None = None
    learn_tokens: int | None = None
    generated_tokens: int | None = None
    step_tokens: int | None = None
    weight_rate: float | None = None
    scale_rate: float | None = None
    gain_rate: float = 0.001
    choosing: float = 0.0
    strength: float | None = None
    scale_steps: int | None = None
    between_rate: float = 0.02
    seed: int = 0
    device: str | None = None
    resume: Path | None = None
    spill: Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Options from names and values, which may be strings. Raises OptionError for a bad name or value."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise OptionError(f"option {name!r} is unknown; there are {', '.join(known)}")
            kinds = (known[name].type, *get_args(known[name].type))
            if value is None and NoneType not in kinds:
                raise OptionError(f"option {name} cannot be null: leave it out, and it is {known[name].default!r}")
            kind = next((kind for kind in (int, float, str, Path) if kind in kinds), None)
            try:
                read = None if kind is None else _READERS.get(kind, kind)
                values[name] = value if value is None or read is None else read(value)
            except (TypeError, ValueError, OverflowError):
                wanted = _KINDS.get(kind or Path, "a path")
                raise OptionError(f"option {name} must be {wanted}, not {value!r}") from None
        options = cls(**values)
        if options.start not in (None, "gptq", "nearest"):
            raise OptionError(f"option start must be gptq or nearest, not {options.start!r}")
        for name, (low, high) in _RANGES.items():
            value = getattr(options, name)
            if value is not None and (value < low or (high is not None and value > high)):
                most = "" if high is None else f" and at most {high}"
                raise OptionError(f"option {name} must be at least {low}{most}, not {value}")
        if options.minutes and options.learn_tokens:
            raise OptionError("options minutes and learn_tokens both say how long to learn: give one of them")
        return options

    @property
    def where(self) -> str:
        """The device to work on."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether the work runs on a GPU, whose defaults are larger."""
        return torch.device(self.where).type == "cuda"

    @property
    def calibration_tokens(self) -> int:
        """How many tokens layers are calibrated on."""
        return self.tokens if self.tokens is not None else 32768 if self.on_gpu else 16384

    def learning(self, method: str, scheme: Scheme) -> "Learning | None":
        """How to learn; None for not at all."""
        minutes, tokens = self.minutes or 0.0, self.learn_tokens
        if tokens is None and not minutes and method == "distill":
            minutes, tokens = (20.0, 0) if self.on_gpu else (0.0, 49152)
        elif tokens is None and not minutes and self.on_gpu and scheme.activations.quantized:
            tokens = 1 << 21 if method in ("smooth", "rotate", "smooth_rotate") else 0
        tokens = tokens or 0
        if not (minutes or tokens):
            return None
        usual = 16384 if minutes else 8192
        step = self.step_tokens if self.step_tokens is not None else usual if self.on_gpu else 1024
        few = bool(tokens) and tokens < _FEW_STEPS * step
        weight = self.weight_rate if self.weight_rate is not None else 0.006 if few else 0.002
        scale = self.scale_rate if self.scale_rate is not None else 0.003 if few else 0.001
        generated = self.generated_tokens
        if generated is None and not self.on_gpu:
            generated = 0
        elif generated is None and tokens:
            generated = tokens // 4
        return Learning(minutes, generated, Distillation(
            tokens=tokens, step_tokens=step, rates=Rates(weight, scale, self.gain_rate), choosing=self.choosing,
            half=fast_in_half(self.where), device=self.where, seed=self.seed,
        ))  # fmt: skip

    def scale_learning(self, scheme: Scheme) -> ScaleLearning:
        """Settings for learning scales; 0 steps if they are not learned."""
        usual = 64 if self.on_gpu else 0
        steps = (usual if self.scale_steps is None else self.scale_steps) if scheme.activations.quantized else 0
        half, tokens = fast_in_half(self.where), 8192 if self.on_gpu else 1024
        return ScaleLearning(steps, tokens, self.between_rate, half, device=self.where)


@dataclass(frozen=True, slots=True)
class Learning:
    """A distillation to come. minutes: of the whole run, or 0 if ``settings.tokens`` says how long it takes.

    generated: tokens to generate; None: as many as a quarter of the time allows.
    """

    minutes: float
    generated: int | None
    settings: Distillation
