"""The kernel kv_quantize: device code and host side."""
