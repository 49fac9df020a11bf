"""4-bit floats (e2m1): MXFP4, groups of 32 with power-of-two scales, and NVFP4, groups of 16 with e4m3 scales.

compressed-tensors: weight_packed uint8 [N, K/2], low nibble first; weight_scale E8M0 uint8 [N, K/32], or e4m3 [N, K/16]
to be divided by weight_global_scale.
ModelOpt: weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], to be multiplied by weight_scale_2.
The two levels of NVFP4's scales are combined in float32.
"""

from collections.abc import Mapping

import torch

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, nibbles, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme, WeightFormat

NAME = "modelopt NVFP4"
MARKS = ("weight_scale_2",)
TENSORS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes ModelOpt's NVFP4; ``compressed_tensors`` delegates here by itself."""
    return config.get("quant_method") == "modelopt" and config.get("quant_algo") == "NVFP4"


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    return Scheme(WeightFormat(4, "e2m1", _groups(layer).group))


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
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
