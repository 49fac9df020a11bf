"""From floating-point weights to codes: rounding, and the calibrated methods."""
