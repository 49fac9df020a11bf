"""HQQ, as hqq's ``encoded_state_dict`` stores it in safetensors: 1, 2, 3, 4 and 8 bits with axis 1.

W_q: codes of the weight viewed as [N*K/group, group], whose rows are cut into 8 / bits parts that share bytes, first
part in the high bits (3 bits: ten parts in int32, from bits 27-29 down).  scale, zero: float [N*K/group, 1].
nbits, group_size, shape, axis: numbers.
W = (q - zero) * scale with a float zero, so a layer is read as ``min`` with minimum ``-zero * scale`` in float32, or as
``asym`` if all its zeros are valid codes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme, WeightFormat

NAME = "hqq"
MARKS = ("W_q",)
TENSORS = (
    "W_q", "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "hqq"


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer; reads only its numbers and zeros."""
    return Scheme(_format(layer)[0])


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    format, groups, (n, k), zero = _format(layer)
    packed = layer["W_q"]
    if packed.is_floating_point():
        packed = packed.view(torch.int32 if format.bits == 3 else torch.uint8)
    codes = _unpacked(packed, format.bits).flatten()[: n * k].view(n, k)
    scale = groups.spread(finite(layer, "scales", layer["scale"]).reshape(n, -1))
    zero = groups.spread(zero)
    zeros = zero.to(torch.uint8) if format.code == "asym" else None
    minimum = None if format.code == "asym" else -(zero.float() * scale.float())
    return QuantizedWeight.from_codes(codes, scale, zeros, format, minimum=minimum)


def _number(layer: StoredLayer, name: str) -> int:
    return int(layer[name])


def _format(layer: StoredLayer) -> tuple[WeightFormat, Groups, tuple[int, int], Tensor]:
    for name in ("quant_scale", "quant_zero"):
        if name in layer and _number(layer, name):
            raise layer.refuse(f"its scales or zeros are quantized themselves ({name})")
    if "axis" in layer and _number(layer, "axis") != 1:
        raise layer.refuse("it is grouped along the outputs (axis 0); quantize with axis=1")
    bits = _number(layer, "nbits")
    n, k = (int(size) for size in layer["shape"].tolist())
    size = _number(layer, "group_size") if "group_size" in layer else k
    if k % size:
        raise layer.refuse(f"its groups of {size} do not divide {k} inputs, so they span rows")
    groups = Groups.of(layer, size, k)
    zero = finite(layer, "zeros", layer["zero"]).reshape(n, -1)
    whole = bool(((zero == zero.round()) & (zero >= 0) & (zero < 2**bits)).all())
    return WeightFormat(bits, "asym" if whole else "min", groups.group), groups, (n, k), zero


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack W_q [rows / parts, group] to codes uint8 [rows, group], first part first."""
    parts = 10 if bits == 3 else 8 // bits
    shifts = [bits * (parts - 1 - part) for part in range(parts)]
    return torch.cat([(packed >> shift & (2**bits - 1)).to(torch.uint8) for shift in shifts])
