"""Post-training quantization: round-to-nearest, and the calibrated and learned methods."""
