"""Convert any quantized model that anybit reads to a new folder in anybit's, compressed-tensors' or GPTQ's format, or
to a GGUF file; or between the first two in place, as these share their tensors.

Codes never change: what the target format cannot represent raises ConversionError, naming the layer if there is one.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anybit.checkpoints.configuration import (
    COMPRESSED_TENSORS,
    FORMAT,
    METHOD,
    Quantization,
    compressed_tensors_settings,
    method_of,
    settings_of,
    why_not,
)
from anybit.checkpoints.expert_parts import traps
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats import gguf_encode, gptq_write
from anybit.checkpoints.formats.compressed_tensors import PADDED, packing
from anybit.checkpoints.formats.gguf_file import NotNative, open_gguf
from anybit.checkpoints.formats.gguf_write import write_gguf
from anybit.checkpoints.formats.stored import StoredLayer
from anybit.checkpoints.formats.translate import FolderTranslation, Translation
from anybit.checkpoints.scratch import replace_file
from anybit.checkpoints.shared import unquantized_linears, why_not_model
from anybit.checkpoints.source import is_gguf, local_folder
from anybit.checkpoints.verify import check_layers
from anybit.checkpoints.writing import ShardWriter, new_folder, write_config
from anybit.codes.packing import WORD
from anybit.errors import CheckpointError, ConversionError
from anybit.layers.linear import PARTS, QuantLinear
from anybit.models.experts import HubNames
from anybit.models.modules import skeleton, tied_heads, untied
from anybit.scheme import Scheme

TARGETS = (METHOD, COMPRESSED_TENSORS, "gptq", "gguf")


def convert_into(
    model: str | Path, to: str, output: str | Path, overwrite: bool = False, trust_remote_code: bool = False,
    width: int | None = None,
) -> dict[str, object]:  # fmt: skip
    """Rewrite a quantized model in another format; returns its quantization_config (GGUF: the type of each tensor).

    model: a folder in any supported format, a hub name or a GGUF file.  to: one of TARGETS.  output: a folder, or for
    "gguf" a file.  trust_remote_code: run the model's own Python files, and copy them.  width: of a nested model, the
    bits of its weights to take.
    Raises ConversionError for what the format cannot represent, and then leaves nothing behind.
    """
    if to not in TARGETS:
        raise ConversionError(f"cannot convert to {to!r}; there are {', '.join(TARGETS)}")
    gguf = is_gguf(model)
    if width is None and gguf:
        try:
            source, tokenizer, empty = open_gguf(Path(model).expanduser())
        except NotNative as reason:
            raise ConversionError(f"{model} cannot be converted with its codes: {reason}") from None
        if to == "gguf":
            raise ConversionError(f"{model} is a GGUF file already: there is nothing to convert")
        with new_folder(output, overwrite) as work:
            empty.config.save_pretrained(work)
            tokenizer.save_pretrained(work)
            config = json.loads((work / "config.json").read_text(encoding="utf-8"))
            return _write(source, to, work, empty, config, torch.float16)
    with (
        local_folder(model, trust_remote_code, width if gguf else None) as whole,  # which has one width, and refuses
        local_folder(whole, trust_remote_code, width) as path,
    ):
        folder = Folder(path, trust_remote_code)
        translation = FolderTranslation.of_own(folder) if folder.quantization else FolderTranslation.of(folder)
        if translation is None:
            raise ConversionError(
                f"{model} is not quantized in a format that can be read: quantize it with anybit quantize"
            )
        empty = skeleton(path, trust_remote_code)
        if to == "gguf":
            return _write_gguf(translation, empty, path, Path(output).expanduser(), overwrite)
        with new_folder(output, overwrite, whole) as work:
            folder.copy_companions(work)
            return _write(translation, to, work, empty, folder.config, None, trust_remote_code)


def _write_gguf(
    source: Translation, empty: PreTrainedModel, folder: Path, file: Path, overwrite: bool
) -> dict[str, object]:
    if file.suffix != ".gguf":
        raise ConversionError(f"the name of a GGUF file must end in .gguf, not {file}")
    if file.exists() and not (overwrite and is_gguf(file)):
        raise ConversionError(f"{file} exists already: choose another name, or replace a GGUF file with --overwrite")
    _check(source, empty)
    for name, scheme in source.layers.items():
        if (reason := gguf_encode.why_not(scheme)) is not None:
            raise ConversionError(f"gguf cannot express layer {name} in {scheme}: {reason}")
    kinds: dict[str, object] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda path: kinds.update(write_gguf(source, empty, folder, path)))
    return kinds


def _check(source: Translation, empty: PreTrainedModel) -> None:
    """Check the source against its model; ConversionError for a quantized embedding, which only anybit reads."""
    embeddings = {name for name, module in empty.named_modules() if isinstance(module, nn.Embedding)}
    for name in sorted(embeddings & set(source.layers)):
        raise ConversionError(
            f"{name} is a quantized embedding, which convert does not write: quantize the model without its override"
        )
    source.check(empty)


def _write(
    source: Translation,
    to: str,
    work: Path,
    empty: PreTrainedModel,
    config: Mapping[str, object],
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> dict[str, object]:
    """Fill a folder. dtype: of unquantized floats; None keeps theirs."""
    _check(source, empty)
    if set(tied_heads(empty)) & set(source.layers):  # a head with its own codes is no longer tied
        config = {**config, **untied(config)}
    hub = HubNames.of(empty).hub
    quantization = source.quantization(empty).renamed(hub).entry()
    if to != METHOD:
        _refuse_mixed(source, to, gptq_write.why_not if to == "gptq" else why_not)
    if to == "gptq":
        quantization = gptq_write.configuration(source.scheme, source.kept(empty), source.group_index)
    empties = traps(empty, source.layers) if to == METHOD else []
    names = [*source.plain, *empties, *(f"{name}.{part}" for name in source.layers for part in PARTS)]
    with ShardWriter(work, map(hub, names)) as writer:
        for name, tensor in _tensors(source, to):
            plain = dtype is not None and name in source.plain
            writer.add(hub(name), tensor.to(dtype) if plain and tensor.is_floating_point() else tensor)
        for name in empties:
            writer.add(hub(name), torch.empty(0, dtype=torch.uint8))
    write_config(work, {**config, "quantization_config": quantization})
    return convert(work, to, trust_remote_code) if to == COMPRESSED_TENSORS else quantization


def _tensors(source: Translation, to: str) -> Iterator[tuple[str, Tensor]]:
    for name in source.plain:
        yield name, source.read_plain(name).contiguous()
    for name in source.layers:
        weight = source.read(name)
        parts = gptq_write.tensors_of(name, weight) if to == "gptq" else QuantLinear.tensors_of(weight)
        yield from ((f"{name}.{part}", tensor.contiguous()) for part, tensor in parts.items())


def _refuse_mixed(source: Translation, to: str, why_not: Callable[[Scheme], str | None] = why_not) -> None:
    """Raise ConversionError if layers have several schemes, or one that a format cannot represent (``why_not``)."""
    most = source.scheme
    for name, scheme in source.layers.items():
        if (reason := why_not(scheme)) is not None:
            raise ConversionError(f"{to} cannot express layer {name} in {scheme}: {reason}")
        if scheme != most:
            raise ConversionError(
                f"anybit writes {to} with one scheme for all layers, but layer {name} is in {scheme}, and most others "
                f"in {most}"
            )


def convert(folder: Path | str, to: str, trust_remote_code: bool = False) -> dict[str, object]:
    """Rewrite the config.json of a quantized folder for ``to`` ("compressed-tensors" or "anybit"), atomically.

    Tensors are not touched. Returns the new quantization_config. Raises ConversionError, naming the layer and changing
    nothing, for what the target format cannot represent.
    """
    if to not in (COMPRESSED_TENSORS, METHOD):
        there = f"{COMPRESSED_TENSORS}, {METHOD}, and in new files (--output) gptq, gguf"
        raise ConversionError(f"cannot convert to {to!r} in place; there are {there}")
    source = Folder(folder, trust_remote_code)
    quantization = _to_compressed_tensors(source) if to == COMPRESSED_TENSORS else _to_anybit(source)
    try:
        write_config(source.path, {**source.config, "quantization_config": quantization})
    except OSError as error:
        raise CheckpointError(f"{source.path / 'config.json'} cannot be written: {error.strerror}") from None
    return quantization


def _to_compressed_tensors(source: Folder) -> dict[str, object]:
    if source.quantization is None:
        raise ConversionError(
            f"{source.path} is a compressed-tensors model already: there is nothing to convert"
            if method_of(source.config) == COMPRESSED_TENSORS
            else f"{source.path} is not a model that anybit quantized: its config.json does not say so"
        )
    found = FolderTranslation.of_own(source)
    _refuse_mixed(found, COMPRESSED_TENSORS)
    if found.group_index:
        raise ConversionError(
            f"layer {next(iter(found.layers))} has an activation order, which a compressed-tensors folder has not"
        )
    model = skeleton(source.path, source.trust_remote_code)
    found.take_names(model)
    if (why := why_not_model(model, found.layers, found.scheme.weights)) is not None:
        raise ConversionError(why)
    ignore = HubNames.of(model).both(unquantized_linears(model, found.layers))
    return compressed_tensors_settings(found.scheme.weights, ignore)


def _to_anybit(source: Folder) -> dict[str, object]:
    found, config = FolderTranslation.of(source), source.config.get("quantization_config")
    if source.quantization is not None:
        raise ConversionError(f"{source.path} is in anybit's format already: there is nothing to convert")
    if found is None or found.name != COMPRESSED_TENSORS or not isinstance(config, Mapping):
        raise ConversionError(f"{source.path} is not a compressed-tensors model: its config.json does not say so")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConversionError(f"{source.path} has {len(groups)} config_groups; anybit has one scheme a model")
    ((title, group),) = groups.items()
    _refuse_mixed(found, COMPRESSED_TENSORS)
    # Other tools omit settings, or spell them differently.
    (ours,) = compressed_tensors_settings(found.scheme.weights, [])["config_groups"].values()
    said = {"format": config.get("format"), **{name: value for name, value in group.items() if value}}
    weights = {**ours["weights"], "type": "int", "symmetric": True, **(group.get("weights") or {})}
    weights["group_size"] = None if weights["group_size"] == -1 else weights["group_size"]
    for given, expected in ((said, ours), (weights, ours["weights"])):
        for name, value in expected.items():
            if name != "weights" and given.get(name) != value:
                raise ConversionError(
                    f"{source.path} has {name} {given.get(name)!r:.80} in its config_groups; for tensors in "
                    f"{found.scheme}, anybit converts only {value!r}"
                )
    found.check(skeleton(source.path, source.trust_remote_code))
    if found.group_index:
        raise ConversionError(
            f"{source.path} has an activation order, which no compressed-tensors folder of anybit's has: rewrite the "
            "model with --output"
        )
    if found.kv_scales:
        raise ConversionError(
            f"{source.path} has {found.kv_scales[0]}, for a KV cache that anybit quantizes differently: rewrite the "
            "model with --output, which drops such scales"
        )
    bits = found.scheme.weights.bits
    for name in found.layers if bits in PADDED else ():
        if packing(StoredLayer(source.entries, source.read, name, config))[1]:
            raise ConversionError(
                f"layer {name} holds {WORD // bits} codes of {bits} bits a word, as compressed-tensors before 0.18 "
                "packed them, and anybit packs them without gaps: rewrite the model with --output"
            )
    kept = [str(pattern).removeprefix("re:") for pattern in config.get("ignore") or []]
    entry = {
        **config,
        "format": FORMAT,
        "config_groups": {title: {**group, "weights": {**weights, **ours["weights"]}}},
        METHOD: settings_of(Quantization(found.scheme, kept).entry()),
    }
    quantization = Quantization.of({"quantization_config": entry}, source.path / "config.json")
    assert quantization is not None
    check_layers(quantization, source.entries)
    return entry
