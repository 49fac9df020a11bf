"""Readers of models quantized by other tools: one module per format, with the interface ``Format``.

To add a format, add a module and list it in ``FORMATS``. GGUF is separate: ``gguf_blocks`` and ``gguf_file``.
"""

from collections.abc import Mapping
from typing import Protocol

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
    mxfp4,
)
from anybit.checkpoints.formats.stored import Source, StoredLayer
from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme

__all__ = ["FORMATS", "Format", "Source", "StoredLayer", "format_of", "layers_of"]


class Format(Protocol):
    """How one tool stores its layers."""

    @property
    def NAME(self) -> str:  # noqa: N802  modules have constants
        """The format's name for users."""

    @property
    def MARKS(self) -> tuple[str, ...]:  # noqa: N802
        """Tensor names that mark a module as a quantized layer."""

    @property
    def TENSORS(self) -> tuple[str, ...]:  # noqa: N802
        """All tensor names that the format may store for a layer, except its bias."""

    def matches(self, config: Mapping[str, object], /) -> bool:
        """Whether a quantization_config describes this format."""

    def scheme(self, layer: StoredLayer, /) -> Scheme:
        """The scheme of a layer, without reading its codes. Raises CheckpointError if it cannot be read."""

    def read(self, layer: StoredLayer, /) -> QuantizedWeight:
        """The layer, with its codes unchanged. Raises CheckpointError, naming the layer, if it cannot be read."""


FORMATS: tuple[Format, ...] = (
    gptq, awq, auto_round, compressed_tensors, marlin_24, hqq, bitnet, bitsandbytes, fp8, fp4,
    mxfp4,
)  # fmt: skip


def format_of(config: Mapping[str, object]) -> Format | None:
    """The format that reads another tool's config.json; None if there is none, or it is not quantized."""
    quantization = config.get("quantization_config")
    found = quantization if isinstance(quantization, dict) else {}
    return next((format for format in FORMATS if format.matches(found)), None)


def layers_of(format: Format, source: Source, quantization: Mapping[str, object]) -> dict[str, StoredLayer]:
    """The quantized layers of a model in a format, by name. quantization: the config's quantization_config."""
    names = {
        name.removesuffix(f".{mark}") for mark in format.MARKS for name in source.entries if name.endswith(f".{mark}")
    }
    return {name: StoredLayer(source, name, quantization) for name in sorted(names)}
