"""The kernel decode: device code and host side."""
