"""Norms, SiLU, RoPE, Hadamard transforms, and quantization of activations."""
