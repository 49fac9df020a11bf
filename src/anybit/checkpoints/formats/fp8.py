"""FP8 (e4m3) weights with scales per tensor, row, group or block: transformers' ``fp8``, FBGEMM, ModelOpt, MXFP8.

weight: e4m3 [N, K], whose bytes become codes.  weight_scale_inv or weight_scale: float, or E8M0 bytes, a grid [R, C]
over N x K.  W = weight * scale, despite the name ``_inv``. Activations stay in 16 bits: a file's static scales for FP8
activations (``input_scale``) are ignored.
"""

import torch

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.errors import dtype_name
from anybit.scheme import Scheme, WeightFormat

_SCALES = ("weight_scale_inv", "weight_scale")


def _open(layer: StoredLayer) -> Opened:
    if layer.entry("weight").dtype != torch.float8_e4m3fn:
        raise layer.refuse(f"weights of {dtype_name(layer.entry('weight').dtype)}, not float8_e4m3fn")
    n, k = layer.shape("weight")
    name = _SCALES[0] if _SCALES[0] in layer else _SCALES[1]
    shape = layer.shape(name)
    if len(shape) > 2:
        raise layer.refuse(f"scales of shape {shape} are not a grid over a matrix")
    rows, columns = (*shape, 1, 1)[:2]
    given = layer.config.get("weight_block_size")
    block = given if isinstance(given, list) and len(given) == 2 else None
    if block and (rows, columns) == (-(-n // block[0]), -(-k // block[1])):
        groups, shared = Groups.of(layer, block[1], k), block[0]
    elif n % rows or k % columns or (block and rows not in (1, n)):
        blocks = f"blocks of {block[0]} x {block[1]}" if block else "equal blocks"
        raise layer.refuse(f"a grid of {rows} x {columns} scales does not fit {n} x {k} weights in {blocks}")
    else:
        groups, shared = Groups.of(layer, None if columns == 1 else k // columns, k), n // rows
    format = WeightFormat(8, "e4m3", groups.group)

    def read() -> QuantizedWeight:
        codes = layer["weight"].view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise layer.refuse("its weights hold NaN")
        scale = layer[name]
        scale = powers_of_two(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale
        scale = finite(layer, "scales", scale.reshape(rows, columns)).repeat_interleave(shared, dim=0)[:n]
        scale = scale if scale.dtype in (torch.float16, torch.bfloat16) else scale.float()
        return QuantizedWeight.from_codes(codes, groups.spread(scale), None, format)

    return Scheme(format), read


FORMAT = Format(
    "fp8",
    _SCALES,
    ("weight", *_SCALES, "input_scale", "activation_scale"),
    lambda config: (
        config.get("quant_method") in ("fp8", "fbgemm_fp8", "mxfp8")
        or (config.get("quant_method") == "modelopt" and config.get("quant_algo") == "FP8")
    ),
    _open,
)
