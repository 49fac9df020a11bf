"""One product with 4-bit weights, timed beside torch's own: python examples/matmul.py [SCHEME] [TOKENS]

On a GPU it runs anybit's kernels; on a CPU the exact reference, which is slow and there to check results.
"""

import sys
import time

import torch

import anybit


def milliseconds(call, repeats: int = 50) -> float:
    """The mean time of a call, after three that warm up."""
    for _ in range(3):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    scheme = sys.argv[1] if len(sys.argv) > 1 else "w4a16g128"
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    cuda = torch.cuda.is_available()
    device, dtype, n, k = ("cuda", torch.float16, 28672, 4096) if cuda else ("cpu", torch.float32, 512, 512)
    dense = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
    x = torch.randn(tokens, k, device=device, dtype=dtype)
    weight = anybit.quantize(dense, scheme)
    y, exact = anybit.matmul(x, weight), x @ dense.T
    error = ((y - exact).norm() / exact.norm()).item()
    ours = milliseconds(lambda: anybit.matmul(x, weight))
    torchs = milliseconds(lambda: x @ dense.T)
    print(f"{scheme}, {tokens} x {n} x {k} on {device}: anybit {ours:.3f} ms, torch {torchs:.3f} ms, ", end="")
    print(f"relative error {error:.3f} (what the scheme itself loses)")


if __name__ == "__main__":
    main()
