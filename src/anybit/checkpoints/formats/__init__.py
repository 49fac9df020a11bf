"""Readers of models quantized by other tools: one module per format, with its ``Format``.

To add a format, add a module and list it in ``FORMATS``. GGUF is separate: ``gguf_blocks`` and ``gguf_file``.
"""

from collections.abc import Mapping

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
from anybit.checkpoints.formats.stored import Format

_MODULES = (gptq, awq, auto_round, compressed_tensors, marlin_24, hqq, bitnet, bitsandbytes, fp8, fp4)
FORMATS = (*(module.FORMAT for module in _MODULES), fp4.MXFP4)


def format_of(config: Mapping[str, object]) -> Format | None:
    """The format that reads another tool's config.json; None if there is none, or it is not quantized."""
    quantization = config.get("quantization_config")
    found = quantization if isinstance(quantization, dict) else {}
    return next((format for format in FORMATS if format.matches(found)), None)
