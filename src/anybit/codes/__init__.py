"""What a quantized weight is, in plain torch: packing, rounding, rotations, shards, and the exact reference."""
