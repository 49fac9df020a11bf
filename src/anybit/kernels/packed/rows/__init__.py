"""The kernel rows: device code and host side."""
