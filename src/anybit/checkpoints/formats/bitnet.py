"""BitNet's ternary weights, as transformers reads them: ``bitlinear`` and ``autobitlinear``.

weight: uint8 [ceil(N/4), K]; bit pair j of a byte in row r is output j * ceil(N/4) + r, with 0, 1, 2 for -1, 0, 1.
weight_scale: one float, by which bitlinear divides and autobitlinear multiplies.
Inputs are quantized to 8 bits per token, as in anybit's a8. Codes plus one are those of ``w2a8``.
"""

from collections.abc import Mapping

import torch

from anybit.checkpoints.formats.stored import StoredLayer, finite
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme

NAME = "bitnet"
MARKS = ("weight_scale",)
TENSORS = ("weight", "weight_scale")
_SCHEME = Scheme.parse("w2a8")


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "bitnet"


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer. Raises CheckpointError for a norm before the layer, and for float weights."""
    if layer.config.get("use_rms_norm"):
        raise layer.refuse("it normalizes its input (use_rms_norm), which anybit's quantized layers do not")
    if layer.config.get("linear_class", "bitlinear") not in ("bitlinear", "autobitlinear"):
        raise layer.refuse(f"linear_class {layer.config['linear_class']!r:.80} is neither bitlinear nor autobitlinear")
    if layer.entry("weight").dtype != torch.uint8:
        raise layer.refuse("its ternary weights are stored as floats (quantization_mode online); pack them first")
    return _SCHEME


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer; its codes are the stored ones plus 1."""
    scheme(layer)
    packed = layer["weight"]
    codes = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])
    if bool((codes == 3).any()):
        raise layer.refuse("a pair of bits is 3, which stands for no ternary weight")
    scale = finite(layer, "scales", layer["weight_scale"].reshape(1, 1))
    if layer.config.get("linear_class", "bitlinear") != "autobitlinear":
        scale = scale.float().reciprocal()
    return QuantizedWeight.from_codes(codes + 1, scale.expand(codes.shape[0], 1).contiguous(), None, _SCHEME.weights)
