"""The kernel sm90_resident: device code and host side."""
