"""The kernel sm90_gemv: device code and host side."""
