"""Kernels of the quantization methods."""
