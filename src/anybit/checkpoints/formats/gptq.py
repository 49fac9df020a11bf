"""GPTQ, as AutoGPTQ (v1), GPTQModel (v1 and v2) and auto-round write it, 2 to 8 bits.

qweight: int32 [K*b/32, N], packed along K, least significant bit first: its transpose is anybit's words.
qzeros: int32 [G, N*b/32], packed along N.  scales: float [G, N].  g_idx: int32 [K], the group of each input.

v1 stores zeros minus one, so a zero may be 2^b, which does not fit b bits: such a layer is read as ``min`` with minimum
``-zero * scale``. The version in a file's config is not reliable, but symmetric layers reveal it: their stored zeros
are 2^(b-1) - 1 in v1 and 2^(b-1) in v2.
"""

import torch

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.scheme import Code, Scheme, WeightFormat

_KNOWN = (None, "gptq", "gptq_v2")


def _open(layer: StoredLayer) -> Opened:
    # Bits follow from the shapes, so that mixed bit-widths need no list of layers.
    stored, n = layer.shape("scales")
    bits = layer.shape("qzeros")[1] * 32 // n
    if bits not in range(1, 9) or layer.shape("qweight")[1] != n:
        raise layer.refuse(f"qzeros of shape {layer.shape('qzeros')} fit no width of 1 to 8 bits with {n} outputs")
    k = layer.shape("qweight")[0] * 32 // bits
    groups = Groups.fitting(layer, stored, k, layer.config.get("group_size"))
    if groups.group is not None and "g_idx" not in layer and layer.config.get("desc_act"):
        raise layer.refuse("it has no tensor g_idx, and config.json says that inputs are out of order (desc_act)")
    zero = unpack_words(layer["qzeros"], bits, n).int()
    first, middle = int(zero.flatten()[0]), 1 << (bits - 1)
    if layer.config.get("sym", True) and bool((zero == first).all()) and first in (middle, middle - 1):
        zero += middle - first
    elif layer.config.get("checkpoint_format") != "gptq_v2":
        zero += 1
    code: Code = "sym" if bool((zero == middle).all()) else "min" if bool((zero >= 2**bits).any()) else "asym"
    format = WeightFormat(bits, code, groups.group)

    def read() -> QuantizedWeight:
        scale, spread = groups.spread(finite(layer, "scales", layer["scales"]).t()), groups.spread(zero.t())
        minimum = -(spread.float() * scale.float()) if code == "min" else None
        zeros = spread.to(torch.uint8) if code == "asym" else None
        index = groups.order(layer["g_idx"]) if "g_idx" in layer else None
        return QuantizedWeight(layer["qweight"].t().contiguous(), scale, zeros, (n, k), format, index, minimum=minimum)

    return Scheme(format), read


FORMAT = Format(
    "gptq",
    ("qweight",),
    ("qweight", "qzeros", "scales", "g_idx"),
    lambda config: config.get("quant_method") == "gptq" and config.get("checkpoint_format") in _KNOWN,
    _open,
)
