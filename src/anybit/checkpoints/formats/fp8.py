"""FP8 (e4m3) weights with scales per tensor, row, group or block: transformers' ``fp8``, FBGEMM, ModelOpt, MXFP8.

weight: e4m3 [N, K], whose bytes become codes.  weight_scale_inv or weight_scale: float, or E8M0 bytes, a grid [R, C]
over N x K.  W = weight * scale, despite the name ``_inv``. Activations stay in 16 bits: a file's static scales for FP8
activations (``input_scale``) are ignored.
"""

from collections.abc import Mapping

import torch

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, powers_of_two
from anybit.codes.packing import QuantizedWeight
from anybit.errors import dtype_name
from anybit.scheme import Scheme, WeightFormat

NAME = "fp8"
MARKS = ("weight_scale_inv", "weight_scale")
TENSORS = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
_METHODS = ("fp8", "fbgemm_fp8", "mxfp8")


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    modelopt = config.get("quant_method") == "modelopt" and config.get("quant_algo") == "FP8"
    return config.get("quant_method") in _METHODS or modelopt


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    return Scheme(WeightFormat(8, "e4m3", _grid(layer)[0].group))


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    groups, rows = _grid(layer)
    n, _ = layer.shape("weight")
    codes = layer["weight"].view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise layer.refuse("its weights hold NaN")
    stored = layer[_scale_name(layer)]
    scale = powers_of_two(stored) if stored.dtype in (torch.uint8, torch.float8_e8m0fnu) else stored
    scale = finite(layer, "scales", scale.reshape(_shape(layer)))
    scale = groups.spread(scale.repeat_interleave(rows, dim=0)[:n])
    format = WeightFormat(8, "e4m3", groups.group)
    scale = scale if scale.dtype in (torch.float16, torch.bfloat16) else scale.float()
    return QuantizedWeight.from_codes(codes, scale, None, format)


def _scale_name(layer: StoredLayer) -> str:
    return MARKS[0] if MARKS[0] in layer else MARKS[1]


def _shape(layer: StoredLayer) -> tuple[int, int]:
    """Shape [R, C] of the grid of scales."""
    shape = layer.shape(_scale_name(layer))
    if len(shape) > 2:
        raise layer.refuse(f"scales of shape {shape} are not a grid over a matrix")
    return (shape[0] if shape else 1, shape[1] if len(shape) == 2 else 1)


def _grid(layer: StoredLayer) -> tuple[Groups, int]:
    """The groups of a row, and how many rows share scales."""
    if layer.entry("weight").dtype != torch.float8_e4m3fn:
        raise layer.refuse(f"weights of {dtype_name(layer.entry('weight').dtype)}, not float8_e4m3fn")
    n, k = layer.shape("weight")
    rows, columns = _shape(layer)
    given = layer.config.get("weight_block_size")
    block = given if isinstance(given, list) and len(given) == 2 else None
    if block and (rows, columns) == (-(-n // block[0]), -(-k // block[1])):
        return Groups.of(layer, block[1], k), block[0]
    if n % rows or k % columns or (block and rows not in (1, n)):
        blocks = f"blocks of {block[0]} x {block[1]}" if block else "equal blocks"
        raise layer.refuse(f"a grid of {rows} x {columns} scales does not fit {n} x {k} weights in {blocks}")
    return Groups.of(layer, None if columns == 1 else k // columns, k), n // rows
