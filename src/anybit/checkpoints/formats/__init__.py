"""Models that other tools have quantized, read as anybit's own: a module a format, all with the interface ``Format``.

The next format is one file and a place in ``FORMATS``. GGUF is ``gguf_blocks`` and ``gguf_file``.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from anybit.checkpoints.formats import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp4,
    fp8,
    gptq,
    hqq,
    marlin_24,
)
from anybit.checkpoints.formats.stored import Source, StoredLayer
from anybit.packing import QuantizedWeight
from anybit.scheme import Scheme

__all__ = ["FORMATS", "Format", "Source", "StoredLayer", "format_of", "layers_of"]


class Format(Protocol):
    """How one tool stores its layers."""

    @property
    def NAME(self) -> str:  # noqa: N802  modules have constants
        """What users call it."""

    @property
    def MARKS(self) -> tuple[str, ...]:  # noqa: N802
        """A layer is what has a tensor of one of these names."""

    @property
    def TENSORS(self) -> tuple[str, ...]:  # noqa: N802
        """All that the format may store for a layer, beside its bias."""

    def matches(self, config: dict[str, Any], /) -> bool:
        """Whether a quantization_config is of this format."""

    def scheme(self, layer: StoredLayer, /) -> Scheme:
        """What a layer is quantized to, without reading its codes. Raises CheckpointError for what cannot be read."""

    def read(self, layer: StoredLayer, /) -> QuantizedWeight:
        """The layer, its codes untouched. Raises CheckpointError, naming the layer, for what cannot be read."""


FORMATS: tuple[Format, ...] = (
    gptq, awq, auto_round, compressed_tensors, marlin_24, hqq, bitnet, bitsandbytes, fp8, fp4,
)  # fmt: skip


def format_of(config: Mapping[str, Any]) -> Format | None:
    """The format of a config.json that another tool has written; None if nobody here reads it, or none is named."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    return next((format for format in FORMATS if format.matches(quantization)), None)


def layers_of(format: Format, source: Source, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantized layers of a model in a format, by name."""
    names = {
        name.removesuffix(f".{mark}") for mark in format.MARKS for name in source.entries if name.endswith(f".{mark}")
    }
    return {name: StoredLayer(source, name, config["quantization_config"]) for name in sorted(names)}
