"""The kernel sm80_gemm: device code and host side."""
