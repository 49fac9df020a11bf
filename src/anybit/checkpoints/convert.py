"""Convert between anybit's and compressed-tensors' checkpoints: same tensors, different config.json."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from anybit.checkpoints.configuration import (
    COMPRESSED_TENSORS,
    FORMAT,
    METHOD,
    Quantization,
    compressed_tensors_settings,
    configuration,
    settings_of,
    weights_settings,
    why_not,
)
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.compressed_tensors import PADDED, packing
from anybit.checkpoints.formats.stored import StoredLayer
from anybit.checkpoints.verify import check_layers
from anybit.checkpoints.writing import write_text
from anybit.codes.packing import WORD, words_per_row
from anybit.errors import ConversionError
from anybit.layers.experts import Experts
from anybit.models.experts import left_fused, stored_as_one
from anybit.scheme import GROUPS, Code, Scheme, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TARGETS = (COMPRESSED_TENSORS, METHOD)
_MARK = ".weight_packed"


def convert(folder: Path | str, to: str, trust_remote_code: bool = False) -> dict[str, object]:
    """Rewrite the config.json of a quantized model for ``to`` ("compressed-tensors" or "anybit"), atomically.

    Tensors are not touched. Returns the new quantization_config. Raises ConversionError, naming the layer and changing
    nothing, for what the target format cannot represent.
    """
    if to not in TARGETS:
        there = f"{', '.join(TARGETS)}, and in new files (--output) gptq, gguf"
        raise ConversionError(f"cannot convert to {to!r} in place; there are {there}")
    source = Folder(folder, trust_remote_code)
    quantization = _to_compressed_tensors(source) if to == "compressed-tensors" else _to_anybit(source)
    config = {**source.config, "quantization_config": quantization}
    write_text(source.path / "config.json", json.dumps(config, indent=2) + "\n")
    return quantization


def shared_ignore(
    model: "PreTrainedModel", scheme: Scheme, quantized: Iterable[str], hadamard: bool = False
) -> list[str] | None:
    """The unquantized Linear layers of a model, if compressed-tensors can represent the others; None if it cannot.

    model: on the meta device, before its layers are replaced.  quantized: names of the quantized layers, which have no
    activation order.
    """
    quantized = set(quantized)
    if hadamard or why_not(scheme) is not None or _why_not_experts(model, quantized, scheme.weights) is not None:
        return None
    refused = _why_not_model(model, quantized, scheme.weights) is not None
    return None if refused else _unquantized_linears(model, quantized)


def _why_not_experts(model: "PreTrainedModel", quantized: Collection[str], fmt: WeightFormat) -> str | None:
    """What the experts of a model have that readers of a compressed-tensors folder do not load, in a sentence, or None.

    transformers takes all experts for quantized, even if ignored, and leaves out their zero points.
    """
    mixtures = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    layers = [
        f"{name}.{own}.{part}" for name, module in mixtures for own in range(len(module)) for part in module.names
    ]
    if plain := [*left_fused(model), *(name for name in layers if name not in quantized)]:
        return f"experts in 16 bits ({plain[0]}): readers of compressed-tensors expect codes of them"
    if layers and stored_as_one(model):
        return f"experts as layers ({layers[0]}), where readers of compressed-tensors expect one tensor"
    if layers and fmt.code == "asym":
        return f"experts with zero points ({layers[0]}), which readers of compressed-tensors leave out of experts"
    return None


def _why_not_model(model: nn.Module, quantized: Collection[str], fmt: WeightFormat) -> str | None:
    """Why the format cannot represent the quantized layers, in a sentence about the first, or None."""
    modules = ((name, module) for name, module in model.named_modules() if name in quantized)
    return next((why for name, module in modules if (why := _why_not_layer(name, module, fmt))), None)


def _why_not_layer(name: str, module: nn.Module, fmt: WeightFormat) -> str | None:
    """Why the format cannot represent a layer, in a sentence, or None."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return f"layer {name} was a Conv1D, whose weight compressed-tensors expects transposed"
    k = module.get_parameter("weight").shape[1]
    codes = WORD // fmt.bits
    both = fmt.bits in PADDED and -(-k // codes) == words_per_row(k, fmt.bits)
    if both and (k > codes or fmt.code == "asym"):
        return (
            f"layer {name} has {k} inputs, whose {fmt.bits}-bit codes compressed-tensors before 0.18 would misread: "
            f"it expects {codes} codes a word, and finds as many words; use 4 or 8 bits"
        )
    if fmt.group is not None and k % fmt.group:
        smaller = [f"g{group}" for group in GROUPS if group > 16 and k % group == 0]  # no kernel runs g16
        advice = f"quantize with {' or '.join(smaller)}, or with whole rows" if smaller else "use whole rows"
        return (
            f"layer {name} has {k} inputs, which groups of {fmt.group} do not divide, as compressed-tensors demands; "
            f"{advice}"
        )
    return None


def _to_compressed_tensors(source: Folder) -> dict[str, object]:
    from anybit.models.experts import HubNames
    from anybit.models.modules import skeleton

    found, quantization = source.config.get("quantization_config"), source.quantization
    foreign = isinstance(found, dict) and found.get("quant_method") == COMPRESSED_TENSORS
    if quantization is None and foreign:
        raise ConversionError(f"{source.path} is a compressed-tensors model already: there is nothing to convert")
    if quantization is None:
        raise ConversionError(f"{source.path} is not a model that anybit quantized: its config.json does not say so")
    if quantization.hadamard:
        raise ConversionError("the model rotates inputs at run time (hadamard): compressed-tensors cannot express it")
    if quantization.overrides:
        raise ConversionError(
            f"the model has layers in schemes of their own, such as {next(iter(quantization.overrides))}: a "
            "compressed-tensors folder of anybit's has one scheme"
        )
    scheme = quantization.scheme
    if (reason := why_not(scheme)) is not None:
        raise ConversionError(f"compressed-tensors cannot express {scheme}: {reason}")
    layers = _layers(source)
    if quantization.group_index:
        raise ConversionError(f"layer {layers[0]} has an activation order, which a compressed-tensors folder has not")
    model = skeleton(source.path, source.trust_remote_code)
    names = HubNames.of(model)
    layers = [*map(names.own, layers)]
    if (why := _why_not_experts(model, set(layers), scheme.weights)) is not None:
        raise ConversionError(f"the model has {why}; anybit's own format holds it")
    if (why := _why_not_model(model, layers, scheme.weights)) is not None:
        raise ConversionError(why)
    return compressed_tensors_settings(scheme.weights, names.both(_unquantized_linears(model, set(layers))))


def _to_anybit(source: Folder) -> dict[str, object]:
    config = source.config.get("quantization_config")
    if settings_of(config) is not None:
        raise ConversionError(f"{source.path} is in anybit's format already: there is nothing to convert")
    if not isinstance(config, dict) or config.get("quant_method") != COMPRESSED_TENSORS:
        raise ConversionError(f"{source.path} is not a compressed-tensors model: its config.json does not say so")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConversionError(f"{source.path} has {len(groups)} config_groups; anybit has one scheme a model")
    ((title, group),) = groups.items()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
        raise ConversionError(f"{source.path}: its config_groups do not describe weights")
    kind = group.get("format") or config.get("format")
    if kind != FORMAT:
        raise ConversionError(f"{source.path} is in the format {kind!r}; anybit's tensors are those of {FORMAT!r}")
    if group.get("targets") != ["Linear"]:
        raise ConversionError(f"{source.path} quantizes {group.get('targets')}; anybit converts ['Linear']")
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise ConversionError(f"{source.path} quantizes {name} by rules that anybit does not support")
    scheme = Scheme(_weight_format(source.path, group.get("weights") or {}))
    _check_foreign(source)
    for name in _layers(source):
        if scheme.weights.bits in PADDED and packing(StoredLayer(source, name, config)) == (scheme.weights.bits, True):
            raise ConversionError(
                f"layer {name} holds {WORD // scheme.weights.bits} codes of {scheme.weights.bits} bits a word, as "
                "compressed-tensors before 0.18 packed them, and anybit packs them without gaps: rewrite the model "
                "with --output"
            )
    ignore = [str(pattern) for pattern in config.get("ignore") or []]
    kept = [pattern.removeprefix("re:") for pattern in ignore]
    # Normalize what other tools omit or spell differently, so that the folder passes the checks of loading.
    group = {**group, "weights": {**group["weights"], **weights_settings(scheme.weights)}}
    entry = {
        **config,
        "format": FORMAT,
        "config_groups": {title: group},
        METHOD: settings_of(configuration(scheme, kept)),
    }
    quantization = Quantization.of({"quantization_config": entry}, source.path / "config.json")
    assert quantization is not None
    check_layers(quantization, source.entries)
    return entry


def _check_foreign(source: Folder) -> None:
    """Check a folder against its model, like other tools' folders; refuse scales of a quantized KV cache."""
    from anybit.checkpoints.formats.translate import FolderTranslation
    from anybit.models.modules import skeleton

    found = FolderTranslation.of(source)
    if found is None:
        return
    found.check(skeleton(source.path, source.trust_remote_code))
    if found.kv_scales:
        raise ConversionError(
            f"{source.path} has {found.kv_scales[0]}, for a KV cache that anybit quantizes differently: rewrite the "
            "model with --output, which drops such scales"
        )


def _weight_format(path: Path, weights: Mapping[str, object]) -> WeightFormat:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if weights.get("type", "int") != "int" or strategy not in ("channel", "group"):
        raise ConversionError(
            f"{path} has weights of type {weights.get('type')}, strategy {strategy}, which anybit does not support"
        )
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ConversionError(f"{path} has an activation order ({weights['actorder']}) that its tensors do not store")
    if strategy == "group" and group not in GROUPS:
        raise ConversionError(f"{path} has groups of {group}; anybit has groups of {', '.join(map(str, GROUPS))}")
    code: Code = "sym" if weights.get("symmetric", True) else "asym"
    bits = weights.get("num_bits", 8)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ConversionError(f"{path} has weights of {bits!r} bits; anybit has those of 1 to 8")
    return WeightFormat(bits, code, group if strategy == "group" and isinstance(group, int) else None)


def _layers(source: Folder) -> list[str]:
    layers = sorted(name.removesuffix(_MARK) for name in source.entries if name.endswith(_MARK))
    if not layers:
        raise ConversionError(f"{source.path} has no tensor *{_MARK}: none of its layers is quantized")
    return layers


def _unquantized_linears(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """The unquantized Linears by name: compressed-tensors takes every Linear that is not ignored as quantized.

    Routers of experts are among them, which other libraries build as such.
    """
    mixtures = {name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, Experts)}
    linears = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or (name.rpartition(".")[0] in mixtures and getattr(getattr(module, "weight", None), "ndim", 0) == 2)
    )
    return [name for name in linears if name not in quantized]
