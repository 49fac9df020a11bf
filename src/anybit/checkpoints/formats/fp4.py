"""4-bit floats (e2m1): MXFP4, whose groups of 32 have powers of two as scales, and NVFP4, groups of 16 with e4m3 ones.

compressed-tensors: weight_packed uint8 [N, K/2], the first of two in the low half; weight_scale E8M0 uint8 [N, K/32],
or e4m3 [N, K/16] over weight_global_scale, which is stored as its reciprocal.
ModelOpt: weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], times weight_scale_2.
The two levels of NVFP4's scales are multiplied in float32.
"""

from typing import Any

import torch

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, nibbles, powers_of_two
from anybit.packing import QuantizedWeight
from anybit.scheme import Scheme, WeightFormat

NAME = "modelopt NVFP4"
MARKS = ("weight_scale_2",)
TENSORS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def matches(config: dict[str, Any]) -> bool:
    """Whether a quantization_config is of ModelOpt's NVFP4; compressed-tensors hands its layers over itself."""
    return config.get("quant_method") == "modelopt" and config.get("quant_algo") == "NVFP4"


def scheme(layer: StoredLayer) -> Scheme:
    """What the layer is quantized to."""
    return Scheme(WeightFormat(4, "e2m1", _groups(layer).group))


def read(layer: StoredLayer) -> QuantizedWeight:
    """The layer with its codes untouched."""
    codes = nibbles(layer[_weight(layer)])
    scale = layer["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = powers_of_two(scale)
    elif "weight_global_scale" in layer:
        scale = scale.float() / layer["weight_global_scale"].float()
    else:
        scale = scale.float() * layer["weight_scale_2"].float()
    scale = _groups(layer).spread(finite(layer, "scales", scale))
    return QuantizedWeight.from_codes(codes, scale, None, scheme(layer).weights)


def _weight(layer: StoredLayer) -> str:
    return "weight_packed" if "weight_packed" in layer else "weight"


def _groups(layer: StoredLayer) -> Groups:
    k, (_, stored) = 2 * layer.shape(_weight(layer))[1], layer.shape("weight_scale")
    if k % stored:
        raise layer.refuse(f"{k} inputs in {stored} groups, which fit no group size")
    return Groups.of(layer, k // stored, k)
