"""The kernel halve: device code and host side."""
