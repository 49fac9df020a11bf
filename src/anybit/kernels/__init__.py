"""Kernels: NAME.cuh runs on the GPU, NAME.py is its host side."""
