"""The quantization methods, by name. A method's dependencies are imported when it runs."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.errors import CalibrationError, OptionError, SchemeError, duration
from anybit.scheme import Scheme, nested_widths

if TYPE_CHECKING:
    from anybit.quantization.pipeline.stream import Job, Progress, Saved


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method.

    summary: one line for help texts.
    pace: about how many seconds a million weights take with default settings, on two CPU cores and on an H200 (which
    takes ``_START`` more), from runs of 0.1 and 7 billion weights, or of the most similar method.
    calibrated: whether it needs a calibration text.  mixed: whether it supports per-layer schemes.
    settings: names of its own options.
    """

    summary: str
    pace: tuple[float, float]
    calibrated: bool = False
    mixed: bool = False
    settings: tuple[str, ...] = ()

    def expected(self, weights: int, gpu: bool) -> float:
        """About how many seconds a model of so many weights takes."""
        return _START + self.pace[1] * weights / 1e6 if gpu else self.pace[0] * weights / 1e6

    def run(self, job: "Job") -> "Saved":
        """Run a job (``quantization.pipeline.stream.Job``)."""
        if self.calibrated:
            from anybit.quantization.pipeline.calibrated import run
        else:
            from anybit.quantization.pipeline.stream import run_rtn as run
        return run(job)


_START = 16.0
_INPUTS = ("text", "sequences", "tokens", "device")
_SETTINGS = (
    *("length", "start", "drift", "order", "damping", "passes", "resume", "spill", "seed"),
    *("minutes", "learn_tokens", "generated_tokens", "step_tokens", "weight_rate", "scale_rate", "gain_rate"),
)
_SMOOTH = ("strength", "scale_steps", "between_rate")
METHODS: dict[str, Method] = {
    "rtn": Method(
        "rounds to nearest, with a search for the scales", (0.05, 0.05), mixed=True, settings=("search",)
    ),
    "gptq": Method(
        "error feedback, calibrated on a text; also for 2:4 sparse schemes", (2.0, 0.02), True, True, _SETTINGS
    ),
    "distill": Method(
        "rounds (2:4: gptq), then learns the original model's predictions, for 20 minutes on a GPU", (12.0, 0.3),
        True, True, (*_SETTINGS, "choosing", *_SMOOTH),
    ),
    "smooth": Method(
        "moves outliers of activations into the weights, then gptq", (5.0, 1.0), True, False, (*_SETTINGS, *_SMOOTH)
    ),
    "rotate": Method("spreads outliers by a Hadamard rotation, then gptq", (5.0, 1.0), True, False, _SETTINGS),
    "smooth_rotate": Method(
        "smooths and rotates the input of every layer, then gptq", (5.0, 1.0), True, False, (*_SETTINGS, *_SMOOTH)
    ),
}  # fmt: skip


def checked_method(name: str) -> str:
    """The name of a method. Raises SchemeError for any other name."""
    if name == "blockwise":
        raise SchemeError("method blockwise is gone: distill learns from the same start, and loses less")
    if name not in METHODS:
        raise SchemeError(f"method {name!r} is unknown; there are {', '.join(METHODS)}")
    return name


def default_method(scheme: Scheme, bits: float | None = None, device: str | None = None) -> str:
    """The method for a scheme, or a budget of ``bits`` a weight: ``distill`` below 4 bits on a GPU, else ``rtn``.

    device: to work on, if it is chosen.
    """
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return "distill" if (bits or scheme.weights.bits) < 4 and torch.device(kind).type == "cuda" else "rtn"


def quantize_folder(
    source: Path | str,
    output: Path | str,
    scheme: Scheme | str,
    method: str | None = None,
    modules_to_not_convert: list[str] | None = None,
    *,
    overrides: Mapping[str, str | Scheme] | None = None,
    bits: float | None = None,
    memory: float | None = None,
    context: int | None = None,
    nested: Collection[int] = (),
    overwrite: bool = False,
    progress: "Progress | None" = None,
    shard_bytes: int | None = None,
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> "Saved":
    """Quantize a model folder into another folder.

    method: one of ``METHODS``; None is ``default_method``'s. Models that are too large to learn as a whole learn block
    by block, from a text; without one, and too large to write it, the default is ``rtn``. Both warn.
    modules_to_not_convert: layers to leave unquantized; by default the output head, and always a head that is tied to
    the embedding. overrides: per-layer schemes, by name or by a pattern such as "*.down_proj"; a name takes precedence
    over patterns, and the last matching pattern over earlier ones. A head that is named is quantized, tied or not.
    bits, memory: choose a bit-width for every layer without an override, using the text in ``options``, so that the
    stored bits per weight, or the bytes of the result, stay within this budget (``pipeline.allocate``).
    context: with memory, tokens of a KV cache to reserve part of it for, in the scheme's format.
    nested: fewer bits that the weights in the scheme's format will be sliced to (``codes.nested``); methods that learn
    train all widths together.
    overwrite: replace the output if it is a model folder; never another kind of folder, nor the source.
    progress: called with the layer just done, weights done, and weights in all; before a long run, with how long it may
    take and nothing done. shard_bytes: the most bytes per output
    file. options: of the method. trust_remote_code: run the model's own Python files, and copy them.
    Raises CheckpointError for a bad source or output path, LayerError for a layer that does not fit the scheme or a
    name that matches no layer, SchemeError for an unknown scheme or method, OptionError for an unknown option,
    KernelError for a device that does not exist, CalibrationError if ``distill`` is named for a model that is
    too large to learn as a whole and to write text, without a text.
    A failed run leaves no output behind.
    """
    scheme = Scheme.parse(scheme)
    nested = nested_widths(scheme.weights, nested)
    if method is not None:
        checked_method(method)
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options must be a dict of names and values, not {options!r}")
    options = dict(options or {})
    if options.get("device") is not None:
        from anybit.device import checked_device

        options["device"] = checked_device(options["device"])
    named = method is not None
    method = method or default_method(scheme, bits or min(nested, default=None), options.get("device"))
    search = bits is not None or memory is not None or context is not None
    if nested and search:
        raise OptionError("a nested model has one width for all layers, so none is searched: leave bits and memory out")
    if not METHODS[method].calibrated and not search:
        for name in ("text", "tokens"):
            if name in options:
                looking = ", ".join(other for other in METHODS if METHODS[other].calibrated)
                raise OptionError(f"method {method} needs no text: leave out {name}, or choose one of {looking}")
    known = {
        name for other in METHODS.values() if other.calibrated == METHODS[method].calibrated for name in other.settings
    }
    for name in options:
        if name not in known and name not in (*_INPUTS, *(("length", "seed") if search else ())):
            own = ", ".join(METHODS[method].settings) or "none"
            raise OptionError(f"method {method} has no setting {name!r} ({options[name]!r}); its settings: {own}")
    mixed = [name for name in METHODS if METHODS[name].mixed]
    if (overrides or search) and method not in mixed:
        what = "a search for widths works" if search else "overrides work"
        raise OptionError(f"method {method} has one scheme for all layers; {what} with {', '.join(mixed)}")
    from anybit.quantization.pipeline.stream import Job, silent

    rest: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    rest |= {"nested": nested, "overwrite": overwrite, "progress": progress or silent, "options": options}
    job = Job.of(source, output, scheme, method, modules_to_not_convert, overrides, trust_remote_code, **rest)
    if METHODS[method].calibrated and (found := _too_large(job)) is not None:
        reason, has_text = found
        if has_text:
            warnings.warn(f"{reason}: blocks learn one by one, and lose more", stacklevel=2)
        elif named:
            raise CalibrationError(f"{reason}: give a text (--text), which blocks learn from one by one")
        else:
            warnings.warn(f"{reason}: this run takes rtn; with a text, blocks learn one by one", stacklevel=2)
            method, inputs = "rtn", (*_INPUTS, "length", "seed") if search else ("device",)
            options = {name: value for name, value in options.items() if name in (*METHODS["rtn"].settings, *inputs)}
            job = replace(job, method=method, options=options)
    _say_how_long(job)
    if search:
        from anybit.quantization.pipeline.allocate import OPTIONS, allocate

        job = allocate(job, bits, memory, context)
        if not METHODS[method].calibrated:
            # Pass on only the method's own options.
            rest = {name: value for name, value in options.items() if name not in OPTIONS or name == "device"}
            job = replace(job, options=rest)
    return METHODS[method].run(job)


def _too_large(job: "Job") -> tuple[str, bool] | None:
    """Why there is no room for a job's learning on the whole model, and whether there is a text for blocks; or None."""
    from anybit.quantization.pipeline.calibrated import can_write, too_large

    reason = too_large(job)
    given = any(job.options.get(name) is not None for name in ("text", "sequences"))
    return None if reason is None else (reason, given or can_write(job))


def _say_how_long(job: "Job") -> None:
    """Report the expected time of a run of more than half a minute."""
    import torch

    weights = sum(layer.n * layer.k for layer in job.layers)
    gpu, learning = torch.device(job.options.get("device") or "cpu").type == "cuda", None
    if METHODS[job.method].calibrated:
        from anybit.quantization.pipeline.options import Options

        options = Options.of(job.options)
        gpu, learning = options.on_gpu, options.learning(job.method, job.scheme)
    expected = METHODS[job.method].expected(weights, gpu)
    size = f"{job.method} of {weights / 1e6:,.0f} million weights"
    if learning is not None and learning.minutes:
        job.progress(f"{size}: within {duration(60 * learning.minutes)}", 0, weights)
    elif expected > 30:
        job.progress(f"{size}: about {duration(expected)} on {'an H200' if gpu else 'two CPU cores'}", 0, weights)
