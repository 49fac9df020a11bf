"""HQQ, as hqq's ``encoded_state_dict`` stores it in safetensors: 1, 2, 3, 4 and 8 bits with axis 1.

W_q: codes of the weight viewed as [N*K/group, group], whose rows are cut into 8 / bits parts that share bytes, first
part in the high bits (3 bits: ten parts in int32, from bits 27-29 down).  scale, zero: float [N*K/group, 1].
nbits, group_size, shape, axis: numbers.
W = (q - zero) * scale with a float zero, so a layer is read as ``min`` with minimum ``-zero * scale`` in float32, or as
``asym`` if all its zeros are valid codes.
"""

import torch

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme, WeightFormat


def _open(layer: StoredLayer) -> Opened:
    for name in ("quant_scale", "quant_zero"):
        if name in layer and int(layer[name]):
            raise layer.refuse(f"its scales or zeros are quantized themselves ({name})")
    if "axis" in layer and int(layer["axis"]) != 1:
        raise layer.refuse("it is grouped along the outputs (axis 0); quantize with axis=1")
    bits = int(layer["nbits"])
    n, k = (int(size) for size in layer["shape"].tolist())
    size = int(layer["group_size"]) if "group_size" in layer else k
    if k % size:
        raise layer.refuse(f"its groups of {size} do not divide {k} inputs, so they span rows")
    groups = Groups.of(layer, size, k)
    zero = finite(layer, "zeros", layer["zero"]).reshape(n, -1)
    whole = bool(((zero == zero.round()) & (zero >= 0) & (zero < 2**bits)).all())
    format = WeightFormat(bits, "asym" if whole else "min", groups.group)

    def read() -> QuantizedWeight:
        packed = layer["W_q"]
        if packed.is_floating_point():
            packed = packed.view(torch.int32 if bits == 3 else torch.uint8)
        parts = range(10 if bits == 3 else 8 // bits)
        codes = torch.cat([(packed >> bits * part & (2**bits - 1)).to(torch.uint8) for part in reversed(parts)])
        scale, spread = groups.spread(finite(layer, "scales", layer["scale"]).reshape(n, -1)), groups.spread(zero)
        zeros = spread.to(torch.uint8) if whole else None
        minimum = None if whole else -(spread.float() * scale.float())
        return QuantizedWeight.from_codes(codes.flatten()[: n * k].view(n, k), scale, zeros, format, minimum=minimum)

    return Scheme(format), read


FORMAT = Format(
    "hqq",
    ("W_q",),
    (
        "W_q", "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype",
        "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
        "stores_quant_config", "channel_wise", "optimize", "round_zero",
    ),
    lambda config: config.get("quant_method") == "hqq",
    _open,
)  # fmt: skip
