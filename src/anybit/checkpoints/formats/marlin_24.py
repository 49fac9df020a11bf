"""marlin-24: 2:4 sparse layers of 4 or 8 bits in Sparse-MARLIN's layout, as nm-vllm and compressed-tensors (to 0.10)
write them.

B_24 or weight_packed: int32 [K/32, N*b/2], kept codes (b bits, zero 2^(b-1)) in the kernel's register order.
B_meta or meta: int16 [K/32, 2N], 2:4 metadata as CUTLASS reorders it for Ampere's sparse tensor cores.
s or scale_packed: float16 [G, N], outputs permuted if G > 1.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight, pack_words, unpack_words
from anybit.scheme import Scheme, WeightFormat

_METHODS = ("gptq", "marlin", "gptq_marlin_24")
_TILE, _COLUMNS = 16, 64
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Order of codes within a word, least significant bits first."""


def _open(layer: StoredLayer) -> Opened:
    names = ("B_24", "B_meta", "s") if "B_24" in layer else ("weight_packed", "meta", "scale_packed")
    codes, meta, scales = (layer.shape(name) for name in names)
    if len(codes) != 2 or len(meta) != 2 or len(scales) != 2:
        raise layer.refuse(f"codes of shape {codes}, metadata of {meta} and scales of {scales} must be matrices")
    n, k = scales[1], meta[0] * 32
    bits = 2 * codes[1] // n if n else 0
    if bits not in _INTERLEAVED or codes != (k // 32, n * bits // 2) or meta != (k // 32, 2 * n) or n % _COLUMNS:
        raise layer.refuse(f"codes of shape {codes}, metadata of {meta} and scales of {scales} do not fit together")
    groups = Groups.fitting(layer, scales[0], k)
    format = WeightFormat(bits, "sym", groups.group, True)

    def read() -> QuantizedWeight:
        """Undo the permutations of codes, metadata and scales."""
        kept = k // 2
        rows = unpack_words(layer[names[0]], bits, _TILE * n)  # a row: 16 kept inputs of every output
        tiles = rows.new_empty(kept * n // 1024, 1024)
        tiles[:, _order(bits)] = rows.view(-1, 1024)
        found = tiles.view(kept // _TILE, n // _TILE, _TILE, _TILE).permute(1, 3, 0, 2).reshape(n, kept)
        words = layer[names[1]].reshape(-1)[_metadata_order(n, k // 16)].view(n, k // 16)
        fours = words[..., None] >> torch.arange(0, 16, 4, dtype=torch.int16) & 15
        places = torch.stack((fours & 3, fours >> 2), dim=-1).to(torch.uint8)
        if not bool((places[..., 0] < places[..., 1]).all()):
            raise layer.refuse("its metadata names an input of a four twice, or two of them out of order")
        stored = finite(layer, "scales", layer[names[2]])
        if stored.shape[0] > 1:  # within eight outputs, the two halves are interleaved
            stored = stored.view(-1, n // 8, 4, 2).transpose(2, 3).reshape(-1, n)
        indices = pack_words(places.view(n, kept), 2)
        return QuantizedWeight(pack_words(found, bits), groups.spread(stored.t()), None, (n, k), format, None, indices)

    return Scheme(format), read


@cache
def _order(bits: int) -> Tensor:
    """For codes of 16 inputs x 64 outputs in file order: their index in four row-major tiles of 16 x 16.

    With lane = 4 * g + t, a lane of an MMA takes inputs 2t, 2t + 1, 2t + 8 and 2t + 9, from tile g / 2.
    """
    lane, output, block, row = torch.meshgrid(*map(torch.arange, (32, 4, 2, 4)), indexing="ij")
    g, t = lane // 4, lane % 4
    inputs = 2 * t + row % 2 + 8 * (row // 2)
    places = 16 * inputs + 256 * (g // 2) + 8 * (g % 2) + 4 * block + output
    interleaved = _INTERLEAVED[bits]
    return places.reshape(-1, len(interleaved))[:, interleaved].flatten()


@cache
def _metadata_order(n: int, columns: int) -> Tensor:
    """Index of the metadata word of each row and 16 inputs, int64 [n, columns] flat, after CUTLASS's reordering.

    It interleaves rows within 64, transposes blocks of 2 x 2, and stores pairs of columns together.
    """
    row, column = torch.meshgrid(torch.arange(n), torch.arange(columns), indexing="ij")
    to = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    turned = (to % 2 == 0).long() * (column % 2) - (to % 2) * (column % 2 == 0)
    to, column = to + turned, column - turned
    return (column // 2 * n * 2 + to * 2 + column % 2).flatten()


def _matches(config: Mapping[str, object]) -> bool:
    if config.get("quant_method") == "compressed-tensors":
        return config.get("format") == "marlin-24"
    return config.get("quant_method") in _METHODS and config.get("checkpoint_format") == "marlin_24"


FORMAT = Format(
    "marlin-24",
    ("B_24", "weight_packed"),
    ("B_24", "B_meta", "s", "workspace", "weight_packed", "meta", "scale_packed"),
    _matches,
    _open,
)
