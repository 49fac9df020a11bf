"""From a model folder to a quantized one: which layers, which inputs, in which order."""
