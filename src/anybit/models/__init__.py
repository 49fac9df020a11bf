"""What models look like: which layers they have and which of them are quantized."""
