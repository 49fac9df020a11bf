"""The kernel kv_unpack: device code and host side."""
