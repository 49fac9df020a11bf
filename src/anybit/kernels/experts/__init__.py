"""Kernels of mixtures of experts, over packed weights."""
