"""GPTQ, as AutoGPTQ (v1), GPTQModel (v1 and v2) and auto-round write it, 2 to 8 bits.

qweight: int32 [K*b/32, N], packed along K, least significant bit first: its transpose is anybit's words.
qzeros: int32 [G, N*b/32], packed along N.  scales: float [G, N].  g_idx: int32 [K], the group of each input.

v1 stores zeros minus one, so a zero may be 2^b, which does not fit b bits: such a layer is read as ``min`` with minimum
``-zero * scale``. The version in a file's config is not reliable, but symmetric layers reveal it: their stored zeros
are 2^(b-1) - 1 in v1 and 2^(b-1) in v2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, group_size
from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.scheme import Code, Scheme, WeightFormat

NAME = "gptq"
MARKS = ("qweight",)
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
_KNOWN = (None, "gptq", "gptq_v2")


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "gptq" and config.get("checkpoint_format") in _KNOWN


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer; reads only its zeros."""
    return Scheme(_format(layer)[0])


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    format, groups, zero = _format(layer)
    _, k, n = _sizes(layer)
    words = layer["qweight"].t().contiguous()
    scale = groups.spread(finite(layer, "scales", layer["scales"]).t())
    spread = groups.spread(zero.t())
    minimum = -(spread.float() * scale.float()) if format.code == "min" else None
    zeros = spread.to(torch.uint8) if format.code == "asym" else None
    return QuantizedWeight(words, scale, zeros, (n, k), format, _order(layer, format, groups), minimum=minimum)


def _sizes(layer: StoredLayer) -> tuple[int, int, int]:
    """(bits, inputs, outputs), from the shapes alone, so that mixed bit-widths need no list of layers."""
    n = layer.shape("scales")[1]
    bits = layer.shape("qzeros")[1] * 32 // n
    if bits not in range(1, 9) or layer.shape("qweight")[1] != n:
        raise layer.refuse(f"qzeros of shape {layer.shape('qzeros')} fit no width of 1 to 8 bits with {n} outputs")
    return bits, layer.shape("qweight")[0] * 32 // bits, n


def _format(layer: StoredLayer) -> tuple[WeightFormat, Groups, Tensor]:
    """The weight format, the groups, and the effective zeros int32 [G, N]."""
    bits, k, n = _sizes(layer)
    stored = layer.shape("scales")[0]
    groups = Groups.of(layer, group_size(layer, layer.config.get("group_size"), stored, k), k)
    zero = unpack_words(layer["qzeros"], bits, n).int() + _offset(layer, bits)
    code: Code = "asym"
    if bool((zero == 2 ** (bits - 1)).all()):
        code = "sym"
    elif bool((zero >= 2**bits).any()):
        code = "min"
    return WeightFormat(bits, code, groups.group), groups, zero


def _offset(layer: StoredLayer, bits: int) -> int:
    """The offset of stored zeros: 1 in v1, 0 in v2."""
    zeros = unpack_words(layer["qzeros"], bits, layer.shape("scales")[1])
    first, middle = int(zeros.flatten()[0]), 1 << (bits - 1)
    if layer.config.get("sym", True) and bool((zeros == first).all()) and first in (middle, middle - 1):
        return middle - first
    return 0 if layer.config.get("checkpoint_format") == "gptq_v2" else 1


def _order(layer: StoredLayer, format: WeightFormat, groups: Groups) -> Tensor | None:
    """The group of each input, int32 [K], or None if inputs are in group order."""
    if format.group is None:
        return None
    if "g_idx" not in layer:
        if layer.config.get("desc_act"):
            raise layer.refuse("it has no tensor g_idx, and config.json says that inputs are out of order (desc_act)")
        return None
    return groups.order(layer["g_idx"])
