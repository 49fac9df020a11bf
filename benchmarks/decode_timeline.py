"""When the blocks of decode attention start, read, merge and end: the clocks that warps leave behind.

    python benchmarks/decode_timeline.py [8x32768 ...] [--kv kv4g128] [--ahead 0]

Prints, in microseconds since the previous launch of a chain ended, when the first, a tenth, half, nine tenths and the
last of the warps passed each phase; the median of launches of one CUDA graph.
"""

import argparse
import dataclasses
import itertools

import torch
from torch import Tensor

from anybit.attention import decode_kernel
from anybit.device import Device
from decode_attention import Row, config_of, fill
from timing import Captured

PHASES = {
    0: "block started",
    1: "ring asked for",
    8: "ring there",
    2: "previous kernel ended",
    10: "queries there",
    13: "first keys done",
    3: "first block done",
    4: "loop ended",
    6: "all warps of the block ended",
    11: "part written",
    12: "part counted",
    9: "merge: states there",
    14: "merge: parts added",
    7: "ended",
}
"""Numbers of ``stamp`` in decode.cuh and decode_merge.cuh; 5 is the multiprocessor."""


def record(row: Row, calls: int = 10, **changes: int) -> Tensor:
    """Nanoseconds [calls, blocks, warps, 16] of launches that follow one another."""
    cache, sequences = fill(row)
    device = Device.of(cache.table)
    config = dataclasses.replace(config_of(row, device), stamped=True, **changes)
    blocks = device.sms * config.blocks_per_sm
    words = torch.zeros(calls, 32 + 16 * blocks * config.warps, dtype=torch.int32, device="cuda")
    q = torch.randn(row.batch, 1, row.heads, 128, device="cuda").half()
    out = torch.empty_like(q)
    graph = Captured(
        lambda i: decode_kernel(q, cache, i % cache.layers, sequences, config=config, out=out, errors=words[i]), calls
    )
    for _ in range(3):
        us = graph.replay()
    print(f"{row.kv} {row.batch} x {row.context}: {us:.1f} us a launch, {config.warps} x {config.stages}")
    return (words[:, 32:].cpu().long() & 0xFFFFFFFF).reshape(calls, blocks, config.warps, 16)


def show(times: Tensor) -> None:
    """Print the phases."""
    marks = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    for phase, name in PHASES.items():
        found = []
        for before, now in itertools.pairwise(times[2:]):
            at = now[..., phase][now[..., phase] > 0].double()
            at = at - before[..., 7].max()
            at = at[at.abs() < 1e5]  # what an earlier launch left where this one passed no such phase
            if len(at):
                found.append(at.quantile(marks) / 1e3)
        if found:
            print(f"    {name:30s}", *(f"{x:7.2f}" for x in torch.stack(found).median(0).values.tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["1x131072", "8x32768", "32x8192", "64x4096"])
    parser.add_argument("--kv", default="kv4g128")
    parser.add_argument("--ahead", type=int, help="blocks that L2 is asked for early (default: the kernel's choice)")
    options = parser.parse_args()
    changes = {} if options.ahead is None else {"ahead": options.ahead}
    for shape in options.shapes:
        batch, context = (int(n) for n in shape.split("x"))
        show(record(Row("main", options.kv, batch, context), **changes))


if __name__ == "__main__":
    main()
