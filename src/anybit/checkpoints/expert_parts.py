"""Experts that a folder stores as one tensor, as a tensor each."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from anybit.checkpoints.safetensors import Entry
from anybit.models.experts import Split, conversions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def split_experts(model: "PreTrainedModel", entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of a folder, those of all experts of a layer by the names of the model's linear layers.

    model: on the meta device, its experts as linear layers.  Reading a part reads no more than that of its file.
    """
    transforms = conversions(model, get_model_conversion_mapping(model))
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    splits = {item.source_patterns[0]: item for item in transforms if _splits(item)}
    wanted = model.state_dict()
    found: dict[str, Entry] = {}
    for stored, entry in entries.items():
        name, pattern = rename_source_key(stored, renamings, [*splits.values()], model.base_model_prefix, wanted)
        whole = pattern is None or stored in wanted or name not in wanted
        found |= {stored: entry} if whole else dict(_parts(entry, name, splits[pattern]))
    return found


def _splits(item: object) -> bool:
    return isinstance(item, WeightConverter) and isinstance(item.operations[0], Split)


def _parts(entry: Entry, name: str, converter: WeightConverter) -> Iterator[tuple[str, Entry]]:
    """The parts of a tensor by name; itself if it does not hold as many experts as the model has."""
    parts, targets = converter.operations[0].parts, converter.target_patterns
    if len(entry.shape) < 2 or entry.shape[0] != parts[-1].expert + 1:
        yield entry.name, entry
        return
    begin = entry.begin
    for target, part in zip(targets, parts, strict=True):
        shape = part.shape(entry.shape)
        end = begin + math.prod(shape) * entry.dtype.itemsize
        own = name.replace(targets[0], target)
        yield own, replace(entry, name=own, shape=shape, begin=begin, end=end, part=(entry.name, part))
        begin = end
