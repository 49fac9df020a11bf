"""Experts that a folder stores as one tensor, as a tensor each."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from anybit.checkpoints.safetensors import Entry
from anybit.checkpoints.verify import TRAP
from anybit.layers.experts import Experts
from anybit.models.experts import Part, Split, conversions, stored_as_one
from anybit.models.families import EXPERT_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_blocks|_scales|_scale_inv)?")
_OWN = {"_blocks": "blocks", "_scales": "scales", "_scale_inv": "weight_scale_inv", None: "weight"}
"""How the tensors of a layer's experts end -> the name of an expert's own."""


def split_experts(model: "PreTrainedModel", entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of a folder, those of all experts of a layer by the names of the model's linear layers.

    model: on the meta device, its experts as linear layers.  Reading a part reads no more than that of its file.
    """
    transforms = conversions(model, get_model_conversion_mapping(model))
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    splits = {
        item.source_patterns[0]: item
        for item in transforms
        if isinstance(item, WeightConverter) and isinstance(item.operations[0], Split)
    }
    wanted = model.state_dict()
    found: dict[str, Entry] = {}
    for stored, entry in entries.items():
        name, pattern = rename_source_key(stored, renamings, [*splits.values()], model.base_model_prefix, wanted)
        if pattern is None or stored in wanted or name not in wanted:
            found[stored] = entry
            continue
        parts, targets = splits[pattern].operations[0].parts, splits[pattern].target_patterns
        if len(entry.shape) < 2 or entry.shape[0] != parts[-1].expert + 1:  # not as many as the model has
            found[entry.name] = entry
            continue
        names = (name.replace(targets[0], target) for target in targets)
        found |= _parts(entry, zip(names, parts, strict=True))
    return found


def split_codes(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of a folder, codes of all experts of a layer as tensors each: "experts.0.gate_proj.blocks".

    MXFP4 (gpt-oss): rows of gate and up alternate.  FP8: gate's rows, then up's; one row of scales is of both.
    """
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        match = _FUSED.fullmatch(name)
        if match is None or len(entry.shape) < 3 or (match[3] is None and entry.dtype != torch.float8_e4m3fn):
            found[name] = entry
            continue
        rows = entry.shape[1]
        halves = (slice(None),) * 2 if rows == 1 else (slice(rows // 2), slice(rows // 2, None))
        if match[3] in ("_blocks", "_scales"):
            halves = (slice(0, None, 2), slice(1, None, 2))
        gate, up, down = EXPERT_NAMES
        layers = {down: slice(None)} if match[2] == "down" else dict(zip((gate, up), halves, strict=True))
        experts = ((number, *item) for number in range(entry.shape[0]) for item in layers.items())
        own = (
            (f"{match[1]}.{number}.{layer}.{_OWN[match[3]]}", Part(number, part, False))
            for number, layer, part in experts
        )
        found |= _parts(entry, own)
    return found


def traps(model: "PreTrainedModel", layers: Collection[str]) -> list[str]:
    """The empty tensors (``TRAP``) that a folder with these quantized layers stores: one a layer.

    Where all are experts of a model whose checkpoints hold them as one tensor, a program that looks for that finds it
    empty, too.
    """
    found = [f"{layer}.{TRAP}" for layer in layers]
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    inside = tuple(f"{name}." for name in mixtures)
    if mixtures and all(layer.startswith(inside) for layer in layers) and stored_as_one(model):
        downs = (name for name, module in mixtures.items() if f"{name}.0.{module.names[2]}" in layers)
        found += [f"{name}.down_proj" for name in downs]
    return found


def _parts(entry: Entry, parts: Iterable[tuple[str, Part]]) -> Iterator[tuple[str, Entry]]:
    begin = entry.begin
    for name, part in parts:
        shape = part.shape(entry.shape)
        end = begin + math.prod(shape) * entry.dtype.itemsize
        yield name, replace(entry, name=name, shape=shape, begin=begin, end=end, part=(entry, part))
        begin = end
