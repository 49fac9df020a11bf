"""The kernel sm90_stacked: device code and host side."""
