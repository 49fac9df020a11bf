"""Products with weights in tiles of codes, dequantized on the way to tensor cores."""
