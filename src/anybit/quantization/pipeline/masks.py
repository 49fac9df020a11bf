"""2:4 masks, before quantization: chosen with error feedback, then learned along with the kept weights.

2:4 pruning loses more accuracy than 4-bit rounding, so masks are learned first, against the unquantized model's
predictions. The result is a 16-bit model, half of whose weights are zero; later quantizers start from these zeros.
GPTQ moves some of them, where its error feedback makes a pruned weight larger than a kept one.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoints.configuration import Quantization
from anybit.codes.packing import QuantizedWeight
from anybit.models.blocks import find_blocks, set_weight
from anybit.quantization.learn.generated import continued
from anybit.quantization.methods import gptq
from anybit.quantization.methods.distill import Distillation, gains_of, learn_masks, shuffled
from anybit.quantization.pipeline.calibrate import Calibration, Statistics, batched, calibrate, fingerprint
from anybit.quantization.pipeline.resume import remembered
from anybit.scheme import Scheme

# The first masks' scheme: beside pruning, 8-bit rounding loses next to nothing.
_START = Scheme.parse("w8a16g64s24")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class SparseModel:
    """A 2:4 sparse, unquantized model.

    model: in float32.  gains: learned gains of its norms, by name.  text: that it learned from.
    """

    model: Any
    gains: dict[str, Tensor]
    text: list[Tensor]


def first_masks(
    model: Any,
    sequences: list[Tensor],
    names: set[str],
    settings: Calibration,
    drift: float,
    progress: Progress | None = None,
) -> dict[str, QuantizedWeight]:
    """The named layers, pruned to 2:4 by SparseGPT and quantized to 8 bits."""

    def quantizer(weight: Tensor, statistics: Statistics, name: str) -> QuantizedWeight:
        return gptq.quantize(statistics.corrected(weight, drift), statistics.hessian, _START.weights, name=name)

    def tell(done: int, total: int, left: float) -> None:
        if progress is not None:
            progress(f"first masks, block {done} of {total}", done, total)

    settings = replace(settings, options={"drift": drift})
    return calibrate(model, sequences, _START, names, quantizer, settings, progress=tell)


def sparse_model(
    model: Any,
    sequences: list[Tensor],
    text: list[Tensor],
    names: set[str],
    learning: Distillation,
    dtype: torch.dtype,
    settings: Calibration,
    generated_tokens: int = 0,
    drift: float = 0.5,
    progress: Progress | None = None,
) -> SparseModel:
    """Make the named layers of a model 2:4 sparse; the model itself, in float32, is not changed.

    sequences: to choose the first masks on, under ``settings``.  text: to learn from, besides ``generated_tokens``
    tokens that the model generates.  dtype: that weights are rounded to.
    """
    settings = replace(settings, resume=None if settings.resume is None else settings.resume / "masks")
    device, (prefix, _) = torch.device(learning.device), find_blocks(model)
    layers = sorted(name for name in names if name.startswith(f"{prefix}."))
    names_of_gains = sorted(gains_of(model)) if learning.gain_rate > 0 else []

    def tell(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)

    def learn() -> list[Tensor]:
        start = first_masks(model, sequences, names, settings, drift, progress)
        if generated_tokens:
            tell(f"generating {generated_tokens} tokens to learn from", 0, 1)
        generated = continued(model, text, generated_tokens, max(map(len, text)), device)
        gains: dict[str, Tensor] = {}
        learned = learn_masks(
            model,
            start,
            shuffled([*text, *generated], 0),
            learning,
            lambda done, total, loss: tell(f"learning masks, KL divergence {loss:.3f} nats", done, total),
            gains,
        )
        weights = [learned[name].to(dtype) for name in layers]
        return [generated, *weights, *(gains[name].to(dtype) for name in names_of_gains)]

    home = model.device
    told: dict[str, object] = {"masks": str(learning), "generated": generated_tokens, "text": sum(map(len, text))}
    whole = replace(settings, options={**told, "drift": drift})
    key = fingerprint(model, batched(sequences, settings.batch_tokens), Quantization(_START), names, whole)
    generated, *tensors = remembered(settings.resume, key, learn)
    model.to(home)
    sparse = copy.deepcopy(model)
    for name, weight in zip(layers, tensors, strict=False):
        set_weight(sparse.get_submodule(name), weight.float())
    gains = dict(zip(names_of_gains, tensors[len(layers) :], strict=True))
    for name, gain in gains.items():
        sparse.get_parameter(name).data = gain.float()
    return SparseModel(sparse, gains, shuffled([*text, *generated], 0))
