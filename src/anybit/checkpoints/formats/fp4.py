"""4-bit floats (e2m1): MXFP4, groups of 32 with power-of-two scales, and NVFP4, groups of 16 with e4m3 scales.

compressed-tensors: weight_packed uint8 [N, K/2], low nibble first; weight_scale E8M0 uint8 [N, K/32], or e4m3 [N, K/16]
to be divided by weight_global_scale. ``compressed_tensors`` reads such layers here.
ModelOpt: weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], to be multiplied by weight_scale_2.
The two levels of NVFP4's scales are combined in float32.
gpt-oss, MXFP4: all experts of a layer in one tensor, which ``split_codes`` splits into blocks uint8 [N, K/32, 16], low
nibble first, and scales E8M0 uint8 [N, K/32].
"""

import torch

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite, nibbles, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.errors import dtype_name
from anybit.scheme import Scheme, WeightFormat


def _open(layer: StoredLayer) -> Opened:
    weight = "weight_packed" if "weight_packed" in layer else "weight"
    k, (_, stored) = 2 * layer.shape(weight)[1], layer.shape("weight_scale")
    groups = Groups.fitting(layer, stored, k)
    format = WeightFormat(4, "e2m1", groups.group)

    def read() -> QuantizedWeight:
        scale = layer["weight_scale"]
        if scale.dtype == torch.uint8:
            scale = powers_of_two(scale)
        elif "weight_global_scale" in layer:
            scale = scale.float() / layer["weight_global_scale"].float()
        else:
            scale = scale.float() * layer["weight_scale_2"].float()
        scale = groups.spread(finite(layer, "scales", scale))
        return QuantizedWeight.from_codes(nibbles(layer[weight]), scale, None, format)

    return Scheme(format), read


def _open_experts(layer: StoredLayer) -> Opened:
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


FORMAT = Format(
    "modelopt NVFP4",
    ("weight_scale_2",),
    ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    lambda config: config.get("quant_method") == "modelopt" and config.get("quant_algo") == "NVFP4",
    _open,
)

MXFP4 = Format(
    "mxfp4",
    ("blocks",),
    ("blocks", "scales"),
    lambda config: config.get("quant_method") == "mxfp4",
    _open_experts,
)
