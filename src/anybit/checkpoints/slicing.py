"""Slices of nested models: the folder that the top bits of every code make by themselves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from anybit.checkpoints.configuration import Overrides
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.verify import check_values
from anybit.checkpoints.writing import rewrite
from anybit.codes.nested import sliced
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError
from anybit.layers.linear import PARTS, QuantLinear
from anybit.scheme import Scheme, WeightFormat


def read_layer(source: Folder, name: str, format: WeightFormat) -> QuantizedWeight:
    """Read a layer of a folder that anybit wrote. Raises CheckpointError for values that no layer has."""
    parts = {p: source.read(f"{name}.{p}", finite=True) for p in PARTS if f"{name}.{p}" in source.entries}
    check_values(name, parts)
    n, k = (int(size) for size in parts["weight_shape"].tolist())
    return QuantLinear.weight_of(parts, (n, k), format)


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

    narrow = {layer for layer in source.layers if found.scheme_of(layer).weights == format}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in source.entries:
            layer, _, part = name.rpartition(".")
            if layer not in narrow or part not in PARTS:
                yield name, source.read(name)
            elif part == "weight_packed":
                weight = sliced(read_layer(source, layer, format), width)
                yield from ((f"{layer}.{own}", tensor) for own, tensor in QuantLinear.tensors_of(weight).items())

    overrides = Overrides((name, narrowed(scheme)) for name, scheme in found.overrides.items())
    quantization = replace(found, scheme=narrowed(found.scheme), overrides=overrides, nested=[])
    rewrite(source, folder, {**source.config, "quantization_config": quantization.entry()}, tensors())
