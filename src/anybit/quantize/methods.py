"""The ways to find codes for a model's weights, by name. What they need is loaded when they run."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.errors import OptionError, SchemeError
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from anybit.quantize.stream import Job, Saved


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method.

    summary: one line for help texts.  home: the function that does a job (``anybit.quantize.stream.Job``), as
    ``module.function`` of this room; most prepare what they need and end in ``write_quantized``.
    calibrated: whether it needs text to look at.
    """

    summary: str
    home: str
    calibrated: bool = False

    def run(self, job: "Job") -> "Saved":
        """Do a job."""
        module, _, function = self.home.partition(".")
        saved: Saved = getattr(importlib.import_module(f"anybit.quantize.{module}"), function)(job)
        return saved


METHODS: dict[str, Method] = {
    "rtn": Method("round to nearest, with a search for the scales", "stream.run_rtn"),
    "gptq": Method("error feedback on a calibration text; also 2:4 sparse schemes", "calibrated.run_gptq", True),
    "onebit": Method("signs with scales for rows and for columns; no text needed", "onebit.run_onebit"),
    "block": Method("gptq, then codes and scales learn block by block", "calibrated.run_block", True),
    "learned": Method("gptq, then codes and scales learn from the original model", "calibrated.run_learned", True),
    "smooth": Method("outliers of activations move into the weights, then gptq", "calibrated.run_smooth", True),
    "rotate": Method("a Hadamard rotation spreads outliers, then gptq", "calibrated.run_rotate", True),
    "spread": Method("smoothing and a rotation of every layer's input, then gptq", "calibrated.run_spread", True),
}


def quantize_folder(
    source: Path | str,
    output: Path | str,
    scheme: Scheme | str,
    method: str = "rtn",
    modules_to_not_convert: list[str] | None = None,
    **rest: Any,
) -> "Saved":
    """Quantize a model folder into another folder.

    modules_to_not_convert: layers that stay as they are; by default the output head, which always does if it is tied
    to the embedding. rest: ``overwrite``, ``progress``, ``shard_bytes`` and the ``options`` of the method
    (``anybit.quantize.stream.Job``).
    Raises CheckpointError for what is wrong with the source or the place to write to, LayerError for a layer that the
    scheme does not fit or a name that no layer has, SchemeError for an unknown scheme or method, OptionError for an
    option that the method does not have; nothing is left behind then.
    """
    if method not in METHODS:
        raise SchemeError(f"method {method!r} is unknown; there are {', '.join(METHODS)}")
    if not METHODS[method].calibrated:
        for name in ("text", "tokens"):
            if name in (rest.get("options") or {}):
                looking = ", ".join(other for other in METHODS if METHODS[other].calibrated)
                raise OptionError(f"method {method} looks at no text: leave out {name}, or take one of {looking}")
    from anybit.quantize.stream import Job

    return METHODS[method].run(Job.of(source, output, scheme, method, modules_to_not_convert, **rest))
