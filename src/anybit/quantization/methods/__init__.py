"""The quantization methods, one module each; ``METHODS`` and ``quantize_folder`` come from ``registry``."""

from anybit.quantization.methods.registry import METHODS, Method, quantize_folder

__all__ = ["METHODS", "Method", "quantize_folder"]
