"""The kernel combine: device code and host side."""
