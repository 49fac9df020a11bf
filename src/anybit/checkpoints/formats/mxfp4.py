"""MXFP4 as gpt-oss stores its experts: all experts of a layer in one tensor, which ``split_codes`` splits.

blocks: uint8 [N, K/32, 16], low nibble first.  scales: E8M0 uint8 [N, K/32].
"""

import torch

from anybit.checkpoints.formats.stored import Format, Opened, StoredLayer, finite, nibbles, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.errors import dtype_name
from anybit.scheme import Scheme, WeightFormat


def _open(layer: StoredLayer) -> Opened:
    blocks, scales = layer.entry("blocks"), layer.entry("scales")
    if blocks.shape[2:] != (16,) or blocks.shape[:2] != scales.shape:
        raise layer.refuse(
            f"blocks of shape {blocks.shape} and scales of shape {scales.shape}, where [outputs, groups, 16] and "
            "[outputs, groups] belong"
        )
    for entry in (blocks, scales):
        if entry.dtype != torch.uint8:
            raise layer.refuse(f"{entry.name} is {dtype_name(entry.dtype)}, and holds bytes")
    format = WeightFormat(4, "e2m1", 32)

    def read() -> QuantizedWeight:
        scale = finite(layer, "scales", powers_of_two(layer["scales"]))
        return QuantizedWeight.from_codes(nibbles(layer["blocks"]).flatten(1), scale, None, format)

    return Scheme(format), read


FORMAT = Format("mxfp4", ("blocks",), ("blocks", "scales"), lambda config: config.get("quant_method") == "mxfp4", _open)
