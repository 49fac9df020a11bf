"""The kernel sm90_gemm: device code and host side."""
