"""BitNet's ternary weights, as transformers reads them: ``bitlinear`` and ``autobitlinear``.

weight: uint8 [ceil(N/4), K]; bit pair j of a byte in row r is output j * ceil(N/4) + r, with 0, 1, 2 for -1, 0, 1.
weight_scale: one float, by which bitlinear divides and autobitlinear multiplies.
Inputs are quantized to 8 bits per token, as in anybit's a8. Codes plus one are those of ``w2a8``.
"""

import torch

from anybit.checkpoints.formats.stored import Format, Opened, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme


def _open(layer: StoredLayer) -> Opened:
    kind, scheme = layer.config.get("linear_class", "bitlinear"), Scheme.parse("w2a8")
    if layer.config.get("use_rms_norm"):
        raise layer.refuse("it normalizes its input (use_rms_norm), which anybit's quantized layers do not")
    if kind not in ("bitlinear", "autobitlinear"):
        raise layer.refuse(f"linear_class {kind!r:.80} is neither bitlinear nor autobitlinear")
    if layer.entry("weight").dtype != torch.uint8:
        raise layer.refuse("its ternary weights are stored as floats (quantization_mode online); pack them first")

    def read() -> QuantizedWeight:
        packed = layer["weight"]
        codes = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])
        if bool((codes == 3).any()):
            raise layer.refuse("a pair of bits is 3, which stands for no ternary weight")
        scale = finite(layer, "scales", layer["weight_scale"].reshape(1, 1))
        if kind == "bitlinear":
            scale = scale.float().reciprocal()
        return QuantizedWeight.from_codes(codes + 1, scale.expand(len(codes), 1).contiguous(), None, scheme.weights)

    return scheme, read


FORMAT = Format(
    "bitnet",
    ("weight_scale",),
    ("weight", "weight_scale"),
    lambda config: config.get("quant_method") == "bitnet",
    _open,
)
