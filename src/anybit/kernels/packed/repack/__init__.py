"""The kernel repack: device code and host side."""
