"""The kernel sm90_skinny: device code and host side."""
