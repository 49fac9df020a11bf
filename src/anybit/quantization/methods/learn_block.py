"""Learning block by block, for models too large to learn as a whole, after BRECQ (Li et al., 2021).

A block's weights learn to give what the block gave in the 16-bit model, from inputs that the quantized blocks before it
give. The error is relative to each token, as the norms that follow see it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight
from anybit.models.blocks import weight_of
from anybit.quantization.learn.latent import banks
from anybit.quantization.learn.loop import Course, Progress, learn
from anybit.quantization.learn.student import student_of
from anybit.quantization.methods.distill import Distillation
from anybit.quantization.pipeline.blocks import Examples, run_block
from anybit.scheme import Scheme


@torch.enable_grad()
def learn_block(
    block: nn.Module,
    weights: Mapping[str, QuantizedWeight],
    examples: Examples,
    scheme_of: Callable[[str], Scheme],
    settings: Distillation,
    course: Course,
    progress: Progress | None = None,
) -> dict[str, QuantizedWeight]:
    """Learn the quantized weights of a block, which is not changed; its norms and biases stay as they are.

    block: with its original weights.  weights: the start, by name in the block.  scheme_of: the scheme of such a layer;
    "" for the whole model's.  settings: all but tokens and seconds, which are the course's.
    Raises CalibrationError if the error is not finite.
    """
    device, kind = next(block.parameters()).device, torch.bfloat16 if settings.half else torch.float32
    start = {name: weight.to(device) for name, weight in weights.items()}
    nested = {scheme_of("").weights: settings.nested}
    learned = banks(start, lambda name: weight_of(block.get_submodule(name)), kind, torch.float32, nested=nested)
    leaves = {name: leaf for bank in learned for name, leaf in bank.leaves.items()}
    student = student_of(block, leaves, lambda name: scheme_of(name).activations, scheme_of("").kv)
    for bank in learned:
        bank.refresh()

    def gradient(index: int) -> tuple[float, int]:
        x, wanted = (stream[index].to(device) for stream in (examples.inputs, examples.outputs))
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.half, cache_enabled=False):
            found = run_block(student, x, examples.calls[index])
        error = relative_error(found.float(), wanted.float())
        error.backward()
        return float(error.detach()), x.shape[:-1].numel()

    def update(rate: float) -> None:
        for bank in learned:
            bank.step(settings.rates.times(rate), course.step + 1, course.done < settings.choosing)

    learn(gradient, shuffled(len(examples.calls), settings.seed), course, update, progress)
    return {name: weight for bank in learned for name, weight in bank.harden().items()}


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean over tokens of |found - wanted|^2 / |wanted|^2, of vectors [..., K]: float32 []."""
    sizes = wanted.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found - wanted).square().sum(-1) / sizes).mean()


def shuffled(count: int, seed: int) -> Iterator[int]:
    """The numbers below ``count``, again and again, each time in another order."""
    for epoch in itertools.count(seed):
        yield from torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
