"""Checkpoints: folders of safetensors, read and written safely. No pickle is ever loaded."""
