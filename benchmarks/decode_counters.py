"""A few launches of the KV cache's kernels, for Nsight Compute:

    ncu --clock-control none -k 'regex:^kernel$' --set full --csv --page raw python benchmarks/decode_counters.py

Attention at 1 x 131072 and 8 x 32768 with 4 and 2 bits, then storing: 32 windows that become full, and prompts of
131072 tokens. Every case is launched twice (a prompt is two launches), in this order.
"""

import torch

from anybit.attention import decode_kernel
from anybit.device import Device
from anybit.kvcache import KVCache
from decode_attention import DIM, Row, config_of, fill


def attention(kv: str, batch: int, context: int) -> None:
    """Two launches over different layers."""
    row = Row("main", kv, batch, context)
    cache, sequences = fill(row)
    config = config_of(row, Device.of(cache.table))
    q = torch.randn(batch, 1, row.heads, DIM, device="cuda").half()
    for call in range(2):
        decode_kernel(q, cache, call % cache.layers, sequences, config=config)
    torch.cuda.synchronize()


def store(kv: str, batch: int, tokens: int, length: int) -> None:
    """Two steps, or one prompt."""
    cache = KVCache(kv, layers=1, kv_heads=8, head_dim=DIM, sequences=batch, capacity=length + 128, device="cuda")
    cache.residual.normal_()
    k, v = (torch.randn(batch, tokens, 8, DIM, device="cuda").half() for _ in range(2))
    every = [cache.add() for _ in range(batch)]
    cache.extend(every, length)
    for _ in range(2 if tokens == 1 else 1):
        cache.write(0, every, k, v)
    torch.cuda.synchronize()


def main() -> None:
    for batch, context in ((1, 131072), (8, 32768)):
        for kv in ("kv4g128", "kv2g128"):
            attention(kv, batch, context)
    for kv in ("kv4g128", "kv4g128t"):
        store(kv, 32, 1, 256)
    for kv in ("kv4g128", "kv8g128t"):
        store(kv, 1, 131072, 131072)


if __name__ == "__main__":
    main()
