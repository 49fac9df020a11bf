"""The kernel sm80_digits: device code and host side."""
