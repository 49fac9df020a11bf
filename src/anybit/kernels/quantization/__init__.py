"""Kernels that quantizers run."""
