"""bitsandbytes: NF4, with or without double quantization, and LLM.int8.

NF4: weight uint8 [N*K/2, 1], high nibble first; weight.absmax: a scale per block of 64 (blocksize) weights, float32, or
uint8 indices into weight.nested_quant_map, with weight.nested_absmax and an offset.
LLM.int8: weight int8 [N, K], SCB float32 [N], each row's absmax. Outlier columns are stored like the others;
bitsandbytes separates them in activations, which stay in 16 bits here.
"""

import json

import torch

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite, nibbles, unsigned
from anybit.codes.packing import QuantizedWeight, table_of
from anybit.scheme import Scheme, WeightFormat

_STATE = "weight.quant_state.bitsandbytes__nf4"
_MARKS = (_STATE, "weight.quant_state.bitsandbytes__fp4", "SCB")


def _open(layer: StoredLayer) -> Opened:
    if "SCB" in layer:
        return _open_int8(layer)
    if _STATE not in layer:
        raise layer.refuse("it is in bitsandbytes' FP4, which anybit does not read; save it as NF4")
    state = json.loads(bytes(layer[_STATE].tolist()))
    (n, k), size = state["shape"], state["blocksize"]
    if k % size:
        raise layer.refuse(f"its blocks of {size} do not divide {k} inputs, so they span rows")
    groups = Groups.of(layer, size, k)
    format = WeightFormat(4, "nf4", groups.group)

    def read() -> QuantizedWeight:
        if not torch.allclose(layer["weight.quant_map"].float(), table_of("nf4"), rtol=0, atol=1e-6):
            raise layer.refuse("its table of values is not NF4's")
        packed = layer["weight"].view(torch.uint8).flatten()
        scale = layer["weight.absmax"]
        if not scale.is_floating_point():
            block = torch.arange(scale.numel()) // state["nested_blocksize"]
            values = layer["weight.nested_quant_map"].float()[scale.flatten().long()]
            scale = values * layer["weight.nested_absmax"].float()[block] + float(state["nested_offset"])
        scale = groups.spread(finite(layer, "scales", scale.float()).view(n, -1))
        return QuantizedWeight.from_codes(nibbles(packed >> 4 | packed << 4).view(n, k), scale, None, format)

    return Scheme(format), read


def _open_int8(layer: StoredLayer) -> Opened:
    if "weight_format" in layer and int(layer["weight_format"]):
        raise layer.refuse(
            "its codes are in a kernel's layout (weight_format), as older versions of bitsandbytes save a model "
            "that has run; load it there and save it before it runs"
        )
    format = WeightFormat(8, "sym", None)

    def read() -> QuantizedWeight:
        scale = finite(layer, "scales", layer["SCB"].float())[:, None] / 127
        return QuantizedWeight.from_codes(unsigned(layer["weight"], 8), scale, None, format)

    return Scheme(format), read


FORMAT = Format(
    "bitsandbytes",
    _MARKS,
    (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_MARKS,
        "weight_format",
    ),
    lambda config: config.get("quant_method") == "bitsandbytes",
    _open,
)  # fmt: skip
