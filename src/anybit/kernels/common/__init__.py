"""Code shared by several kernels."""
