"""Perplexity over fixed windows of a text, and agreement with a baseline model."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from anybit.errors import TextError
from anybit.hf.cache_name import CACHE
from anybit.layers.linear import QuantLinear
from anybit.models.families import EXPERTS
from anybit.quantization.learn.generated import written
from anybit.quantization.pipeline.text import read_text as read_text

# Apart from the seeds of methods, which learn from text by the same writer.
_SEED = 1 << 40

Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity, and everything the figure depends on.

    perplexity: exp of the mean negative log likelihood (nats) over ``scored`` tokens: all but the first of each window.
    bos: whether every window begins with the BOS token, in addition to its text.
    """

    perplexity: float
    windows: int
    context: int
    bos: bool
    scored: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often two models predict the same next token, and how far apart their distributions are.

    same: share of positions with the same top-1 token.  divergence: mean KL(baseline || model), nats.  Their standard
    errors are over windows, which differ as much as those of other seeds do; None of one window.
    """

    same: float
    divergence: float
    positions: int
    same_error: float | None
    divergence_error: float | None


def windows_of(ids: Sequence[int], context: int, windows: int | None = None, bos: int | None = None) -> Tensor:
    """Cut token ids into consecutive windows of ``context`` tokens, int64 [windows, context]; the remainder is dropped.

    bos: a token to prepend to every window, which then holds context - 1 tokens of text.
    Raises TextError for a text shorter than one window, or than ``windows`` of them.
    """
    if context < 2:
        raise TextError(f"a window needs at least 2 tokens, to predict one from another, not {context}")
    length = context - (bos is not None)
    available = len(ids) // length
    if available < max(windows or 1, 1):
        wanted = f"{windows} windows" if windows else "one window"
        raise TextError(f"the text has {len(ids)} tokens, and {wanted} of {length} need {length * (windows or 1)}")
    count = windows or available
    cut = torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length)
    return cut if bos is None else torch.cat([torch.full((count, 1), bos), cut], dim=1)


def windows_written_by(model: PreTrainedModel, windows: int, context: int, seed: int = 0) -> Tensor:
    """Text that a causal language model writes itself from BOS, int64 [windows, context]; no method has seen it.

    Raises TextError if its config.json names no BOS token.
    """
    parts = written(model, [], windows * context, context, model.device, _SEED + seed)
    return torch.cat(list(parts))


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    bos: bool = False,
    progress: Progress | None = None,
    cache: Callable[[], Cache] | None = None,
    chunk: int = 32,
) -> Perplexity:
    """Perplexity of a causal language model over windows of token ids, int64 [W, T], one window at a time.

    bos: whether windows begin with a BOS token; only recorded in the result. progress: called with windows done and in
    all. cache: makes a KV cache per window, which then runs ``chunk`` tokens at a time, so that later ones attend over
    quantized keys and values; without it a window runs at once, over unquantized ones.
    """
    start = time.perf_counter()
    total, scored = 0.0, 0
    for i, window in enumerate(windows):
        logits = _logits(model, window, cache, chunk)
        loss = nn.functional.cross_entropy(logits[:-1], window[1:].to(logits.device), reduction="sum")
        total += float(loss)
        scored += len(window) - 1
        if progress is not None:
            progress(i + 1, len(windows))
    mean = total / scored
    value = math.inf if mean >= 700 else math.exp(mean)  # the exp of NaN is NaN
    return Perplexity(value, len(windows), windows.shape[1], bos, scored, time.perf_counter() - start)


@torch.inference_mode()
def agreement(
    model: PreTrainedModel,
    baseline: PreTrainedModel,
    windows: Tensor,
    progress: Progress | None = None,
    cache: Callable[[], Cache] | None = None,
    baseline_cache: Callable[[], Cache] | None = None,
    chunk: int = 32,
) -> Agreement:
    """Compare a model with a baseline of the same vocabulary on windows of token ids, int64 [W, T].

    Every position counts. cache, baseline_cache, chunk, progress: as in ``perplexity``.
    """
    found = torch.empty(2, len(windows), dtype=torch.float64)
    for i, window in enumerate(windows):
        ours = _logits(model, window, cache, chunk).log_softmax(-1)
        theirs = _logits(baseline, window, baseline_cache, chunk).log_softmax(-1).to(ours.device)
        found[0, i] = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
        found[1, i] = nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True) / len(window)
        if progress is not None:
            progress(i + 1, len(windows))
    same, divergence = found.mean(1).tolist()
    errors = (found.std(1) / len(windows) ** 0.5).tolist() if len(windows) > 1 else (None, None)
    return Agreement(same, divergence, windows.numel(), *errors)


def bits_per_weight(model: nn.Module) -> float:
    """Bits per weight of the quantized layers, including scales and zeros; of all Linears if none is quantized.

    Experts stored as one tensor are not quantized, and are counted.

    Scales and unquantized weights count 16 bits even if the model runs in float32, as on a CPU: a checkpoint usually
    stores 16.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    plain = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    if layers:
        plain = [tensor for name, tensor in model.named_parameters() if EXPERTS.search(name) and tensor.ndim > 2]
    count = sum(weight.numel() for weight in plain)
    bits = sum(min(8 * weight.element_size(), 16) * weight.numel() for weight in plain) + 0.0
    for layer in layers:
        codes = layer.quantized_weight()
        count += layer.in_features * layer.out_features
        bits += codes.bits_per_weight * layer.in_features * layer.out_features
        bits -= codes.scale.numel() * (8 * codes.scale.element_size() - 16)
    return bits / count if count else math.nan


def _logits(model: PreTrainedModel, window: Tensor, cache: Callable[[], Cache] | None, chunk: int) -> Tensor:
    """Logits float32 [T, vocabulary] of a window int64 [T]: in one pass, or ``chunk`` tokens at a time over a cache."""
    ids = window[None].to(model.device)
    if cache is None:
        logits: Tensor = model(ids, use_cache=False).logits[0]
        return logits.float()
    kept = cache()
    parts = [model(part, use_cache=True, **{CACHE: kept}).logits[0].float() for part in ids.split(chunk, dim=1)]
    return torch.cat(parts)
