"""MXFP4 as gpt-oss stores its experts: all experts of a layer in one tensor, which ``split_codes`` splits.

blocks: uint8 [N, K/32, 16], low nibble first.  scales: E8M0 uint8 [N, K/32].
"""

from collections.abc import Mapping

import torch

from anybit.checkpoints.formats.stored import StoredLayer, finite, nibbles, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.errors import dtype_name
from anybit.scheme import Scheme, WeightFormat

NAME = "mxfp4"
MARKS = ("blocks",)
TENSORS = ("blocks", "scales")
_FORMAT = WeightFormat(4, "e2m1", 32)


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "mxfp4"


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    blocks, scales = layer.entry("blocks"), layer.entry("scales")
    if blocks.shape[2:] != (16,) or blocks.shape[:2] != scales.shape:
        raise layer.refuse(
            f"blocks of shape {blocks.shape} and scales of shape {scales.shape}, where [outputs, groups, 16] and "
            "[outputs, groups] belong"
        )
    for entry in (blocks, scales):
        if entry.dtype != torch.uint8:
            raise layer.refuse(f"{entry.name} is {dtype_name(entry.dtype)}, and holds bytes")
    return Scheme(_FORMAT)


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    format = scheme(layer).weights
    scale = finite(layer, "scales", powers_of_two(layer["scales"]))
    return QuantizedWeight.from_codes(nibbles(layer["blocks"]).flatten(1), scale, None, format)
