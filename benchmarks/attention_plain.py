"""Decode attention over vLLM's own 16-bit pages, after the kernel that writes a step's tokens to them.

    python benchmarks/attention_plain.py          into results/h200/decode_attention.json, case "plain pages"

A call is what a layer of a decode step launches, rotary embedding with the cache write and then attention, over enough
layers to exceed L2; ``store_us`` is the first kernel alone. If installed, vLLM's FlashAttention 3 is timed
interleaved, called as vLLM does in CUDA graphs. Each row is first checked against attention in float64.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch

from anybit.device import Device
from anybit.kernels.attention.decode import decode as kernels
from anybit.ops import kv_plain, pages
from timing import RESULTS, Captured, Row, merge_rows, read_floor_us, stamp, time_exactly, worst_of

HEADS, KV_HEADS, DIM, PAGE, CAPACITY = 32, 8, 128, 16, 8192
SHAPES = (
    *((batch, 128, 256) for batch in (64, 256, 16, 1)),
    *((64, 1, 2048), (64, 4000, 4192), (1, 8000, 8192)),
)
"""Requests, shortest context, longest context."""
KEY = ("case", "kv", "batch", "context", "shortest")


class Layers:
    """Caches of several layers, and a step's tokens."""

    def __init__(self, batch: int, shortest: int, longest: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (batch,), device="cuda", generator=draw, dtype=torch.int32)
        each = -(-CAPACITY // PAGE)
        used = int((-(-lengths // PAGE)).sum())
        self.bytes = int(lengths.sum()) * KV_HEADS * DIM * 4
        self.count = max(2, min(32, math.ceil(300e6 / self.bytes)))
        self.pools = [
            torch.randn(used, KV_HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.float16, generator=draw)
            for _ in range(self.count)
        ]
        places = torch.randperm(used, device="cuda", generator=draw).to(torch.int32)
        self.table = torch.zeros(batch, each, dtype=torch.int32, device="cuda")
        begin = 0
        for row, n in zip(self.table, lengths.tolist(), strict=True):
            row[: -(-n // PAGE)] = places[begin : begin + -(-n // PAGE)]
            begin += -(-n // PAGE)
        self.lengths, self.positions = lengths, lengths.long() - 1
        last = self.table.gather(1, (self.positions // PAGE)[:, None])[:, 0].long()
        self.slots = last * PAGE + self.positions % PAGE
        self.angles = torch.randn(CAPACITY, DIM, device="cuda", dtype=torch.float16, generator=draw)
        self.qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.float16, generator=draw)
        self.out = torch.empty(batch, HEADS, DIM, device="cuda", dtype=torch.float16)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

    def store(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch the first kernel; returns queries, keys and values."""
        keys, values = self.pools[i % self.count].transpose(1, 2).split(DIM, dim=-1)
        step = pages.RopePagesArgs(self.angles, self.positions, keys, values, self.slots, HEADS, KV_HEADS)
        return pages.rotate_pages(step, self.qkv), keys, values

    def attend(self, i: int) -> None:
        """Launch both kernels."""
        q, keys, values = self.store(i)
        kv_plain.decode(q, keys, values, self.table, self.lengths, out=self.out, capacity=CAPACITY, overlaps=True)

    def vllm(self) -> Callable[[int], object] | None:
        """The first kernel and vLLM's attention, if installed."""
        try:
            from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata
        except ImportError:
            return None
        batch, most = len(self.lengths), int(self.lengths.max())
        plan = get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=CAPACITY, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
            headdim=DIM, cache_seqlens=self.lengths, qkv_dtype=torch.float16, cu_seqlens_q=self.starts,
            page_size=PAGE, causal=True, window_size=(-1, -1), num_splits=32,
        )  # fmt: skip

        def call(i: int) -> None:
            q, keys, values = self.store(i)
            flash_attn_varlen_func(
                q=q, k=keys, v=values, out=self.out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=self.lengths,
                max_seqlen_k=max(most, CAPACITY), softmax_scale=DIM**-0.5, causal=True, window_size=[-1, -1],
                block_table=self.table, scheduler_metadata=plan, fa_version=3, num_splits=32,
            )  # fmt: skip

        return call

    def error(self, call: Callable[[int], object]) -> float:
        """Error of a call against float64 on the shortest and longest sequence; poisons the output first."""
        self.out.fill_(torch.nan)
        call(0)
        q, keys, values = self.store(0)
        worst = 0.0
        for row in {int(self.lengths.argmin()), int(self.lengths.argmax()), len(self.lengths) // 2}:
            n = int(self.lengths[row])
            here = self.table[row, : -(-n // PAGE)].long()
            k, v = (x[here].flatten(0, 1)[:n].double() for x in (keys, values))
            groups = q[row].double().unflatten(0, (KV_HEADS, -1))
            weights = torch.softmax(torch.einsum("kgd,nkd->kgn", groups, k) * DIM**-0.5, -1)
            want = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1)
            worst = worst_of((worst, float((self.out[row].double() - want).abs().mean() / want.abs().mean())))
        return worst


def measure(shape: tuple[int, int, int]) -> Row:
    """Measure one row; raises AssertionError if a result is wrong."""
    layers, device = Layers(*shape), Device.of(torch.empty(0, device="cuda"))
    asked = kv_plain.problem(PAGE, HEADS, KV_HEADS, DIM, torch.float16, kv_plain.NO_MASKS, CAPACITY, shape[0])
    theirs, error = layers.vllm(), layers.error(layers.attend)
    if not error < 2e-3:
        raise AssertionError(f"{shape}: relative error {error}")
    if theirs is not None and not layers.error(theirs) < 2e-3:
        raise AssertionError(f"{shape}: vLLM's relative error {layers.error(theirs)}: it was called wrongly")
    calls = [layers.store, layers.attend, *([] if theirs is None else [theirs])]
    times = [round(found.us, 2) for found in time_exactly([Captured(call, 2 * layers.count) for call in calls], 9)]
    config = kernels.default(asked, device)
    return {
        "checked": True, "case": "plain pages", "kv": "float16", "batch": shape[0], "shortest": shape[1],
        "context": shape[2], "heads_q": HEADS, "heads_kv": KV_HEADS, "page": PAGE, "us": times[1], "store_us": times[0],
        "floor_us": round(read_floor_us(layers.bytes), 2), "bytes": layers.bytes, "error": error,
        "warps": config.warps, "stages": config.stages,
        "baselines": {} if theirs is None else {"vllm flash attention 3": times[-1]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "decode_attention.json")
    options = parser.parse_args()
    for shape in SHAPES:
        try:
            row = measure(shape)
        except AssertionError as wrong:  # skip a wrong row, still write the others
            print("WRONG", wrong, flush=True)
            continue
        shown = ("batch", "shortest", "context", "us", "store_us", "floor_us", "error", "baselines")
        print({name: row[name] for name in shown}, flush=True)
        merge_rows(options.out, [row | stamp()], KEY)


if __name__ == "__main__":
    main()
