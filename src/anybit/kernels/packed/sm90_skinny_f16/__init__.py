"""The kernel sm90_skinny_f16: device code and host side."""
