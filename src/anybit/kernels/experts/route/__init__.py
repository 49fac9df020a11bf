"""The kernel route: device code and host side."""
