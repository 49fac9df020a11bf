"""Products of bit planes on binary and integer tensor cores."""
