"""The ways to find codes for a model's weights, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.errors import SchemeError
from anybit.quantize import calibrated
from anybit.quantize.onebit import run_onebit
from anybit.quantize.rtn import quantize_weight
from anybit.quantize.stream import Job, Saved, write_quantized
from anybit.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method.

    summary: one line for help texts.  run: does a job (``anybit.quantize.stream.Job``); most methods prepare what they
    need and end in ``write_quantized``.  calibrated: whether it needs text to look at.
    """

    summary: str
    run: Callable[[Job], Saved]
    calibrated: bool = False


def _rtn(job: Job) -> Saved:
    # Text is for the methods that look at it; search=false covers the range of every group, and looks no further.
    settings = {name: value for name, value in job.options.items() if name not in ("text", "tokens")}
    search = settings.pop("search", True)
    if settings or not isinstance(search, bool):
        wrong = next(iter(settings), "search")
        raise SchemeError(f"method rtn does not take {wrong}={job.options[wrong]!r}; it takes search=true or false")
    return write_quantized(job, lambda layer, weight: quantize_weight(weight, job.scheme.weights, search))


METHODS: dict[str, Method] = {
    "rtn": Method("round to nearest, with a search for the scales", _rtn),
    "gptq": Method("error feedback on a calibration text; also 2:4 sparse schemes", calibrated.run_gptq, True),
    "onebit": Method("signs with scales for rows and for columns; no text needed", run_onebit),
    "block": Method("gptq, then codes and scales learn block by block", calibrated.run_block, True),
    "learned": Method("gptq, then codes and scales learn from the original model", calibrated.run_learned, True),
    "smooth": Method("outliers of activations move into the weights, then gptq", calibrated.run_smooth, True),
    "rotate": Method("a Hadamard rotation spreads outliers, then gptq", calibrated.run_rotate, True),
}


def quantize_folder(
    source: Path | str,
    output: Path | str,
    scheme: Scheme | str,
    method: str = "rtn",
    modules_to_not_convert: list[str] | None = None,
    **rest: Any,
) -> Saved:
    """Quantize a model folder into another folder.

    modules_to_not_convert: layers that stay as they are; by default the output head. rest: ``overwrite``,
    ``progress``, ``shard_bytes`` and the ``options`` of the method (``anybit.quantize.stream.Job``).
    Raises CheckpointError for what is wrong with the source or the place to write to, LayerError for a layer that the
    scheme does not fit, SchemeError for an unknown scheme or method; nothing is left behind then.
    """
    if method not in METHODS:
        raise SchemeError(f"method {method!r} is unknown; there are {', '.join(METHODS)}")
    return METHODS[method].run(Job.of(source, output, scheme, method, modules_to_not_convert, **rest))
