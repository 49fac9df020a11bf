"""auto-round's own format: layers packed like GPTQ's or AWQ's, with a bit-width per layer."""

from collections.abc import Mapping
from dataclasses import replace

from anybit.checkpoints.formats import awq, gptq
from anybit.checkpoints.formats.stored import StoredLayer
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme

NAME = "auto-round"
MARKS = ("qweight",)
TENSORS = gptq.TENSORS
_EARLY = ("autoround:exllamav2", "auto_round:exllamav2", "auto_round:gptq:exllamav2")
"""Names of GPTQ's packing before version 0.4, which do not say whether zeros are stored minus one."""
_PACKINGS = (
    *_EARLY, "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq", "auto_round:awq",
)  # fmt: skip


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") in ("auto-round", "intel/auto-round") and _packing(config) in _PACKINGS


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    if _as_awq(layer):
        return awq.scheme(layer)
    found = gptq.scheme(_as_gptq(layer))
    if found.weights.code != "sym" and _packing(layer.config) in _EARLY:
        raise layer.refuse(f"it is asymmetric, and {_packing(layer.config)} does not say how its zeros are stored")
    return found


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    return awq.read(layer) if _as_awq(layer) else gptq.read(_as_gptq(layer))


def _packing(config: Mapping[str, object]) -> str:
    said = config.get("packing_format")
    return str(config.get("backend", "auto_round:auto_gptq") if said is None else said)


def _as_awq(layer: StoredLayer) -> bool:
    return _packing(layer.config).endswith("awq")


def _as_gptq(layer: StoredLayer) -> StoredLayer:
    """The layer with GPTQ's checkpoint_format: only auto_gptq's packing stores zeros minus one (v1)."""
    version = "gptq" if _packing(layer.config).endswith("auto_gptq") else "gptq_v2"
    return replace(layer, config={**layer.config, "checkpoint_format": version})
