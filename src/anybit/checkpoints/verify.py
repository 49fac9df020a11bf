"""The checks that a model folder must pass before anybit loads it, whichever entry point it comes through.

``anybit.load``, transformers' ``from_pretrained``, the commands and servers' loaders all call these, in the order in
which a folder is read. Each raises CheckpointError, naming the file and the tensor, before anything is built.

``check_config``   config.json: counts that the tensors do not support, NaN, code and files it may not name; what
                   ``Quantization.of`` refuses: no scheme, a newer version, unknown settings, unsafe patterns
``check_layers``   headers against the scheme: missing or surplus tensors of quantized layers, wrong shapes or dtypes,
                   tensors that belong to no quantized layer, ``hadamard`` names that are none
``check_model``    headers against the model: missing or surplus tensors, wrong shapes, integers for floats
``check_values``   a layer's tensors, once read: scales that are not finite, invalid 2:4 indices
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit.checkpoints.configuration import Quantization
from anybit.checkpoints.safetensors import Entry, read_tensor
from anybit.codes.packing import layer_shapes, unpack_words
from anybit.errors import CheckpointError, counted, dtype_name
from anybit.layers.linear import PARTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.quantizers import HfQuantizer

TRAP = "weight"
"""An empty tensor beside the codes of each layer that compressed-tensors cannot represent. A program without anybit
takes it for the layer's weight and fails on its shape, instead of initializing the weight at random."""

_MARK = ".weight_packed"

# Counts that size a model's construction loops, bounded by what the tensors allow: every layer has a tensor, and every
# other part at least a row of one.
_LAYERS = re.compile(r"(?:n|num|encoder|decoder|\w*_hidden|num_\w+)_layers?|n_blocks?|num_blocks|depths?")
_UNITS = re.compile(r"\w*(?:experts|heads|labels|stages)(?:_per_\w+)?")
_SIZES = re.compile(r"\w*(?:_size|_dim|_positions?|_embeddings|_features|_channels)")
_FEWEST_LAYERS = 128
_FEWEST_UNITS = 4096
_LARGEST_SIZE = 1 << 31
_DEEPEST = 64
_MOST_LAYERS = 256
"""The bound on layers if the tensors are not known yet: more than any model has."""


def check_config(
    config: Mapping[str, object], where: object, entries: Mapping[str, Entry] | None = None
) -> Quantization | None:
    """Check a config.json before anything is built from it; returns how anybit quantized the model, or None.

    where: its name in errors.  entries: the tensors beside it, which bound its counts.
    """
    dimensions = (size for entry in (entries or {}).values() for size in entry.shape)
    largest = max(_FEWEST_UNITS, max(dimensions, default=0))
    layers = _MOST_LAYERS if entries is None else max(_FEWEST_LAYERS, len(entries))
    for name, value in _numbers(config, where):
        key = name.rpartition(".")[2]
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{where}: {name} is NaN, and must be a number")
        for pattern, most in ((_LAYERS, layers), (_UNITS, largest), (_SIZES, _LARGEST_SIZE)):
            if pattern.fullmatch(key) and value > most:
                why = "" if entries is None else f", more than {len(entries)} tensors allow"
                raise CheckpointError(f"{where}: {name} is {value:.6g}{why}; at most {most} can be")
    _check_names(config, where)
    quantization = Quantization.of(config, where)
    count = 0 if quantization is None else len(quantization.kept or ())
    if count > max(_FEWEST_UNITS, len(entries or ())):
        raise CheckpointError(f"{where}: quantization_config keeps {count} modules, more than there are")
    return quantization


def check_layers(quantization: Quantization, entries: Mapping[str, Entry]) -> list[str]:
    """Check the headers of all quantized layers, and their ``weight_shape``; returns the layers' names."""
    layers = [name.removesuffix(_MARK) for name in entries if name.endswith(_MARK)]
    if not layers:
        raise CheckpointError(f"the checkpoint is quantized to {quantization.scheme}, and has no tensor *{_MARK}")
    known = set(layers)
    for name, entry in entries.items():
        layer, _, last = name.rpartition(".")
        if last in PARTS and layer not in known:
            raise CheckpointError(f"{entry.file}: tensor {name} belongs to no quantized layer: no {layer}{_MARK}")
    strangers = sorted(set(quantization.hadamard) - known)
    if strangers:
        raise CheckpointError(f"hadamard in quantization_config names {strangers[0]}, which is not a quantized layer")
    for layer in layers:
        _check_layer(layer, quantization, entries)
    return layers


def check_model(
    model: "PreTrainedModel",
    entries: Mapping[str, Entry],
    where: object,
    quantizer: "HfQuantizer | None" = None,
    check_whole: Callable[[], None] | None = None,
) -> None:
    """Check the headers against a transformers model on the meta device, with its quantized layers in place.

    quantizer: the HfQuantizer that loads the model, for its renamings.  check_whole: checks them against the model that
    config.json describes; ``model`` may then be a part of that, under a new head.
    """
    wanted: dict[str, Tensor] = dict(model.state_dict())
    layers = {name.removesuffix(_MARK) for name in wanted if name.endswith(_MARK)}
    optional = set(getattr(model, "all_tied_weights_keys", ()))
    converted, found = names_in(model, entries, wanted, quantizer)
    surplus: list[str] = []
    doubles: dict[str, str] = {}
    for stored, name in found.items():
        entry = entries[stored]
        layer, _, last = name.rpartition(".")
        if last == TRAP and layer in layers and entry.bytes == 0:
            continue
        if name not in wanted:
            surplus.append(stored)
            continue
        if name in doubles:
            raise CheckpointError(f"{where}: tensor {name} appears twice, as {doubles[name]} and {stored}")
        doubles[name] = stored
        if tuple(wanted[name].shape) != entry.shape:
            raise CheckpointError(
                f"{entry.file}: tensor {stored} has shape {entry.shape}, "
                f"and {type(model).__name__} takes {tuple(wanted[name].shape)}"
            )
        _check_kind(entry, wanted[name].dtype)
    missing = sorted(set(wanted) - set(doubles) - converted - optional)
    if check_whole is not None and (missing or surplus):
        check_whole()
        missing, surplus = [name for name in missing if not _is_new_head(model, name)], []
    _refuse_missing(model, missing, where)
    if surplus:
        raise CheckpointError(
            f"{where} has tensor {counted(sorted(surplus))}, which {type(model).__name__} has no place for: its "
            "config.json is another model's"
        )


def _is_new_head(model: "PreTrainedModel", name: str) -> bool:
    """Whether a layer or tensor belongs to a classifier on top of a language model, which transformers initializes.

    An output head is none: with random weights the model would write nonsense.
    """
    inside = model.base_model is model or name.startswith(f"{model.base_model_prefix}.")
    other = type(model).__name__ not in (model.config.architectures or ())
    return other and not inside and model.get_output_embeddings() is None


def check_values(layer: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Check the values of a quantized layer's tensors, except on meta; names as in ``PARTS``."""
    for name in ("weight_scale", "weight_minimum", "bias"):
        tensor = tensors.get(name)
        if tensor is not None and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"layer {layer}: {name} has a value that is not finite")
    indices = tensors.get("weight_indices")
    if indices is None or indices.is_meta:
        return
    words = indices.detach()
    places = unpack_words(words, 2, words.shape[-1] * 16).unflatten(-1, (-1, 2))
    shape = tensors.get("weight_shape")
    pairs = places.shape[-2] if shape is None else int(shape[1]) // 4
    if bool((places[..., :pairs, 0] >= places[..., :pairs, 1]).any()):
        raise CheckpointError(f"layer {layer}: weight_indices must name two of four inputs each, the lower one first")


def _check_layer(layer: str, quantization: Quantization, entries: Mapping[str, Entry]) -> None:
    shape = entries.get(f"{layer}.weight_shape")
    if shape is None:
        raise CheckpointError(f"{entries[layer + _MARK].file} has no tensor {layer}.weight_shape, which {layer} needs")
    if shape.shape != (2,) or shape.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(
            f"{shape.file}: tensor {shape.name} is {dtype_name(shape.dtype)} {shape.shape}, and holds 2 whole numbers"
        )
    n, k = read_tensor(shape).tolist()
    if min(n, k) < 1:
        raise CheckpointError(f"{shape.file}: tensor {shape.name} says {n} outputs and {k} inputs")
    scheme = quantization.scheme_of(layer)
    expected = layer_shapes(n, k, scheme.weights, quantization.group_index)
    for suffix, size in expected.items():
        entry = entries.get(f"{layer}.{suffix}")
        if entry is None:
            raise CheckpointError(f"{shape.file} has no tensor {layer}.{suffix}, which {scheme} needs")
        if entry.shape != size:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name} has shape {entry.shape}, and {size} is what a layer of {n} outputs "
                f"and {k} inputs has in {scheme}"
            )
        if suffix != "weight_shape":
            _check_kind(entry, torch.float32 if suffix.endswith(("scale", "minimum")) else torch.int32)
    for suffix in PARTS:
        if suffix not in expected and f"{layer}.{suffix}" in entries:
            raise CheckpointError(
                f"{entries[f'{layer}.{suffix}'].file}: layer {layer} has {suffix}, and {scheme} as "
                "config.json describes it does not"
            )


def _check_kind(entry: Entry, wanted: torch.dtype) -> None:
    """Check a dtype: floats may have another width, because they are converted; integers must match."""
    floats = entry.dtype.is_floating_point and entry.dtype.itemsize >= 2
    right = floats if wanted.is_floating_point else entry.dtype == wanted
    if entry.name.endswith(".weight_shape"):
        right = entry.dtype in (torch.int64, torch.int32)
    if not right:
        what = "a float of 16 bits or more" if wanted.is_floating_point else dtype_name(wanted)
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} is {dtype_name(entry.dtype)}, and the model takes {what}"
        )


def _numbers(config: Mapping[str, object], where: object) -> Iterator[tuple[str, int | float]]:
    """Every number in a config.json with its key path; iterative, so that nesting cannot exhaust the stack."""
    rest: list[tuple[str, object, int]] = [("", config, 0)]
    while rest:
        name, value, depth = rest.pop()
        if depth > _DEEPEST:
            raise CheckpointError(f"{where} is nested more than {_DEEPEST} deep, at {name[:80]}")
        if isinstance(value, Mapping):
            rest += [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            rest += [(name, item, depth + 1) for item in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _check_names(config: Mapping[str, object], where: object) -> None:
    """Raise CheckpointError for a config that names files elsewhere, or code to fetch and run."""
    if config.get("transformers_weights") is not None:
        raise CheckpointError(f"{where}: transformers_weights names files that are not checked: remove it")
    if not isinstance(config.get("model_type", ""), str):
        raise CheckpointError(f"{where}: model_type must be a name, not {config['model_type']!r}")
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        value = config.get(name)
        if any("/" in str(text) for text in (value.values() if isinstance(value, Mapping) else (value,))):
            raise CheckpointError(f"{where}: {name} names code on the hub, which a model folder is not allowed to run")
    if not isinstance(config.get("quantization_config"), Mapping | None):
        raise CheckpointError(
            f"{where}: quantization_config must be an object, not {config['quantization_config']!r:.80}"
        )


def names_in(
    model: "PreTrainedModel",
    stored: Iterable[str],
    wanted: Mapping[str, Tensor],
    quantizer: "HfQuantizer | None" = None,
) -> tuple[set[str], dict[str, str]]:
    """How transformers maps stored names: (targets of conversions, stored name -> the model's).

    The second omits tensors that transformers ignores or converts while loading (such as merged experts).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    from anybit.models.experts import conversions

    transforms = get_model_conversion_mapping(model, None, quantizer)
    if quantizer is None:
        transforms = conversions(model, transforms)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    prefix = model.base_model_prefix
    # Surplus tensors that the model ignores: old buffers, or heads that it does not have.
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    converted, found = set(), {}
    for name in stored:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if pattern is not None and renamed in wanted:
            converted.add(renamed)
            converter = next(item for item in converters if pattern in item.source_patterns)
            targets = converter.target_patterns
            converted.update(renamed.replace(targets[0], other) for other in targets[1:])
        elif renamed in wanted or not any(re.search(pattern, renamed) for pattern in ignored):
            found[name] = renamed
    return converted, found


def _refuse_missing(model: "PreTrainedModel", names: list[str], where: object) -> None:
    ignored = model._keys_to_ignore_on_load_missing or ()
    names = [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]
    if names:
        kind = type(model).__name__
        saved = (getattr(model.config, "architectures", None) or [kind])[0]
        other = "" if saved == kind else f": its config.json says {saved}, so load it as that"
        raise CheckpointError(f"{where} has no tensor {counted(names)}, which {kind} needs{other}")
