"""Attention over a low-bit KV cache."""
