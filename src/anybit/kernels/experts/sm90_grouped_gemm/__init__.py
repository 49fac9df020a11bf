"""The kernel sm90_grouped_gemm: device code and host side."""
