"""Convert between anybit's checkpoints and compressed-tensors': the same tensors, another config.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anybit.checkpoints.configuration import METHOD, configuration, scheme_of
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.writing import write_text
from anybit.errors import ConversionError
from anybit.packing import words_per_row
from anybit.scheme import GROUPS, Scheme, WeightFormat

FORMAT = "pack-quantized"
TARGETS = ("compressed-tensors", METHOD)
_MARK = ".weight_packed"


def convert(folder: Path | str, to: str) -> dict[str, Any]:
    """Rewrite the config.json of a quantized model for ``to`` ("compressed-tensors" or "anybit"), in one step.

    Returns the new quantization_config. Raises ConversionError, naming the layer, for what the format cannot express;
    nothing is changed then. No tensor is touched.
    """
    if to not in TARGETS:
        raise ConversionError(f"cannot convert to {to!r}; there are {', '.join(TARGETS)}")
    source = Folder(folder)
    quantization = _to_compressed_tensors(source) if to == "compressed-tensors" else _to_anybit(source)
    config = {**source.config, "quantization_config": quantization}
    write_text(source.path / "config.json", json.dumps(config, indent=2) + "\n")
    return quantization


def why_not(scheme: Scheme) -> str | None:
    """What of a scheme compressed-tensors' pack-quantized format cannot express, in a sentence, or None."""
    if scheme.weights.code == "bipolar":
        return "bipolar codes: their zero points are not integers"
    if scheme.weights.sparse:
        return "2:4 sparse weights: it stores whole rows"
    if scheme.activations.quantized:
        return f"{scheme.activations.bits}-bit activations: it rounds them differently, so results would differ"
    if scheme.kv is not None and scheme.kv.quantized:
        return f"the KV format {scheme.kv}: it has no groups for KV caches"
    return None


def _to_compressed_tensors(source: Folder) -> dict[str, Any]:
    scheme = scheme_of(source.config)
    found = source.config.get("quantization_config")
    if isinstance(found, dict) and found.get("quant_method") == "compressed-tensors":
        raise ConversionError(f"{source.path} is a compressed-tensors model already: there is nothing to convert")
    if scheme is None:
        raise ConversionError(f"{source.path} is not a model that anybit quantized: its config.json does not say so")
    if source.config["quantization_config"].get("hadamard"):
        raise ConversionError(
            f"{source.path} rotates inputs at run time (hadamard): compressed-tensors cannot express it"
        )
    if source.config["quantization_config"].get("input_scale"):
        raise ConversionError(f"{source.path} scales the inputs of its layers: compressed-tensors cannot express it")
    reason = why_not(scheme)
    if reason is not None:
        raise ConversionError(f"compressed-tensors cannot express {scheme}: {reason}")
    layers = _layers(source)
    _check_layers(source, layers, scheme.weights)
    fmt = scheme.weights
    weights = {
        "num_bits": fmt.bits,
        "type": "int",
        "symmetric": fmt.code == "sym",
        "strategy": "channel" if fmt.group is None else "group",
        "group_size": fmt.group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "ignore": _unquantized_linears(source, layers),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
        },
    }


def _to_anybit(source: Folder) -> dict[str, Any]:
    config = source.config.get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == METHOD:
        raise ConversionError(f"{source.path} is in anybit's format already: there is nothing to convert")
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise ConversionError(f"{source.path} is not a compressed-tensors model: its config.json does not say so")
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise ConversionError(f"{source.path} has {len(groups)} config_groups; anybit has one scheme a model")
    (group,) = groups.values()
    kind = group.get("format") or config.get("format")
    if kind != FORMAT:
        raise ConversionError(f"{source.path} is in the format {kind!r}; anybit's tensors are those of {FORMAT!r}")
    if group.get("targets") != ["Linear"]:
        raise ConversionError(f"{source.path} quantizes {group.get('targets')}; anybit converts ['Linear']")
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise ConversionError(f"{source.path} quantizes {name} by rules that anybit does not support")
    scheme = Scheme(_weight_format(source.path, group.get("weights") or {}))
    layers = _layers(source)
    _check_layers(source, layers, scheme.weights)
    kept = [pattern.removeprefix("re:") for pattern in config.get("ignore") or []]
    return configuration(scheme, kept)


def _weight_format(path: Path, weights: dict[str, Any]) -> WeightFormat:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if weights.get("type", "int") != "int" or strategy not in ("channel", "group"):
        raise ConversionError(
            f"{path} has weights of type {weights.get('type')}, strategy {strategy}, which anybit does not support"
        )
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ConversionError(f"{path} has an activation order ({weights['actorder']}) that its tensors do not store")
    if strategy == "group" and group not in GROUPS:
        raise ConversionError(f"{path} has groups of {group}; anybit has groups of {', '.join(map(str, GROUPS))}")
    code = "sym" if weights.get("symmetric", True) else "asym"
    return WeightFormat(int(weights.get("num_bits", 8)), code, group if strategy == "group" else None)  # type: ignore[arg-type]


def _layers(source: Folder) -> list[str]:
    layers = sorted(name.removesuffix(_MARK) for name in source.entries if name.endswith(_MARK))
    if not layers:
        raise ConversionError(f"{source.path} has no tensor *{_MARK}: none of its layers is quantized")
    return layers


def _check_layers(source: Folder, layers: list[str], fmt: WeightFormat) -> None:
    for layer in layers:
        for suffix, what in (("weight_g_idx", "an activation order"), ("weight_indices", "2:4 sparse weights")):
            if f"{layer}.{suffix}" in source.entries:
                raise ConversionError(f"layer {layer} has {what} ({suffix}), which only one of the formats has")
        n, k = source.read(f"{layer}.weight_shape").tolist()
        if fmt.group is not None and k % fmt.group:
            smaller = [f"g{group}" for group in GROUPS if k % group == 0]
            advice = f"quantize with {' or '.join(smaller)}, or with whole rows" if smaller else "use whole rows"
            raise ConversionError(
                f"layer {layer} has {k} inputs, which groups of {fmt.group} do not divide, as compressed-tensors "
                f"demands; {advice}"
            )
        expected: dict[str, tuple[int, ...]] = {
            "weight_packed": (n, words_per_row(k, fmt.bits)),
            "weight_scale": (n, fmt.groups(k)),
        }
        if fmt.code == "asym":
            expected["weight_zero_point"] = (words_per_row(n, fmt.bits), fmt.groups(k))
        for suffix, shape in expected.items():
            entry = source.entries.get(f"{layer}.{suffix}")
            if entry is None or entry.shape != shape:
                found = "absent" if entry is None else f"of shape {entry.shape}"
                raise ConversionError(f"layer {layer}: {suffix} is {found}; {shape} is what the configuration implies")


def _unquantized_linears(source: Folder, quantized: Iterable[str]) -> list[str]:
    """compressed-tensors takes every Linear that is not ignored, so all that stayed as they were are named."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from anybit.quantization.pipeline.modules import skeleton

    done, ignored = set(quantized), []
    for name, module in skeleton(source.path).named_modules():
        if isinstance(module, Conv1D) and name in done:
            raise ConversionError(f"layer {name} was a Conv1D, whose weight compressed-tensors expects transposed")
        if isinstance(module, nn.Linear) and name not in done:
            ignored.append(name)
    return ignored
