"""compressed-tensors, as llm-compressor and others write it: pack-quantized, int-quantized, and floats.

pack-quantized: weight_packed int32 [N, ceil(K*b/32)], anybit's own words; weight_scale [N, G]; weight_shape; if
asymmetric, weight_zero_point int32 [ceil(N*b/32), G]; with activation order, weight_g_idx int32 [K].
Before version 0.18 codes of 3, 5, 6 or 7 bits did not cross words: 32 // b codes per word, upper bits 0 (padded).
int-quantized, naive-quantized: weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G].
Their 2:4 form (sparse-24-bitmask): compressed int8 [N, K/2], bitmask uint8 [N, K/8], low bit first; shape.
float-quantized: weight e4m3 [N, K] (``fp8``), or its 2:4 form, which is read as a dense layer, since no sparse kernel
takes e4m3.  nvfp4- and mxfp4-pack-quantized: weight_packed uint8 [N, K/2] (``fp4``).

Bits and groups follow from the shapes, so layers may have different widths. Activations stay in 16 bits even if the
file quantizes them: compressed-tensors rounds them differently.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anybit.checkpoints.formats import fp4, fp8
from anybit.checkpoints.formats.stored import (
    Format,
    Groups,
    Opened,
    StoredLayer,
    finite,
    unset,
    unsigned,
)
from anybit.codes.packing import WORD, QuantizedWeight, pack_words, unpack_words, words_per_row
from anybit.errors import dtype_name
from anybit.models.patterns import check_pattern
from anybit.scheme import Code, Scheme, WeightFormat

_KNOWN = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
PADDED = (3, 5, 6, 7)
"""Widths that do not divide 32, whose words compressed-tensors padded before version 0.18."""


def _open(layer: StoredLayer) -> Opened:
    layer = _as_dense(layer)
    _refuse_rotations(layer)
    if "weight_packed" in layer and layer.entry("weight_packed").dtype == torch.uint8:
        return fp4.FORMAT.open(layer)
    if "weight" in layer and layer.entry("weight").dtype == torch.float8_e4m3fn:
        block = _settings(layer).get("block_structure")
        block = [int(size) for size in block.split("x")] if isinstance(block, str) else block
        return fp8.FORMAT.open(replace(layer, config={**layer.config, "weight_block_size": block}))
    if "weight_packed" in layer:
        n, k = (int(size) for size in layer["weight_shape"].tolist())
        bits, padded = packing(layer)
    else:
        n, k = layer["shape"].flatten().tolist() if "bitmask" in layer else layer.shape("weight")
        bits, padded = 8, False  # as stored, even if rounded to fewer
    _, stored = (*layer.shape("weight_scale"), 1, 1)[:2]
    groups = Groups.fitting(layer, stored, k, _settings(layer).get("group_size"))
    for tensor, word, value in (("weight_zero_point", "symmetric", False), ("weight_g_idx", "actorder", "group")):
        if tensor not in layer and _settings(layer).get(word) == value:
            raise layer.refuse(f"it has no tensor {tensor}, and config.json says that {word} is {value}")
    code: Code = "asym" if "weight_zero_point" in layer else "sym"
    format = WeightFormat(bits, code, groups.group, "bitmask" in layer)

    def unpacked(words: Tensor, length: int) -> Tensor:
        return _unpadded(layer, words, bits, length) if padded else unpack_words(words, bits, length)

    def read() -> QuantizedWeight:
        index, places, zero = None, None, None
        if "weight_packed" in layer:
            words = layer["weight_packed"]
            words = pack_words(unpacked(words, k), bits) if padded else words
            if "weight_g_idx" in layer and not unset(layer["weight_g_idx"]):
                index = groups.order(layer["weight_g_idx"])
        else:
            words = pack_words(unsigned(layer["compressed" if format.sparse else "weight"], bits), bits)
            places = _places(layer, n, k) if format.sparse else None
        if code == "asym":
            zero = layer["weight_zero_point"]
            packed = zero.dtype == torch.int32
            zero = unpacked(zero.t().contiguous(), n).t() if packed else _of_rows(unsigned(zero, bits), n)
            zero = groups.spread(zero)
        scale = groups.spread(finite(layer, "scales", _of_rows(layer["weight_scale"], n)))
        return QuantizedWeight(words, scale, zero, (n, k), format, index, places)

    return Scheme(format), read


def _refuse_rotations(layer: StoredLayer) -> None:
    """Refuse online rotations (transform_config); those merged into the weights need nothing."""
    transforms = layer.config.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for where in (place["location"] for group in (groups or {}).values() for place in group["apply"]):
        if where not in ("weight_input", "weight_output"):
            raise layer.refuse(f"its model rotates activations at run time (transform_config, at {where})")


def packing(layer: StoredLayer) -> tuple[int, bool]:
    """(bits, whether words are padded as before version 0.18) of a pack-quantized layer.

    From the shape and, if that is ambiguous, config.json's num_bits and version. Raises CheckpointError if it stays so.
    """
    k, words = int(layer["weight_shape"].tolist()[1]), layer.shape("weight_packed")[1]
    fitting = [(bits, False) for bits in range(1, 9) if words_per_row(k, bits) == words]
    for bits in PADDED:  # for single words both packings of codes agree, but zero points' may differ
        if -(-k // (WORD // bits)) == words and (words > 1 or "weight_zero_point" in layer):
            fitting.append((bits, True))
    said = _settings(layer).get("num_bits")
    found = [fit for fit in fitting if fit[0] == said] or [fit for fit in fitting if not fit[1]] or fitting
    version = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", str(layer.config.get("version")))
    if len({bits for bits, _ in found}) < len(found) and version is not None:
        numbers = tuple(map(int, version.groups()))  # pre-releases of 0.17.2, never released, may do either
        padded = True if numbers <= (0, 17, 1) else False if numbers >= (0, 18) else None
        found = [fit for fit in found if fit[1] is padded]
    if len(found) == 1:
        return found[0]
    if not fitting:
        raise layer.refuse(f"{words} words a row fit no width of 1 to 8 bits with {k} inputs")
    kinds = " or ".join(f"{bits} bits{', padded' if padded else ''}" for bits, padded in fitting)
    raise layer.refuse(
        f"{k} inputs in {words} words a row may be codes of {kinds}: config.json must give num_bits, and the version "
        "of compressed-tensors that packed them (words were padded before 0.18)"
    )


def _unpadded(layer: StoredLayer, words: Tensor, bits: int, length: int) -> Tensor:
    """Unpack padded words int32 [R, W] of 32 // bits codes to uint8 [R, length]."""
    each = WORD // bits
    if words.shape[1] != -(-length // each):
        raise layer.refuse(f"{length} codes of {bits} bits, {each} a word, are not {words.shape[1]} words")
    codes = [(words >> bits * place & 2**bits - 1).to(torch.uint8) for place in range(each)]
    return torch.stack(codes, -1).flatten(1)[:, :length]


def _of_rows(values: Tensor, n: int) -> Tensor:
    """Scales or zeros as [n, groups]; a file may have one for the whole layer."""
    return values.reshape(1, 1).expand(n, 1) if values.numel() == 1 else values.reshape(n, -1)


def unmasked(layer: StoredLayer) -> Tensor:
    """The dense weight [N, K] of a bitmask-compressed layer, in the file's dtype."""
    n, k = layer["shape"].flatten().tolist()
    kept = layer["compressed"]
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[kept.itemsize]  # masked_scatter_ lacks e4m3
    found = torch.zeros(n, k, dtype=bits).masked_scatter_(_mask(layer, n, k), kept.view(bits))
    return found.view(kept.dtype)


def _as_dense(layer: StoredLayer) -> StoredLayer:
    """The layer, with bitmask-compressed floats as a dense weight."""
    if "compressed" not in layer or layer.entry("compressed").dtype == torch.int8:
        return layer
    if layer.entry("compressed").dtype != torch.float8_e4m3fn:
        kind = dtype_name(layer.entry("compressed").dtype)
        raise layer.refuse(f"its 2:4 sparse weights with scales are {kind}; int8 and float8_e4m3fn are read")
    weight, shape = f"{layer.name}.weight", tuple(layer["shape"].flatten().tolist())
    entries = {**layer.entries, weight: replace(layer.entry("compressed"), shape=shape)}
    return replace(layer, entries=entries, read=lambda name: unmasked(layer) if name == weight else layer.read(name))


def _mask(layer: StoredLayer, n: int, k: int) -> Tensor:
    """A bitmask as bool [N, K]; CheckpointError unless it keeps two of every four inputs."""
    if k % 8 or layer.shape("bitmask") != (n, k // 8) or layer.shape("compressed") != (n, k // 2):
        raise layer.refuse(f"{n} x {k} weights with a bitmask of shape {layer.shape('bitmask')}")
    bits = layer["bitmask"][..., None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
    if not bool((bits.view(n, k // 4, 4).sum(-1) == 2).all()):
        raise layer.refuse("its bitmask keeps more or fewer than two of four inputs")
    return bits.view(n, k).bool()


def _places(layer: StoredLayer, n: int, k: int) -> Tensor:
    """A bitmask as QuantizedWeight's ``indices``."""
    fours = _mask(layer, n, k).view(n, k // 4, 4).to(torch.uint8)
    return pack_words(fours.argsort(dim=-1, descending=True, stable=True)[..., :2].to(torch.uint8).view(n, -1), 2)


def _settings(layer: StoredLayer) -> Mapping[str, object]:
    """config.json's settings of a layer's weights: by its name, else by a pattern, else for all Linears."""
    groups = layer.config.get("config_groups")
    targets: dict[str, Mapping[str, object]] = {}
    for group in groups.values() if isinstance(groups, dict) else ():
        targets |= dict.fromkeys(map(str, group.get("targets") or ()), group.get("weights") or {})
    for target in [target for target in targets if target.startswith("re:")]:
        check_pattern(target[3:], "config.json: quantization_config.config_groups")
        if re.match(target[3:], layer.name):
            targets.setdefault(layer.name, targets[target])
    return targets.get(layer.name, targets.get("Linear", {}))


FORMAT = Format(
    "compressed-tensors",
    ("weight_scale",),
    (
        "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
        "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "compressed", "bitmask",
        "shape",
    ),
    lambda config: config.get("quant_method") == "compressed-tensors" and config.get("format") in _KNOWN,
    _open,
)  # fmt: skip
