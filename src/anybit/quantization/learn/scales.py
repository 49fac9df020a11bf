"""Learn smoothing scales end to end under quantized activations: OmniQuant's learnable equivalent transformation, but
against the model's predictions instead of a block's output.

Every layer's input goes through ``x -> s * R^T Q(R (x / s))`` with rounding Q, rotation R (or none) and learnable
scales s; without Q this is the identity. Gradients pass Q as in ``learn.rounding``. ``scaling_pairs.put_scales`` then
folds the scales into the model's scaling pairs, which leaves its function unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anybit.codes import hadamard
from anybit.models.llama_block import llama_blocks
from anybit.quantization.learn.adam import Adam
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.loop import Course, Progress, learn, steps_of
from anybit.quantization.learn.norms import fuse_norms
from anybit.quantization.learn.rounding import RoundedThrough, Shared
from anybit.quantization.learn.student import GivenLinear, placed
from anybit.quantization.methods.scaling_pairs import ScalingPair, scaling_pairs
from anybit.scheme import ActivationFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ScaleLearning:
    """How to learn scales. rate: Adam's learning rate of the scales' logarithms.  half: run in bfloat16."""

    steps: int = 64
    step_tokens: int = 8192
    rate: float = 0.02
    half: bool = True
    device: torch.device | str = "cpu"


class _ScaledRounding:
    """The forward pre-hook of a scaling pair's readers, with learnable scales."""

    def __init__(self, pair: ScalingPair, log_scale: nn.Parameter, format: ActivationFormat, rotated: bool) -> None:
        self.pair, self.log_scale, self.format, self.rotated = pair, log_scale, format, rotated

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        scale = self.pair.read(self.log_scale.exp()).to(x.dtype)
        y = x / scale
        if self.rotated:
            y = hadamard.transform(y)
        y: Tensor = RoundedThrough.apply(y, self.format)  # type: ignore[no-untyped-call,no-redef]
        if self.rotated:
            y = hadamard.inverse(y)
        return (y * scale, *args[1:])


@torch.enable_grad()
def learn_scales(
    model: "PreTrainedModel",
    sequences: Sequence[Tensor],
    activations: ActivationFormat,
    rotated: bool = False,
    settings: ScaleLearning | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Learn scales for every scaling pair of a Llama-like model, float32 [channels] each, for ``put_scales``.

    sequences: token ids, any lengths.  rotated: whether layers will rotate their inputs before rounding.
    The model is not changed. Raises CalibrationError if the loss is not finite, LayerError for an architecture that is
    not Llama-like.
    """
    settings = settings or ScaleLearning()
    teacher = placed(model, torch.device(settings.device), torch.bfloat16 if settings.half else None)
    student = placed(teacher, teacher.device)
    log_scales: list[nn.Parameter] = []
    for part in list(llama_blocks(student)):
        for pair in scaling_pairs(part):
            log_scale = nn.Parameter(torch.zeros(pair.channels, device=teacher.device))
            log_scale.grad = torch.zeros_like(log_scale)
            log_scales.append(log_scale)
            hook = Shared([_ScaledRounding(pair, log_scale, activations, rotated)])
            for name, reader in pair.readers.items():
                layer = GivenLinear(reader.weight.data, reader.bias)
                layer.register_forward_pre_hook(hook)
                student.set_submodule(name, layer, strict=False)
    if teacher.device.type == "cuda":
        fuse_norms(student)
    moving = [Adam.of(log_scale.data) for log_scale in log_scales]
    course = Course(settings.steps)

    def update(rate: float) -> None:
        for log_scale, adam in zip(log_scales, moving, strict=True):
            assert log_scale.grad is not None
            adam.step(log_scale.grad, settings.rate * rate, course.step + 1)
            log_scale.grad.zero_()

    gradient = KLGradient(teacher, student, settings.step_tokens, settings.half)
    learn(gradient, steps_of(sequences, settings.step_tokens), course, update, progress)
    # Remove the common factor, which per-token activation scales absorb.
    found = [log_scale.detach().cpu() for log_scale in log_scales]
    return [(log_scale - log_scale.mean()).exp() for log_scale in found]
