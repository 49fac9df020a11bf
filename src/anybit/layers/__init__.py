"""Quantized layers as torch modules, and the same without modules."""
