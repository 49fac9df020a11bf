"""The calibrated methods behind ``anybit quantize``: calibrate on a text, block by block, quantize, learn, save.

    gptq           error feedback, block by block
    distill        rounding (2:4: gptq), then weights, scales, zeros and norms learned end to end; to activations of 4
                   bits and fewer of a model that smooth_rotate can change, after this
    smooth         SmoothQuant: activation outliers move into the weights, then gptq
    rotate         QuaRot: a Hadamard rotation spreads outliers, then gptq
    smooth_rotate  smoothing and an online rotation of every layer's input, then gptq

``minutes`` or ``learn_tokens`` add learning to any of them; the last three learn by default on a GPU, if activations
are quantized. Learning, and text that the model writes, take the whole model into memory; models that are too large for
that learn block by block.
"""

import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anybit.checkpoints.configuration import Quantization
from anybit.checkpoints.folder import without_tokenizer
from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError, OptionError, TextError
from anybit.models.modules import LinearLayer, check_tokens, last_position, tied_heads
from anybit.quantization.learn.generated import written
from anybit.quantization.learn.scales import learn_scales
from anybit.quantization.methods import gptq
from anybit.quantization.methods.distill import Learned, distill, why_not
from anybit.quantization.methods.learn_block import learn_block
from anybit.quantization.methods.rotate import rotate
from anybit.quantization.methods.scaling_pairs import put_scales
from anybit.quantization.methods.smooth import smooth
from anybit.quantization.methods.smooth_rotate import readers_of, smooth_rotate
from anybit.quantization.pipeline.blocks import Examples
from anybit.quantization.pipeline.calibrate import (
    BlockLearner,
    Calibration,
    Statistics,
    batched,
    calibrate,
    fingerprint,
)
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.quantization.pipeline.options import Learning, Options
from anybit.quantization.pipeline.resume import SavedState, make_folder, remembered
from anybit.quantization.pipeline.stream import Changes, Job, Saved, silent, write_quantized
from anybit.quantization.pipeline.text import checked_sequences, read_sequences, read_text, tokenized
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEARNED = 1 << 20
"""Tokens of a text that learning uses at most."""
_WRITING, _WRITTEN = 3.0, 1e8
"""Seconds to write a folder, and weights written per second beyond these."""
_ROTATED = 4
"""Most bits of activations whose layers' inputs ``distill`` smooths and rotates first."""
_LONGER = 4
"""How many times as much text as layers are calibrated on blocks learn from, if there is so much."""
_SAME = 0.05
"""The largest relative change of logits by a transformation that should not change the model's function."""


def run(job: Job) -> Saved:
    """Run a job by one of the methods above. Raises CalibrationError, OptionError or TextError."""
    method, options = job.method, Options.of(job.options)
    learning = options.learning(method, job.scheme)
    # The text first: it is cheaper to check than the model.
    writes = method == "distill" and options.text is None and options.sequences is None
    text: list[Tensor] = []
    if not writes:
        text = sequences_of(job, options, _LEARNED if learning is not None else options.calibration_tokens)
    if options.resume is not None:
        make_folder(options.resume)
    if options.spill is not None:
        make_folder(options.spill, "spill", "activations")
    model = LazyModel.of(job)
    apart = learning if too_large(job) is not None else None
    if apart is not None:
        learning, scales = None, options.scale_steps or 0  # which learn on the whole model
        options = replace(options, scale_steps=scales, tokens=options.tokens or _LONGER * options.calibration_tokens)
    elif learning is not None:
        model.whole()
    if writes:
        text = _generated(job, model, [], options, "start", options.calibration_tokens)
    used = first_of(text, options.calibration_tokens)
    if apart is not None and options.generated_tokens:
        used += _generated(job, model, used, options, "generated", options.generated_tokens)
    changes = _prepare(job, model, method, text, options)
    # In minutes the start is forgotten, all but masks, and GPTQ knows nothing of slices.
    brief = learning is None or not learning.minutes or job.scheme.weights.sparse or method != "distill"
    start = options.start or ("nearest" if not brief or ((learning or apart) and job.nested) else "gptq")
    options = replace(options, start=start)
    told: dict[str, float] = {}
    if start == "nearest" and apart is None:
        weights = _nearest(job, model, {}, options)
    else:
        weights = _calibrated(job, model, used, options, apart, told)
    if learning is not None:
        learned, told = _learned(job, model, weights, text, [] if writes else text, options, learning)
        weights = learned.weights
        changes = replace(changes, tensors={**changes.tensors, **learned.gains})
    scattered = any(weight.group_index is not None for weight in weights.values())

    def quantize(layer: LinearLayer, source: Tensor) -> QuantizedWeight:
        weight = weights.get(layer.name)
        if weight is None:
            # No statistics are collected outside the blocks: round to nearest.
            own = changes.tensors.get(f"{layer.name}.weight", source).to(source.dtype)
            weight = quantize_weight(own, job.scheme_of(layer.name).weights)
        return weight.with_group_index() if scattered and weight.group_index is None else weight

    # Writing is fast beside calibration: it reports no progress.
    saved = write_quantized(replace(job, progress=silent), quantize, changes)
    return replace(saved, learned={name: round(value, 1) for name, value in told.items()})


def _nearest(
    job: Job, model: LazyModel, weights: dict[str, QuantizedWeight], options: Options
) -> dict[str, QuantizedWeight]:
    """Weights, and all layers and embeddings that have none yet rounded to nearest."""
    kind, found = job.scale_dtype, dict(weights)
    for layer in (*job.layers, *job.embeddings):
        if layer.name not in weights:
            own = model.weight(layer.name).to(options.where)
            format = job.scheme_of(layer.name).weights
            nested = job.nested if format == job.scheme.weights else ()
            found[layer.name] = gptq.nearest(own, format, kind, layer.name, nested).to("cpu")
    return found


def too_large(job: Job) -> str | None:
    """Why a job that learns cannot learn all weights at once, or None."""
    options, learned = Options.of(job.options), sum(layer.n * layer.k for layer in (*job.layers, *job.embeddings))
    return None if options.learning(job.method, job.scheme) is None else why_not(job.model, learned, options.where)


def can_write(job: Job) -> bool:
    """Whether the model of a job that needs a text can write it on the device: as float32, before it is halved."""
    return job.method == "distill" and why_not(job.model, 0, Options.of(job.options).where) is None


def _calibrated(
    job: Job, model: LazyModel, text: list[Tensor], options: Options, learning: Learning | None, told: dict[str, float]
) -> dict[str, QuantizedWeight]:
    """The layers inside the blocks, by GPTQ; then each block learns, if that is asked for, of which ``told`` tells."""
    kind = job.scale_dtype
    settings = gptq.GPTQ(options.order, options.damping, passes=options.passes, scale_dtype=kind)  # type: ignore[arg-type]

    def quantizer(weight: Tensor, statistics: Statistics | None, name: str) -> QuantizedWeight:
        format = job.scheme_of(name.partition(", ")[0]).weights
        if options.start == "nearest":
            return gptq.nearest(weight, format, kind, name, job.nested if format == job.scheme.weights else ())
        if statistics is None:
            gptq.check_finite(weight, f"the weights of {name}")
            return quantize_weight(weight.to(kind), format)
        weight = statistics.corrected(weight, options.drift)
        return gptq.quantize(weight, statistics.hessian, format, settings, name)

    def tell(done: int, total: int) -> None:
        job.progress(f"block {done} of {total}", done, total)

    calibration = Calibration(
        drift=options.drift > 0 or learning is not None,
        device=options.where,
        resume=options.resume,
        spill=options.spill,
        # Less would leave a GPU launch-bound.
        batch_tokens=learning.settings.step_tokens if learning else 16384 if options.on_gpu else 4096,
        learn=_in_blocks(job, model, options, learning, told) if learning else None,
        # Not the method: methods that calibrate alike share finished blocks.
        options={"gptq": str(settings), "drift": options.drift, "start": options.start, "learning": str(learning)},
    )
    names = {layer.name for layer in job.layers}
    return calibrate(model, text, job.scheme, names, quantizer, calibration, tell, job.overrides)


def _in_blocks(
    job: Job, model: LazyModel, options: Options, learning: Learning, told: dict[str, float]
) -> BlockLearner:
    """Learn each block in its share of the job's minutes, or from as many tokens as are asked for."""
    count, settings = len(model.blocks), replace(learning.settings, nested=job.nested)
    told |= {"tokens": 0, "seconds": 0.0, "seconds_starting": 0.0, "tokens_written": 0, "seconds_writing": 0.0}
    began = time.perf_counter()

    def learn(
        index: int, block: nn.Module, weights: dict[str, QuantizedWeight], examples: Examples
    ) -> dict[str, QuantizedWeight]:
        course, prefix = settings.course, f"{model.prefix}.{index}."
        if learning.minutes:
            rest = (time.perf_counter() - began - told["seconds"]) / (index + 1)  # seconds a block of all else
            course.seconds = max((_left(job, learning) - rest * (count - 1 - index)) / (count - index), 1.0)

        def tell(done: int, total: int, loss: float) -> None:
            job.progress(f"block {index + 1} of {count}, learning: error {loss:.2%}", index, count)

        def scheme_of(name: str) -> Scheme:
            return job.scheme_of(prefix + name) if name else job.scheme

        inside = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        found = learn_block(block, inside, examples, scheme_of, settings, course, tell)
        told["tokens"] = max(told["tokens"], course.tokens)
        told["seconds"] += course.elapsed
        return {prefix + name: weight for name, weight in found.items()}

    return learn


def _left(job: Job, learning: Learning) -> float:
    """The seconds left of a job's minutes, without those that writing the result may take."""
    writing = _WRITING + sum(layer.n * layer.k for layer in job.layers) / _WRITTEN
    return 60 * learning.minutes - (time.perf_counter() - job.began) - writing


def _learned(
    job: Job,
    model: LazyModel,
    weights: dict[str, QuantizedWeight],
    text: list[Tensor],
    starts: list[Tensor],
    options: Options,
    learning: Learning,
) -> tuple[Learned, dict[str, float]]:
    """Distill, within the job's minutes, on a text and on what the model writes from pieces of ``starts``.

    Returns figures of how it went, too.

    Layers outside the blocks, such as the head, start rounded to nearest.
    """
    weights = _nearest(job, model, weights, options)
    share = _left(job, learning) / 4 if learning.generated is None else math.inf
    began = time.monotonic()
    generated = _generated(job, model, starts, options, "generated", learning.generated, share)
    writing = time.monotonic() - began
    settings = replace(learning.settings, nested=job.nested)
    if learning.minutes:
        settings = replace(settings, seconds=max(_left(job, learning), 1.0))
    full = [sequence for sequence in text if len(sequence) == options.length]
    if 10 * sum(map(len, full)) > 9 * sum(map(len, text)):
        text = full  # every step has the same shape, and is replayed as one CUDA graph
    repeats = max(sum(map(len, generated)) // (4 * sum(map(len, text))), 1)
    told = {"learning": str(learning), "text": sum(map(len, text)), "start": options.start, "nested": job.nested}
    saved = _saved(job, model, options, "learning", text, told)

    def tell(done: int, total: int, loss: float) -> None:
        job.progress(f"learning, KL divergence {loss:.3f} nats", done, total)

    def scheme_of(name: str) -> Scheme:
        return job.scheme_of(name) if name else job.scheme

    found = distill(model.whole(), weights, [*generated, *text * repeats], scheme_of, settings, tell, saved)
    course, count = found.course, sum(map(len, generated))
    return found, {
        "tokens": course.tokens,
        "seconds": course.elapsed,
        "seconds_starting": course.starting,
        "tokens_written": count,
        "seconds_writing": writing,
    }


def _generated(
    job: Job,
    model: LazyModel,
    text: list[Tensor],
    options: Options,
    name: str,
    tokens: int | None,
    seconds: float = math.inf,
) -> list[Tensor]:
    """Text that the model continues from pieces of ``text``: so many tokens, or as many as it writes in some seconds.

    name: of the file that keeps it in the resume folder.
    """

    def tell(done: int) -> None:
        job.progress(f"generating text, {done} tokens so far", 0, 1)

    def write() -> list[Tensor]:
        began, rows = time.monotonic(), []
        tell(0)
        most = 1 << 40 if tokens is None else max(tokens, options.length)
        for part in written(model.whole(), text, most, options.length, torch.device(options.where), options.seed):
            rows.append(part)
            tell(sum(part.numel() for part in rows))
            spent = time.monotonic() - began
            if spent * (1 + 0.5 / len(rows)) > seconds:
                break
        return [torch.cat(rows)]

    if tokens == 0:
        return []
    told = {"tokens": tokens, "length": options.length, "seed": options.seed}
    return list(remembered(_saved(job, model, options, name, text, told), write)[0])


def _saved(
    job: Job, model: LazyModel, options: Options, name: str, text: list[Tensor], told: object
) -> SavedState | None:
    """A file of the resume folder, if there is one, for what a model, a text and what is told determine."""
    if options.resume is None:
        return None
    schemes = Quantization(job.scheme, overrides=job.overrides)
    return SavedState(options.resume, name, fingerprint(model, text, schemes, told))


def _prepare(job: Job, lazy: LazyModel, method: str, sequences: list[Tensor], options: Options) -> Changes:
    """Smooth or rotate the model, or both; returns what that changes about the checkpoint."""
    if method == "distill" and job.scheme.activations.bits <= _ROTATED:
        method = _first_changed(job, lazy.model)
    if method not in ("smooth", "rotate", "smooth_rotate"):
        return Changes()
    settings = options.scale_learning(job.scheme)
    if settings.steps:
        lazy.whole()  # now rather than later
    layers = {layer.name for layer in job.layers}
    home = lazy.device
    lazy.to(_device_with_room(options.where, lazy.model))
    hadamard: list[str] = []
    config: dict[str, object] = {}
    batches = batched(first_of(sequences, options.calibration_tokens), 4096)
    before = _logits(lazy, batches[0])

    def improve() -> None:
        if not settings.steps:
            return
        told = {"scales": str(settings), "tokens": sum(map(len, sequences))}
        rotated = method == "smooth_rotate"

        def learn() -> list[Tensor]:
            return learn_scales(lazy.whole(), sequences, job.scheme.activations, rotated, settings, tell)

        # A resumed run takes learned scales from the resume folder.
        put_scales(lazy, remembered(_saved(job, lazy, options, "before", batches, told), learn))

    def tell(done: int, total: int, loss: float) -> None:
        job.progress(f"learning scales, KL divergence {loss:.3f} nats", done, total)

    if method == "smooth":
        smooth(lazy, batches, options.strength, job.scheme)
        improve()
    elif method == "smooth_rotate":
        strength = 0.5 if options.strength is None else options.strength
        hadamard = smooth_rotate(lazy, batches, strength, options.seed, improve, layers)
    else:
        hadamard = rotate(lazy, options.seed, quantized=layers)
        config = {"tie_word_embeddings": False}
    # A block with Llama's parts may still compute something else: other gains, gates, norms in between.
    size = float(before.norm())
    apart = float((_logits(lazy, batches[0]) - before).norm()) / (size or 1.0)
    if 0 < size < math.inf and not apart < _SAME:
        raise LayerError(
            f"{type(lazy.model).__name__} does not support method {method}: its logits changed by {apart:.0%}, and "
            "must not change; use gptq"
        )
    heads = {f"{head}.weight": weight for head, weight in tied_heads(job.model).items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in lazy.parameters():
        # Of the quantized layers only those outside the blocks are still needed.
        inside = name.startswith(f"{lazy.prefix}.") and name.removesuffix(".weight") in layers
        if not inside and (name in job.names or method == "rotate"):
            # In the source's dtype; an untied head in its embedding's.
            own = job.names.get(heads.get(name, name))
            tensors[name] = tensor.to(home, job.source.entries[own].dtype if own else job.source.dtype)
    lazy.to(home)
    return Changes(tensors, config, hadamard)


def _first_changed(job: Job, model: "PreTrainedModel") -> str:
    """``smooth_rotate``, or ``distill`` for a model that this cannot change."""
    try:
        readers_of(model)
    except LayerError as error:
        bits = job.scheme.activations.bits
        warnings.warn(f"distill rotates nothing, and loses more to {bits}-bit activations: {error}", stacklevel=2)
        return "distill"
    return "smooth_rotate"


@torch.no_grad()
def _logits(lazy: LazyModel, batch: Tensor) -> Tensor:
    """The logits of the first tokens of a batch."""
    with lazy.running() as model:
        found: Tensor = model(input_ids=batch[:1, :64].to(lazy.device), use_cache=False).logits.float()
    return found


def _device_with_room(device: str, model: "PreTrainedModel") -> torch.device:
    """The device if what is in memory of a model fits there with room to run, else the model's own."""
    if torch.device(device).type != "cuda":
        return torch.device(device)
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return torch.device(device) if 2 * needed < free else torch.device(model.device)


def sequences_of(job: Job, options: Options, tokens: int) -> list[Tensor]:
    """The text of a job as non-empty sequences of token ids, int64 [T]: at least ``tokens`` tokens, if available.

    Raises TextError for a sequence longer than the model's position table, if it has one.
    """
    vocabulary = int(job.model.config.get_text_config(decoder=True).vocab_size)
    last = last_position(job.model.config)
    if options.sequences is not None:
        found = checked_sequences(options.sequences, vocabulary)
    elif options.text is None:
        raise TextError(f"method {job.method} calibrates on a text: name one with --text, or use method rtn")
    elif options.text.suffix == ".json":
        found = read_sequences(options.text, vocabulary)
    else:
        length = options.length if last is None else min(options.length, last)
        if length < options.length and "length" in job.options:
            raise OptionError(
                f"option length must be at most {last}, the positions of this model, not {options.length}"
            )
        found = _tokens_of_text(job, options.text, length, tokens)
    for i, sequence in enumerate(found):
        if last is not None and len(sequence) > last:
            raise TextError(
                f"sequence {i} has {len(sequence)} tokens, but this model has only {last} positions: shorten it"
            )
    return [sequence for sequence in found if len(sequence)]


def _tokens_of_text(job: Job, file: Path, length: int, tokens: int) -> list[Tensor]:
    text = read_text(file)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(job.source.path, trust_remote_code=job.source.trust_remote_code)
        # Tokens are a few characters each: do not tokenize far more text than needed.
        found = tokenized(text[: 16 * tokens], tokenizer, length, tokens)
    except MemoryError:
        raise
    except Exception as error:  # a damaged tokenizer can fail in any way
        raise without_tokenizer(job.source.path, error) from error
    for sequence in found:
        check_tokens(job.model, sequence, job.source.path)
    return found


def first_of(sequences: list[Tensor], tokens: int) -> list[Tensor]:
    """The first sequences, up to ``tokens`` tokens in all; the last one may be cut."""
    chosen: list[Tensor] = []
    for sequence in sequences:
        if tokens <= 0:
            break
        chosen.append(sequence[:tokens])
        tokens -= len(chosen[-1])
    return chosen
