"""Shards of a layer along its inputs, for row-parallel layers under tensor parallelism.

Functions take the whole layer's tensors as a checkpoint stores them. Dequantized values do not change: if a cut falls
inside a group, the shard gets smaller groups with repeated scales.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.codes.packing import pack_words, unpack_words
from anybit.errors import LayerError
from anybit.scheme import GROUPS, WeightFormat

_SMALLER = tuple(group for group in GROUPS if group >= 32)
"""Group sizes of shards; not 16, which would cost a scale per 16 inputs."""


def shard_format(format: WeightFormat, start: int, inputs: int) -> WeightFormat:
    """The format of a shard that begins at input ``start``: the same, or with smaller groups.

    Raises LayerError if no group size fits (the cut is not a multiple of 32), or a 2:4 cut is not a multiple of 4.
    """
    if format.sparse and (start % 4 or inputs % 4):
        raise LayerError(f"2:4 sparse weights are split at multiples of 4 inputs, not into {inputs} from input {start}")
    if format.group is None or start % format.group == 0:
        return format
    fitting = [group for group in _SMALLER if format.group % group == 0 and start % group == 0]
    if not fitting:
        raise LayerError(
            f"a shard that begins at input {start} cuts a group of {format.group}, and no smaller group "
            f"({', '.join(map(str, _SMALLER))}) meets the cut: use another tensor-parallel size, or quantize whole rows"
        )
    return replace(format, group=max(fitting))


def shard_words(words: Tensor, bits: int, start: int, inputs: int) -> Tensor:
    """Columns ``start`` to ``start + inputs`` of dense words int32 [N, words], repacked."""
    if start * bits % 32 == 0 and inputs * bits % 32 == 0:
        return words[:, start * bits // 32 : (start + inputs) * bits // 32]
    held = words.shape[1] * 32 // bits
    return pack_words(unpack_words(words, bits, held)[:, start : start + inputs], bits)


def shard_groups(values: Tensor, format: WeightFormat, start: int, inputs: int) -> Tensor:
    """Scales or zeros [N, G] of the whole layer in ``format`` -> those of the shard, in its ``shard_format``."""
    if format.group is None:
        return values
    size = shard_format(format, start, inputs).group or format.group
    return values[:, torch.arange(start, start + inputs, size, device=values.device) // format.group]


def shard_ordered(
    values: tuple[Tensor | None, ...], group_index: Tensor, format: WeightFormat
) -> tuple[tuple[Tensor | None, ...], Tensor, WeightFormat]:
    """``shard_groups`` for activation order.

    values: scales, zeros and minima [N, G] of the layer.  group_index: [inputs] of the shard, which may use any of the
    groups; unused ones are dropped. Returns values, index and format of the shard; where groups lie in a row, as they
    do if the layer is in natural order, the index says so, with smaller groups if need be.
    Raises LayerError if it uses more groups than the smallest group size gives a layer of its width.
    """
    places = torch.arange(len(group_index), device=group_index.device)
    for size in reversed([size for size in _SMALLER if size <= (format.group or 0)]):
        if torch.equal(group_index[places // size * size], group_index):  # no group ends within ``size`` inputs
            columns = group_index[::size].long()
            cut = tuple(None if one is None else one[:, columns] for one in values)
            return cut, (places // size).to(torch.int32), replace(format, group=size)
    used, index = group_index.unique(return_inverse=True)
    inputs, count = len(group_index), len(used)
    sizes = [size for size in _SMALLER if format.groups(inputs) <= replace(format, group=size).groups(inputs) >= count]
    if not sizes:
        raise LayerError(
            f"a shard of {inputs} inputs in activation order uses {count} groups of {format.group}, more than groups "
            f"of {_SMALLER[0]} give: use a smaller tensor-parallel size, or a model without activation order"
        )
    format = replace(format, group=max(sizes))
    columns = used.long()[torch.arange(format.groups(inputs), device=used.device).clamp(max=count - 1)]
    return tuple(None if one is None else one[:, columns] for one in values), index.to(torch.int32), format
