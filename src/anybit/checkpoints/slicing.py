"""Slices of nested models: the folder that the top bits of every code make by themselves."""

import json
from dataclasses import replace
from pathlib import Path

from anybit.checkpoints.configuration import configuration
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.safetensors import header_room
from anybit.checkpoints.verify import check_values
from anybit.checkpoints.writing import ShardWriter, write_text
from anybit.codes.nested import sliced
from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.errors import CheckpointError
from anybit.layers.linear import PARTS, QuantLinear
from anybit.scheme import Scheme, WeightFormat


def read_layer(source: Folder, name: str, format: WeightFormat) -> QuantizedWeight:
    """Read a layer of a folder that anybit wrote. Raises CheckpointError for values that no layer has."""
    parts = {p: source.read(f"{name}.{p}", finite=True) for p in PARTS if f"{name}.{p}" in source.entries}
    check_values(name, parts)
    n, k = (int(size) for size in parts["weight_shape"].tolist())
    zero = parts.get("weight_zero_point")
    if zero is not None:
        zero = unpack_words(zero.t().contiguous(), format.bits, n).t().contiguous()
    rest = (parts.get(part) for part in ("weight_g_idx", "weight_indices", "weight_minimum"))
    return QuantizedWeight(parts["weight_packed"], parts["weight_scale"], zero, (n, k), format, *rest)


def write_slice(source: Folder, width: int, folder: Path) -> None:
    """Write a nested model's slice of ``width`` bits. Raises CheckpointError for a width that it does not have."""
    found = source.quantization
    if found is None or not found.nested:
        raise CheckpointError(
            f"{source.path} has no slice of {width} bits: leave the width out, or quantize the original model with "
            "--scheme w8a16g64asym --nested 2,3,4, which makes slices of 2, 3 and 4 bits"
        )
    format = found.scheme.weights
    if width not in found.nested:
        widths = [*map(str, found.nested), str(format.bits)]
        raise CheckpointError(f"{source.path} has the widths {', '.join(widths)}, not {width}")

    def narrowed(scheme: Scheme) -> Scheme:
        return replace(scheme, weights=replace(format, bits=width)) if scheme.weights == format else scheme

    layers = [name.removesuffix(".weight_packed") for name in source.entries if name.endswith(".weight_packed")]
    layers = [name for name in layers if found.scheme_of(name).weights == format]
    own = {f"{name}.{part}": name for name in layers for part in PARTS}
    try:
        with ShardWriter(folder, header_room([*source.entries])) as writer:
            for name in source.entries:
                if name not in own:
                    writer.add(name, source.read(name))
                elif name.endswith(".weight_packed"):
                    weight = sliced(read_layer(source, own[name], format), width)
                    for part, tensor in QuantLinear.tensors_of(weight).items():
                        writer.add(f"{own[name]}.{part}", tensor)
        source.copy_companions(folder)
        overrides = {name: str(narrowed(scheme)) for name, scheme in found.overrides.items()}
        quantization = configuration(
            narrowed(found.scheme), found.kept, found.group_index, found.hadamard, overrides=overrides
        )
        config = {**source.config, "quantization_config": quantization}
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
