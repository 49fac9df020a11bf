"""The kernel router: device code and host side."""
