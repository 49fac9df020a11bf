"""The kernel sm90_experts_gemv: device code and host side."""
