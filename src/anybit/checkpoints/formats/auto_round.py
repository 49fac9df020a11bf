"""auto-round's own format: layers packed like GPTQ's or AWQ's, with a bit-width per layer."""

from collections.abc import Mapping
from dataclasses import replace

from anybit.checkpoints.formats import awq, gptq
from anybit.checkpoints.formats.stored import Format, Opened, StoredLayer

_EARLY = ("autoround:exllamav2", "auto_round:exllamav2", "auto_round:gptq:exllamav2")
"""Names of GPTQ's packing before version 0.4, which do not say whether zeros are stored minus one."""
_PACKINGS = (
    *_EARLY, "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq", "auto_round:awq",
)  # fmt: skip


def _packing(config: Mapping[str, object]) -> str:
    said = config.get("packing_format")
    return str(config.get("backend", "auto_round:auto_gptq") if said is None else said)


def _open(layer: StoredLayer) -> Opened:
    packing = _packing(layer.config)
    if packing.endswith("awq"):
        return awq.FORMAT.open(layer)
    # Only auto_gptq's packing stores zeros minus one (v1).
    version = "gptq" if packing.endswith("auto_gptq") else "gptq_v2"
    scheme, read = gptq.FORMAT.open(replace(layer, config={**layer.config, "checkpoint_format": version}))
    if scheme.weights.code != "sym" and packing in _EARLY:
        raise layer.refuse(f"it is asymmetric, and {packing} does not say how its zeros are stored")
    return scheme, read


FORMAT = Format(
    "auto-round",
    gptq.FORMAT.marks,
    gptq.FORMAT.tensors,
    lambda config: config.get("quant_method") in ("auto-round", "intel/auto-round") and _packing(config) in _PACKINGS,
    _open,
)
