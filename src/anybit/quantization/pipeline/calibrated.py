"""The calibrated methods behind ``anybit quantize``: load the model, calibrate on a text, quantize, save.

    gptq           error feedback, block by block
    blockwise      gptq, then rounding and scales learned block by block
    distill        gptq, then rounding and scales learned end to end
    smooth         SmoothQuant: activation outliers move into the weights, then gptq
    rotate         QuaRot: a Hadamard rotation spreads outliers, then gptq
    smooth_rotate  smoothing and an online rotation of every layer's input, then gptq

``block_passes`` or ``learn_tokens`` add learning to any of them; the last three learn by default on a GPU, if
activations are quantized.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch
from torch import Tensor

from anybit.checkpoints.configuration import Quantization
from anybit.checkpoints.folder import without_tokenizer
from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import CheckpointError, LayerError, OptionError, TextError, one_line
from anybit.models.blocks import find_blocks
from anybit.models.modules import LinearLayer, auto_class, check_tokens, last_position, tied_heads, without_rescaling
from anybit.quantization.learn.kl_gradient import fast_in_half
from anybit.quantization.learn.scales import ScaleLearning, learn_scales, put_scales
from anybit.quantization.methods import gptq
from anybit.quantization.methods.blockwise import BlockLearning
from anybit.quantization.methods.distill import Distillation, distill
from anybit.quantization.methods.rotate import rotate
from anybit.quantization.methods.smooth import smooth
from anybit.quantization.methods.smooth_rotate import smooth_rotate
from anybit.quantization.pipeline.calibrate import (
    Calibration,
    Statistics,
    batched,
    calibrate,
    checked_sequences,
    fingerprint,
    read_sequences,
    read_text,
    tokenized,
)
from anybit.quantization.pipeline.masks import sparse_model
from anybit.quantization.pipeline.resume import make_folder, remembered
from anybit.quantization.pipeline.stream import Changes, Job, Saved, write_quantized
from anybit.scheme import Scheme


def _as_bool(value: object) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


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


_READERS: dict[type, Callable[[Any], object]] = {bool: _as_bool, int: _as_int, float: _as_float}
_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a finite number"}
_AT_LEAST_0 = (
    *("block_passes", "learn_tokens", "learn_passes", "place_rate", "scale_rate", "gain_rate", "mask_passes"),
    *("weight_rate", "generated_tokens", "scale_steps", "between_rate"),
)
_RANGES: dict[str, tuple[int, int | None]] = {
    "tokens": (1, None),
    "length": (2, None),
    "step_tokens": (1, None),
    "seed": (0, 2**64 - 1),
    **dict.fromkeys(("drift", "strength", "choosing", "decay"), (0, 1)),
    **dict.fromkeys(_AT_LEAST_0, (0, None)),
}
"""The least and greatest values of options."""
_SAME = 0.05
"""The largest relative change of logits by a transformation that should not change the model's function."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the calibrated methods.

    text: a file to calibrate on; a .json file holds lists of token ids.  sequences: the same, as Python lists.
    tokens: how many to calibrate on, in sequences of ``length`` (default 16384; on a GPU 32768, or 131072 if blocks
    learn).
    start: how codes start: "gptq", or "nearest", which rounds the (corrected) weights to nearest.
    drift: how far each layer corrects earlier layers' errors, from 0 (plain GPTQ) to 1.
    order, damping, passes: see ``gptq.GPTQ``.  block_passes: passes over the text that train each block against its
    original output (``methods.blockwise``).  learn_tokens: tokens to distill on.  learn_passes, step_tokens,
    place_rate, scale_rate, gain_rate: see ``methods.distill``.  ``learning`` chooses for None.
    mask_passes: passes over the text in which ``distill`` first learns 2:4 masks and the weights they keep
    (``pipeline.masks``); 0 keeps gptq's masks.  weight_rate, choosing, decay: see ``methods.distill``.
    generated_tokens: text that the model generates to learn 2:4 masks from; None is 2^20 on a GPU, else 0.
    strength: smoothing's exponent; None chooses it per scaling pair (0.5 if a rotation follows).
    scale_steps, between_rate: steps and learning rate to train these scales (``learn.scales``); None is 64 steps on a
    GPU, else 0.
    seed: of the rotation.
    mix_heads: also rotate attention's output across heads, at run time.
    device: to work on; None takes a GPU if there is one.
    resume: a folder for finished blocks.  spill: a folder for activations beyond the memory budget.
    """

    text: Path | None = None
    sequences: list[list[int]] | None = None
    tokens: int | None = None
    length: int = 512
    start: str = "gptq"
    drift: float = 0.5
    order: str = "grouped"
    damping: float = 0.01
    passes: int = 3
    block_passes: int | None = None
    learn_tokens: int | None = None
    learn_passes: float | None = None
    step_tokens: int | None = None
    place_rate: float = 0.006
    scale_rate: float = 0.003
    gain_rate: float | None = None
    mask_passes: float | None = None
    weight_rate: float = 0.003
    choosing: float = 0.0
    decay: float = 0.0
    generated_tokens: int | None = None
    strength: float | None = None
    scale_steps: int | None = None
    between_rate: float = 0.02
    seed: int = 0
    mix_heads: bool = False
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
            kind = next((kind for kind in (bool, int, float, str, Path) if kind in kinds), None)
            try:
                read = None if kind is None else _READERS.get(kind, kind)
                values[name] = value if value is None or read is None else read(value)
            except (TypeError, ValueError, KeyError, OverflowError):
                wanted = _KINDS.get(kind or Path, "a path")
                raise OptionError(f"option {name} must be {wanted}, not {value!r}") from None
        options = cls(**values)
        if options.start not in ("gptq", "nearest"):
            raise OptionError(f"option start must be gptq or nearest, not {options.start!r}")
        for name, (low, high) in _RANGES.items():
            value = getattr(options, name)
            if value is not None and (value < low or (high is not None and value > high)):
                most = "" if high is None else f" and at most {high}"
                raise OptionError(f"option {name} must be at least {low}{most}, not {value}")
        return options

    @property
    def where(self) -> str:
        """The device to work on."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def calibration_tokens(self) -> int:
        """How many tokens layers are calibrated on."""
        usual = (131072 if self.block_passes else 32768) if self.on_gpu else 16384
        return self.tokens if self.tokens is not None else usual

    @property
    def on_gpu(self) -> bool:
        """Whether the work runs on a GPU, whose defaults are larger."""
        return torch.device(self.where).type == "cuda"

    def learning(self, method: str, scheme: Scheme) -> tuple[int, Distillation]:
        """(tokens to distill on, settings); 0 tokens for no distillation.

        ``distill`` always learns. On a GPU, where it takes seconds, so do smoothing and rotation with quantized
        activations. Defaults: on a GPU several passes over the text, with gains; on a CPU one, over part of it.
        """
        gpu, coded, sparse = self.on_gpu, scheme.activations.quantized, scheme.weights.sparse
        learns = method == "distill" or (gpu and coded and method in ("smooth", "rotate", "smooth_rotate"))
        narrow = min(scheme.weights.bits, scheme.activations.bits) < 4 or scheme.activations.bits == 4
        passes = (5.0 if coded and narrow else 3.0 if coded or narrow else 2.0) if gpu else 1.0
        # Far from the optimum, many steps beat low-variance ones.
        usual = (4096 if coded and narrow else 8192) if gpu else 1024
        step = self.step_tokens if self.step_tokens is not None else usual
        settings = Distillation(
            passes=passes if self.learn_passes is None else self.learn_passes,
            step_tokens=step,
            run_tokens=min(step, 8192) if gpu else 1024,
            place_rate=self.place_rate,
            scale_rate=self.scale_rate,
            gain_rate=self.gain_rate if self.gain_rate is not None else (0.002 if gpu and (coded or sparse) else 0.0),
            weight_rate=self.weight_rate,
            choosing=self.choosing,
            decay=self.decay,
            half=fast_in_half(self.where),
            device=self.where,
        )
        if self.learn_tokens is not None:
            return self.learn_tokens, settings
        return (1 << 19 if gpu else 49152) if learns else 0, settings

    def masks(self, method: str, scheme: Scheme) -> tuple[Distillation, int] | None:
        """(settings, tokens to generate) for learning 2:4 masks; None if masks are not learned."""
        gpu = self.on_gpu
        passes = self.mask_passes if self.mask_passes is not None else (4.0 if gpu else 1.0)
        tokens, settings = self.learning(method, scheme)
        if not (method == "distill" and scheme.weights.sparse and passes and tokens):
            return None
        generated = self.generated_tokens if self.generated_tokens is not None else (1 << 20 if gpu else 0)
        return replace(settings, passes=passes), generated

    def scale_learning(self, scheme: Scheme) -> ScaleLearning:
        """Settings for learning scales; 0 steps if they are not learned."""
        usual = 64 if self.on_gpu else 0
        steps = (usual if self.scale_steps is None else self.scale_steps) if scheme.activations.quantized else 0
        half, tokens = fast_in_half(self.where), 8192 if self.on_gpu else 1024
        return ScaleLearning(steps, tokens, self.between_rate, half, device=self.where)


def run(job: Job) -> Saved:
    """Run a job by one of the methods above. Raises CalibrationError, OptionError or TextError."""
    method, options = job.method, Options.of(job.options)
    if options.block_passes is None:
        # A GPU takes more passes: some two hundred steps in all.
        options = replace(options, block_passes=(6 if options.on_gpu else 4) if method == "blockwise" else 0)
    learn, distillation = options.learning(method, job.scheme)
    passes = options.block_passes
    refine = BlockLearning(passes, options.place_rate, options.scale_rate) if passes else None
    # The text first: it is cheaper to check than the model.
    sequences = sequences_of(job, options, max(options.calibration_tokens, learn))
    if options.resume is not None:
        make_folder(options.resume)
    if options.spill is not None:
        make_folder(options.spill, "spill", "activations")
    used = first_of(sequences, options.calibration_tokens)
    model = load_whole(job)
    names = {layer.name for layer in job.layers}
    changes = _prepare(job, model, method, sequences, options)
    kind = _scale_dtype(job)
    settings = gptq.GPTQ(options.order, options.damping, passes=options.passes, scale_dtype=kind)  # type: ignore[arg-type]
    if job.overrides and (learn or refine is not None):
        cause = "learn_tokens" if learn else "block_passes"
        raise OptionError(f"learning needs one scheme for all layers: leave out the overrides, or {cause}")

    def quantizer(weight: Tensor, statistics: Statistics, name: str) -> QuantizedWeight:
        format = job.scheme_of(name.partition(", ")[0]).weights
        weight = statistics.corrected(weight, options.drift)
        if options.start == "nearest":
            gptq.check_finite(weight, f"the weights of {name}")
            return quantize_weight(weight.to(kind), format)
        return gptq.quantize(weight, statistics.hessian, format, settings, name)

    def tell(done: int, total: int, left: float) -> None:
        if job.progress is not None:
            job.progress(f"block {done} of {total}", done, total)

    calibration = Calibration(
        drift=options.drift > 0,
        device=options.where,
        resume=options.resume,
        spill=options.spill,
        # 4096 tokens would leave a GPU launch-bound; but with a refiner a batch is also an optimizer step.
        batch_tokens=16384 if options.on_gpu and refine is None else 4096,
        # Not the method: methods that calibrate alike share finished blocks.
        options={"start": options.start, "gptq": str(settings), "drift": options.drift, "refine": str(refine)},
    )
    teacher, text = model, first_of(sequences, learn)
    masks = options.masks(method, job.scheme)
    if masks is not None:
        sparse = sparse_model(
            model, used, text, names, masks[0], kind, calibration, masks[1], options.drift, job.progress
        )
        model, text = sparse.model, sparse.text
        changes = replace(changes, tensors={**changes.tensors, **sparse.gains})
    weights = calibrate(model, used, job.scheme, names, quantizer, calibration, refine, tell, job.overrides)
    if learn:
        weights, tuned = _learn(job, model, weights, text, distillation, teacher)
        changes = replace(changes, tensors={**changes.tensors, **tuned})
    scattered = any(weight.group_index is not None for weight in weights.values())

    def quantize(layer: LinearLayer, source: Tensor) -> QuantizedWeight:
        weight = weights.get(layer.name)
        if weight is None:
            # No statistics are collected outside the blocks: round to nearest.
            own = changes.tensors.get(f"{layer.name}.weight", source).to(source.dtype)
            weight = quantize_weight(own, job.scheme_of(layer.name).weights)
        return weight.with_group_index() if scattered and weight.group_index is None else weight

    # Writing is fast beside calibration: it reports no progress.
    return write_quantized(replace(job, progress=None), quantize, changes)


def _learn(
    job: Job,
    model: Any,
    weights: dict[str, QuantizedWeight],
    sequences: list[Tensor],
    settings: Distillation,
    teacher: Any,
) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
    """Distill; returns the learned weights, and the norms' gains if they were learned."""

    def tell(done: int, total: int, loss: float) -> None:
        if job.progress is not None:
            job.progress(f"learning, KL divergence {loss:.3f} nats", done, total)

    tuned: dict[str, Tensor] = {}
    return distill(model, weights, sequences, settings, job.scheme.activations, tell, tuned, teacher), tuned


def _prepare(job: Job, model: Any, method: str, sequences: list[Tensor], options: Options) -> Changes:
    """Smooth or rotate the model, or both; returns what that changes about the checkpoint."""
    if method not in ("smooth", "rotate", "smooth_rotate"):
        return Changes()
    home = model.device
    model.to(_device_with_room(options.where, model))
    hadamard: list[str] = []
    config: dict[str, Any] = {}
    batches = batched(first_of(sequences, options.calibration_tokens), 4096)
    before = _logits(model, batches[0])

    def improve() -> None:
        settings = options.scale_learning(job.scheme)
        if not settings.steps:
            return
        told = {"scales": str(settings), "tokens": sum(map(len, sequences))}
        key = fingerprint(model, batches, Quantization(job.scheme), set(), Calibration(options=told))
        rotated = method == "smooth_rotate"

        def learn() -> list[Tensor]:
            return learn_scales(model, sequences, job.scheme.activations, rotated, settings, tell)

        # A resumed run takes learned scales from the resume folder.
        put_scales(model, remembered(options.resume, key, learn))

    def tell(done: int, total: int, loss: float) -> None:
        if job.progress is not None:
            job.progress(f"learning scales, KL divergence {loss:.3f} nats", done, total)

    if method == "smooth":
        smooth(model, batches, options.strength, job.scheme)
        improve()
    elif method == "smooth_rotate":
        strength = 0.5 if options.strength is None else options.strength
        hadamard = smooth_rotate(model, batches, strength, options.seed, improve)
    else:
        hadamard = rotate(model, options.seed, mix_heads=options.mix_heads)
        config = {"tie_word_embeddings": False}
    # A block with Llama's parts may still compute something else: other gains, gates, norms in between.
    size = float(before.norm())
    apart = float((_logits(model, batches[0]) - before).norm()) / (size or 1.0)
    if 0 < size < math.inf and not apart < _SAME:
        raise LayerError(
            f"{type(model).__name__} does not support method {method}: its logits changed by {apart:.0%}, and must not "
            "change; use gptq, blockwise or distill"
        )
    model.to(home)
    quantized = {f"{layer.name}.weight" for layer in job.layers}
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    # Of the quantized layers only those outside the blocks are still needed.
    prefix, _ = find_blocks(model)
    outside = {name for name in quantized if not name.startswith(f"{prefix}.")}
    kept = {name: tensor for name, tensor in state.items() if name not in quantized or name in outside}
    tied = {name for name in kept if name not in job.names and method != "rotate"}
    # In the source's dtype; an untied head in its embedding's.
    heads = {f"{head}.weight": weight for head, weight in tied_heads(job.model).items()}
    stored = {name: job.names.get(heads.get(name, name)) for name in kept}
    kinds = {name: job.source.entries[own].dtype if own else job.source.dtype for name, own in stored.items()}
    return Changes({n: tensor.to(kinds[n]) for n, tensor in kept.items() if n not in tied}, config, hadamard)


@torch.no_grad()
def _logits(model: Any, batch: Tensor) -> Tensor:
    """The logits of the first tokens of a batch."""
    found: Tensor = model(input_ids=batch[:1, :64].to(model.device), use_cache=False).logits.float()
    return found


def _device_with_room(device: str, model: Any) -> torch.device:
    """The device if the whole model fits there with room to run, else the model's own."""
    if torch.device(device).type != "cuda":
        return torch.device(device)
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(parameter.nbytes for parameter in model.parameters())
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


def load_whole(job: Job) -> Any:
    """The model of a job in float32, on the CPU. Raises CheckpointError."""
    try:
        model = auto_class(job.model.config).from_pretrained(
            job.source.path, dtype=torch.float32, trust_remote_code=job.source.trust_remote_code
        )
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"transformers cannot load {job.source.path}: {one_line(error)}") from error
    without_rescaling(model)
    return model.eval().requires_grad_(False)


def _scale_dtype(job: Job) -> torch.dtype:
    """The dtype of stored scales: the source weights' if that has 16 bits, else float32, as in RTN."""
    first = f"{job.layers[0].name}.weight"
    stored = job.names[job.tied.get(job.layers[0].name, first)]
    kind = job.source.entries[stored].dtype
    return kind if kind.itemsize == 2 else torch.float32
