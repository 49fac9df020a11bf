"""Norms, activations, rotary embedding, rotations, and the quantization of activations."""
