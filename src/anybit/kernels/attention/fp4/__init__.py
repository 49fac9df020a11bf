"""The kernel fp4: device code and host side."""
