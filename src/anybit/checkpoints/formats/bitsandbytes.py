"""bitsandbytes: NF4, with or without double quantization, and LLM.int8.

NF4: weight uint8 [N*K/2, 1], high nibble first; weight.absmax: a scale per block of 64 (blocksize) weights, float32, or
uint8 indices into weight.nested_quant_map, with weight.nested_absmax and an offset.
LLM.int8: weight int8 [N, K], SCB float32 [N], each row's absmax. Outlier columns are stored like the others;
bitsandbytes separates them in activations, which stay in 16 bits here.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, nibbles
from anybit.codes.packing import QuantizedWeight, table_of
from anybit.scheme import Scheme, WeightFormat

NAME = "bitsandbytes"
_STATE = "weight.quant_state.bitsandbytes__nf4"
MARKS = (_STATE, "weight.quant_state.bitsandbytes__fp4", "SCB")
TENSORS = (
    "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *MARKS,
    "weight_format",
)  # fmt: skip


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "bitsandbytes"


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    if "SCB" in layer:
        if "weight_format" in layer and int(layer["weight_format"]):
            raise layer.refuse(
                "its codes are in a kernel's layout (weight_format), as older versions of bitsandbytes save a model "
                "that has run; load it there and save it before it runs"
            )
        return Scheme(WeightFormat(8, "sym", None))
    return Scheme(WeightFormat(4, "nf4", _groups(layer)[0].group))


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    format = scheme(layer).weights
    if "SCB" in layer:
        codes = (layer["weight"].to(torch.int16) + 128).to(torch.uint8)
        scale = finite(layer, "scales", layer["SCB"].float())[:, None] / 127
        return QuantizedWeight.from_codes(codes, scale, None, format)
    groups, (n, k) = _groups(layer)
    if not torch.allclose(layer["weight.quant_map"].float(), table_of("nf4"), rtol=0, atol=1e-6):
        raise layer.refuse("its table of values is not NF4's")
    packed = layer["weight"].view(torch.uint8).flatten()
    codes = nibbles(packed >> 4 | packed << 4).view(n, k)
    scale = groups.spread(finite(layer, "scales", _scales(layer)).view(n, -1))
    return QuantizedWeight.from_codes(codes, scale, None, format)


def _state(layer: StoredLayer) -> Any:
    """NF4's settings, JSON in a tensor of bytes."""
    if _STATE not in layer:
        raise layer.refuse("it is in bitsandbytes' FP4, which anybit does not read; save it as NF4")
    return json.loads(bytes(layer[_STATE].tolist()))


def _groups(layer: StoredLayer) -> tuple[Groups, tuple[int, int]]:
    state = _state(layer)
    n, k = state["shape"]
    if k % state["blocksize"]:
        raise layer.refuse(f"its blocks of {state['blocksize']} do not divide {k} inputs, so they span rows")
    return Groups.of(layer, state["blocksize"], k), (n, k)


def _scales(layer: StoredLayer) -> Tensor:
    absmax = layer["weight.absmax"]
    if absmax.is_floating_point():
        return absmax.float()
    state = _state(layer)
    block = torch.arange(absmax.numel()) // state["nested_blocksize"]
    values = layer["weight.nested_quant_map"].float()[absmax.flatten().long()]
    return values * layer["weight.nested_absmax"].float()[block] + float(state["nested_offset"])
