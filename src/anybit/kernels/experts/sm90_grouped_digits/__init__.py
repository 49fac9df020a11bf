"""The kernel sm90_grouped_digits: device code and host side."""
