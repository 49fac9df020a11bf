"""The ``quantization_config`` in a saved model's config.json."""

from typing import Any

from anybit.errors import CheckpointError
from anybit.scheme import Scheme

METHOD = "anybit"


def configuration(
    scheme: Scheme,
    kept: list[str],
    group_index: bool = False,
    hadamard: list[str] | None = None,
    input_scale: bool = False,
) -> dict[str, Any]:
    """What config.json says of a model in ``scheme``; ``kept``: the modules that were not quantized;
    ``hadamard``: the layers whose inputs are rotated at run time; ``input_scale``: layers scale their inputs.
    """
    from anybit import __version__

    return {
        "quant_method": METHOD,
        "version": __version__,
        "scheme": str(scheme),
        "modules_to_not_convert": kept,
        **({"group_index": True} if group_index else {}),
        **({"hadamard": hadamard} if hadamard else {}),
        **({"input_scale": True} if input_scale else {}),
    }


def scheme_of(config: dict[str, Any]) -> Scheme | None:
    """The scheme of a config.json written by anybit, else None (also for other quantization methods)."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    if not isinstance(quantization.get("scheme"), str):
        raise CheckpointError("the quantization_config of config.json names anybit, but no scheme")
    return Scheme.parse(quantization["scheme"])


def refuse_quantized(config: dict[str, Any], what: str) -> None:
    """Raise CheckpointError if a model is quantized already."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        scheme = f", {quantization['scheme']}" if isinstance(quantization, dict) and "scheme" in quantization else ""
        raise CheckpointError(f"{what} is quantized already ({method}{scheme}): start from the original model")
