"""The quantization methods, by name. A method's dependencies are loaded when it runs."""

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

    summary: one line for help texts.  function: does a job (``quantization.pipeline.stream.Job``), as
    ``module.function`` of this package; most prepare what they need and end in ``write_quantized``.
    calibrated: whether it needs a text.  mixed: whether layers may have schemes of their own.
    """

    summary: str
    function: str
    calibrated: bool = False
    mixed: bool = False

    def run(self, job: "Job") -> "Saved":
        """Do a job."""
        module, _, name = self.function.rpartition(".")
        saved: Saved = getattr(importlib.import_module(f"anybit.quantization.{module}"), name)(job)
        return saved


_CALIBRATED = "pipeline.calibrated.run"
METHODS: dict[str, Method] = {
    "rtn": Method("rounds to nearest, with a search for the scales", "pipeline.stream.run_rtn", mixed=True),
    "gptq": Method("error feedback, calibrated on a text; also for 2:4 sparse schemes", _CALIBRATED, True, mixed=True),
    "onebit": Method("signs, with a scale for each row and column; needs no text", "methods.onebit.run_onebit"),
    "blockwise": Method("gptq, then learns codes and scales block by block", _CALIBRATED, True),
    "distill": Method("gptq, then learns codes and scales from the original model", _CALIBRATED, True),
    "smooth": Method("moves outliers of activations into the weights, then gptq", _CALIBRATED, True),
    "rotate": Method("spreads outliers by a Hadamard rotation, then gptq", _CALIBRATED, True),
    "smooth_rotate": Method("smooths and rotates the input of every layer, then gptq", _CALIBRATED, True),
}
ALIASES = {"block": "blockwise", "learned": "distill", "spread": "smooth_rotate"}
"""Older names of methods, which keep working."""


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

    modules_to_not_convert: layers that stay as they are; by default the output head, which always does if it is tied
    to the embedding. overrides: schemes of layers that have another one, by name or by a pattern such as
    "*.down_proj"; a name comes before patterns, and of these the last that matches. A head that is named is quantized,
    tied or not. bits, memory: choose a width for every layer that has no override, on the text in ``options``, so
    that the stored bits a weight, or the bytes of the result, are at most this many (``pipeline.allocate``).
    context: with memory, tokens of a KV cache that it holds, too, in the scheme's format.
    overwrite: replace the output if it is a model folder, never another folder, nor the source.
    progress: called with the layer just done, the weights done so far, and all there are. shard_bytes: the most a file
    of the output holds. options: of the method. trust_remote_code: run the model's own Python files, and copy them.
    Raises CheckpointError for what is wrong with the source or the place to write to, LayerError for a layer that the
    scheme does not fit or a name that no layer has, SchemeError for an unknown scheme or method, OptionError for an
    option that the method does not have, KernelError for a device that is not here; nothing is left behind then.
    """
    method = ALIASES.get(method, method)
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
            # What is left is the method's own.
            rest = {name: value for name, value in options.items() if name not in OPTIONS or name == "device"}
            job = replace(job, options=rest)
    return METHODS[method].run(job)
