"""The quantization methods, by name. A method's dependencies are imported when it runs."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.errors import OptionError, SchemeError
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from anybit.quantization.pipeline.stream import Job, Progress, Saved


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method.

    summary: one line for help texts.  function: runs a job (``quantization.pipeline.stream.Job``), as
    ``module.function`` within ``anybit.quantization``; it ends in ``write_quantized``.
    calibrated: whether it needs a calibration text.  mixed: whether it supports per-layer schemes.
    """

    summary: str
    function: str
    calibrated: bool = False
    mixed: bool = False

    def run(self, job: "Job") -> "Saved":
        """Run a job."""
        module, _, name = self.function.rpartition(".")
        saved: Saved = getattr(importlib.import_module(f"anybit.quantization.{module}"), name)(job)
        return saved


_CALIBRATED = "pipeline.calibrated.run"
METHODS: dict[str, Method] = {
    "rtn": Method("rounds to nearest, with a search for the scales", "pipeline.stream.run_rtn", mixed=True),
    "gptq": Method("error feedback, calibrated on a text; also for 2:4 sparse schemes", _CALIBRATED, True, mixed=True),
    "blockwise": Method("gptq, then learns codes and scales block by block", _CALIBRATED, True),
    "distill": Method("gptq, then learns codes and scales from the original model", _CALIBRATED, True),
    "smooth": Method("moves outliers of activations into the weights, then gptq", _CALIBRATED, True),
    "rotate": Method("spreads outliers by a Hadamard rotation, then gptq", _CALIBRATED, True),
    "smooth_rotate": Method("smooths and rotates the input of every layer, then gptq", _CALIBRATED, True),
}


def quantize_folder(
    source: Path | str,
    output: Path | str,
    scheme: Scheme | str,
    method: str = "rtn",
    modules_to_not_convert: list[str] | None = None,
    *,
    overrides: Mapping[str, str | Scheme] | None = None,
    bits: float | None = None,
    memory: float | None = None,
    context: int | None = None,
    overwrite: bool = False,
    progress: "Progress | None" = None,
    shard_bytes: int | None = None,
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> "Saved":
    """Quantize a model folder into another folder.

    modules_to_not_convert: layers to leave unquantized; by default the output head, and always a head that is tied to
    the embedding. overrides: per-layer schemes, by name or by a pattern such as "*.down_proj"; a name takes precedence
    over patterns, and the last matching pattern over earlier ones. A head that is named is quantized, tied or not.
    bits, memory: choose a bit-width for every layer without an override, using the text in ``options``, so that the
    stored bits per weight, or the bytes of the result, stay within this budget (``pipeline.allocate``).
    context: with memory, tokens of a KV cache to reserve part of it for, in the scheme's format.
    overwrite: replace the output if it is a model folder; never another kind of folder, nor the source.
    progress: called with the layer just done, weights done, and weights in all. shard_bytes: the most bytes per output
    file. options: of the method. trust_remote_code: run the model's own Python files, and copy them.
    Raises CheckpointError for a bad source or output path, LayerError for a layer that does not fit the scheme or a
    name that matches no layer, SchemeError for an unknown scheme or method, OptionError for an unknown option,
    KernelError for a device that does not exist. A failed run leaves no output behind.
    """
    if method not in METHODS:
        raise SchemeError(f"method {method!r} is unknown; there are {', '.join(METHODS)}")
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options must be a dict of names and values, not {options!r}")
    options = dict(options or {})
    if options.get("device") is not None:
        from anybit.device import checked_device

        options["device"] = checked_device(options["device"])
    search = bits is not None or memory is not None or context is not None
    if not METHODS[method].calibrated and not search:
        for name in ("text", "tokens"):
            if name in options:
                looking = ", ".join(other for other in METHODS if METHODS[other].calibrated)
                raise OptionError(f"method {method} needs no text: leave out {name}, or choose one of {looking}")
    mixed = [name for name in METHODS if METHODS[name].mixed]
    if (overrides or search) and method not in mixed:
        what = "a search for widths works" if search else "overrides work"
        raise OptionError(f"method {method} has one scheme for all layers; {what} with {' and '.join(mixed)}")
    from anybit.quantization.pipeline.stream import Job

    rest: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    rest |= {"overwrite": overwrite, "progress": progress, "options": options}
    job = Job.of(source, output, scheme, method, modules_to_not_convert, overrides, trust_remote_code, **rest)
    if search:
        from anybit.quantization.pipeline.allocate import OPTIONS, allocate

        job = allocate(job, bits, memory, context)
        if not METHODS[method].calibrated:
            # Pass on only the method's own options.
            rest = {name: value for name, value in options.items() if name not in OPTIONS or name == "device"}
            job = replace(job, options=rest)
    return METHODS[method].run(job)
