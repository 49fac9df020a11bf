"""Convert layers to tiles of packed weights (``packed_layout``) and back; on a GPU in one launch (``repack``)."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.errors import KernelError
from anybit.kernels.packed import sparse_layout
from anybit.kernels.packed.lane_words import arrange, pack, restore, unpack
from anybit.kernels.packed.packed_layout import (
    TILE_COLUMNS,
    TILE_ROWS,
    Order,
    PackedWeight,
    code_bytes,
    float_order,
    from_float_order,
    pieces,
    round_up,
    subgroups,
    tile_bytes,
    tile_group,
    unit_bytes,
    why_not,
)
from anybit.kernels.packed.repack import repack
from anybit.scheme import WeightFormat

# Elements unpacked at a time: bounds the scratch memory of ``prepare``.
_CHUNK_ELEMENTS = 1 << 25
_STEPS: dict[Order, tuple[int, int]] = {"a16": (8, 2), "a8": (4, 4)}
"""MMA steps of a unit, and fields of a register."""


def prepare(weight: QuantizedWeight, order: Order = "a16") -> PackedWeight:
    """Convert a layer to tiles, on its own device. Raises KernelError with the reason of ``why_not``."""
    if order not in ("a16", "a8"):
        raise KernelError(f"order must be 'a16' (16-bit activations) or 'a8' (8-bit ones), not {order!r}")
    if refusal := why_not(weight.format, order == "a8"):
        raise KernelError(refusal)
    format, (n, k) = weight.format, weight.shape
    if format.group is None and tile_group(format):
        weight = _in_groups(weight)
    permutation, column_group = _columns(weight)
    if format.sparse and permutation is not None:
        raise KernelError(sparse_layout.ORDERED)
    columns = k if permutation is None else permutation.numel()
    padded_n, padded_k = round_up(n, TILE_ROWS), round_up(columns, TILE_COLUMNS)
    if permutation is not None:
        permutation = pad(permutation, (0, padded_k - columns), value=-1)
    tiles = torch.empty(
        padded_k // TILE_COLUMNS,
        padded_n // TILE_ROWS,
        tile_bytes(format),
        dtype=torch.uint8,
        device=weight.words.device,
    )
    row_zero = None
    if format.group is None and weight.zero is not None:
        row_zero = pad(weight.zero[:, 0], (0, padded_n - n))
    place = _place_on_gpu if tiles.is_cuda and not format.sparse else _place
    row_scale = place(tiles, weight, permutation, column_group, order)
    return PackedWeight(tiles, row_scale, row_zero, permutation, weight.shape, format, order)


def _in_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """The same layer, with a whole row's scale and minimum repeated for each of its tiles."""
    groups = -(-weight.shape[1] // TILE_COLUMNS)
    repeated = {name: getattr(weight, name).expand(-1, groups) for name in ("scale", "minimum")}
    return replace(weight, **repeated, format=replace(weight.format, group=TILE_COLUMNS), group_index=None)


def _place_on_gpu(
    tiles: Tensor, weight: QuantizedWeight, permutation: Tensor | None, column_group: Tensor | None, order: Order
) -> Tensor:
    """Fill tiles in one launch without scratch memory; returns ``row_scale``."""
    padded_n, columns = tiles.shape[1] * TILE_ROWS, None if column_group is None else column_group.int()
    if weight.format.group is None:
        row_scale = _padded_scale(weight, padded_n)
    else:
        row_scale = torch.empty(padded_n, dtype=torch.float32, device=tiles.device)
    repack.launch(weight, permutation, columns, tiles, row_scale, order)
    return row_scale


def _place(
    tiles: Tensor, weight: QuantizedWeight, permutation: Tensor | None, column_group: Tensor | None, order: Order
) -> Tensor:
    """``_place_on_gpu`` in torch, on any device."""
    padded_n = tiles.shape[1] * TILE_ROWS
    _place_codes(tiles, weight, permutation, order)
    if weight.format.group is None:
        return _padded_scale(weight, padded_n)
    scale, minimum, row_scale = _normalized(weight, padded_n)
    _place_scales(tiles, weight, scale, minimum, column_group, padded_n)
    return row_scale


def _place_codes(tiles: Tensor, weight: QuantizedWeight, permutation: Tensor | None, order: Order) -> None:
    format, (n, k) = weight.format, weight.shape
    padded_k, padded_n = tiles.shape[0] * TILE_COLUMNS, tiles.shape[1] * TILE_ROWS
    rows = max(TILE_ROWS, _CHUNK_ELEMENTS // padded_k // TILE_ROWS * TILE_ROWS)
    if format.sparse:
        sparse_layout.place(_units(tiles, format), weight, order, rows)
        return
    for start in range(0, padded_n, rows):
        stop = min(start + rows, padded_n)
        codes = unpack_words(weight.words[start : min(stop, n)], format.bits, k)
        if permutation is not None:
            codes = torch.where(permutation >= 0, codes[:, permutation.clamp(min=0).long()], codes.new_zeros(()))
        codes = pad(codes, (0, padded_k - codes.shape[1], 0, stop - start - codes.shape[0]))
        part = slice(start // TILE_ROWS, stop // TILE_ROWS)
        _units(tiles, format)[:, part, :, : 256 * format.bits] = _words(codes, format, order)


def _units(tiles: Tensor, format: WeightFormat) -> Tensor:
    return tiles.view(*tiles.shape[:2], 4, unit_bytes(format))


def is_ordered(weight: QuantizedWeight) -> bool:
    """Whether a weight has an activation order; a group index that names groups in a row is none."""
    index, group = weight.group_index, weight.format.group
    if index is None or group is None:
        return False
    return not torch.equal(index.long(), torch.arange(len(index), device=index.device) // group)


def _columns(weight: QuantizedWeight) -> tuple[Tensor | None, Tensor | None]:
    """For an activation order: the channel of each column (-1: padding), and the group of each ``group`` columns."""
    index, group = weight.group_index, weight.format.group
    if index is None or group is None or not is_ordered(weight):
        return None, None
    k = weight.shape[1]
    order = torch.argsort(index.long(), stable=True)
    groups = weight.scale.shape[1]
    counts = torch.bincount(index.long(), minlength=groups)
    spans = (counts + group - 1) // group  # usually 1, but a checkpoint's groups may have any size
    begins = (torch.cumsum(spans, 0) - spans) * group
    sorted_group = index.long()[order]
    within = torch.arange(k, device=index.device) - (torch.cumsum(counts, 0) - counts)[sorted_group]
    permutation = torch.full((int(spans.sum()) * group,), -1, dtype=torch.int32, device=index.device)
    permutation[begins[sorted_group] + within] = order.to(torch.int32)
    return permutation, torch.repeat_interleave(torch.arange(groups, device=index.device), spans)


def _padded_scale(weight: QuantizedWeight, padded_n: int) -> Tensor:
    """Scales of whole rows, padded, float32 [N']."""
    scale = weight.scale.float()
    return pad(scale[:, 0], (0, padded_n - scale.shape[0]))


def _normalized(weight: QuantizedWeight, padded_n: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Group scales and minima divided by a power of two per row, so that they fit float16; and these factors [N'].

    The largest scale ends up below 2^8, so that codes times scales fit, and the largest minimum below 2^15.
    """
    scale = weight.scale.float()
    minimum = None if weight.minimum is None else weight.minimum.float()
    exponent = _exponent(scale, 8)
    if minimum is not None:
        exponent = torch.maximum(exponent, _exponent(minimum, 15))
    exponent = torch.where(exponent == _NO_EXPONENT, -7, exponent).clamp(min=-126)  # normal float32
    inverse = _power_of_two(-exponent)
    factor = pad(_power_of_two(exponent)[:, 0], (0, padded_n - scale.shape[0]))
    return scale * inverse, None if minimum is None else minimum * inverse, factor


_NO_EXPONENT = -1 << 10


def _exponent(values: Tensor, most: int) -> Tensor:
    """The exponent to divide a row by to get below 2^most, int32 [N, 1]; _NO_EXPONENT for rows of 0 or infinity."""
    largest = values.abs().amax(1, keepdim=True)
    usual = (largest > 0) & (largest < torch.inf)
    found = torch.frexp(torch.where(usual, largest, torch.ones_like(largest))).exponent - most
    return torch.where(usual, found, _NO_EXPONENT)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 to int32 exponents from -126 to 127; torch 2.11's ldexp runs on the current GPU, wherever its operand is."""
    return ((exponent + 127) << 23).view(torch.float32)


def _by_unit(values: Tensor) -> Tensor:
    """[K'/128, subgroups, N'] -> [K'/128, N'/64, unit, subgroup, 8, 2]: rows g and g + 8 side by side."""
    blocks, parts, n = values.shape
    return values.view(blocks, parts, n // 64, 4, 2, 8).permute(0, 2, 3, 1, 5, 4)


def _place_scales(
    tiles: Tensor, weight: QuantizedWeight, scale: Tensor, minimum: Tensor | None, column_group: Tensor | None,
    padded_n: int,
) -> None:  # fmt: skip
    group, parts = weight.format.group, subgroups(weight.format.group)
    assert group is not None
    blocks, n = tiles.shape[0], weight.shape[0]
    begins = torch.arange(blocks * parts, device=tiles.device) * (TILE_COLUMNS // parts)
    spans = begins // group
    known = (column_group.numel() if column_group is not None else scale.shape[1]) - 1
    valid, which = spans <= known, spans.clamp(max=known)
    if column_group is not None:
        which = column_group[which]

    def spread(values: Tensor) -> Tensor:
        picked = torch.where(valid, values[:, which], values.new_zeros(()))
        picked = pad(picked, (0, 0, 0, padded_n - n))
        return _by_unit(picked.t().contiguous().view(blocks, parts, padded_n)).reshape(blocks, padded_n // 64, 4, -1)

    units, at = _units(tiles, weight.format), code_bytes(weight.format.bits, weight.format.sparse)
    units[..., at : at + 32 * parts] = spread(scale.to(torch.float16)).contiguous().view(torch.uint8)
    if weight.zero is not None:
        units[..., at + 32 * parts : at + 48 * parts] = spread(weight.zero)
    if minimum is not None:
        units[..., at + 32 * parts :] = spread(minimum.to(torch.float16)).contiguous().view(torch.uint8)


def _axes(n: int, k: int, order: Order) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of codes [N', K'], and their order as [register, K'/128, N'/64, unit, lane, field]."""
    steps, fields = _STEPS[order]  # tile, unit, row half, g, block, step, high, t, field
    return (n // 64, 4, 2, 8, k // 128, steps, 2, 4, fields), (5, 6, 2, 4, 0, 1, 3, 7, 8)


def _words(codes: Tensor, format: WeightFormat, order: Order) -> Tensor:
    """Codes uint8 [N', K'] -> the code bytes of units, uint8 [K'/128, N'/64, 4, 256 * bits]."""
    (n, k), (steps, count) = codes.shape, _STEPS[order]
    fields = arrange(codes, *_axes(n, k, order)).reshape(4 * steps, k // 128, n // 64, 4, 32, count)
    found = pack(fields, 2 * format.bits, partial(pieces, format.bits, order))
    return float_order(found.view(torch.int32)).view(torch.uint8) if format.code == "e2m1" else found


def codes(packed: PackedWeight) -> Tensor:
    """The codes of tiles, uint8 [N, K], channels in original order: exactly those given to ``prepare``."""
    n, k = packed.shape
    found = _tile_codes(packed)[:n]
    if packed.permutation is None:
        return found[:, :k].contiguous()
    result = found.new_empty(n, k)
    used = packed.permutation >= 0
    result[:, packed.permutation[used].long()] = found[:, : used.numel()][:, used]
    return result


def _tile_codes(packed: PackedWeight) -> Tensor:
    """Codes by row and column of the tiles, uint8 [N', K']: inverts the placement."""
    bits, (steps, count) = packed.format.bits, _STEPS[packed.order]
    raw = _units(packed.tiles, packed.format)[..., : 256 * bits]
    if packed.format.code == "e2m1":
        raw = from_float_order(raw.contiguous().view(torch.int32)).view(torch.uint8)
    found = unpack(raw, 2 * bits, count, 4 * steps, partial(pieces, bits, packed.order))
    return restore(found, *_axes(*packed.padded, packed.order)).reshape(packed.padded)
