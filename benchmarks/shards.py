"""What tensor parallelism leaves one GPU: each rank's part of every layer, checked on all ranks and timed on one.

    python benchmarks/shards.py [--ranks 1 2 4 8] [--tokens 1 16 64 2048] [--schemes w4a16g128 w4a8]

qkv and gate_up are cut by outputs, o and down by inputs (anybit.sharding), as vLLM cuts them. The last rank's part is
the one that is timed: of Qwen2.5-7B's down at 8 ranks it has groups of 64, since the cut falls inside groups of 128.
Timed as in linear_packed.py, without the exchange between GPUs. `ideal_us` is the whole layer's time over the ranks:
`us / ideal_us` says what a rank loses to its smaller product. Rows go to results/<gpu>/shards.json.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anybit.packing import QuantizedWeight
from anybit.scheme import Scheme
from anybit.sharding import shard, shard_format
from cases import LLAMA3_8B, Case
from linear_packed import Job, Run, Weights, job_of, random_weight, time_layer
from timing import RESULTS, merge_rows, stamp

LAYERS = {
    **{f"llama-3-8b {name}": shape for name, shape in LLAMA3_8B.items()},
    "llama-3-70b qkv": (10240, 8192),
    "llama-3-70b o": (8192, 8192),
    "llama-3-70b gate_up": (57344, 8192),
    "llama-3-70b down": (8192, 28672),
    "qwen2.5-7b down": (3584, 18944),
}
"""Name -> (N, K) of the whole layer."""


def by_inputs(name: str) -> bool:
    """Whether a layer's inputs are split (row-parallel) and not its outputs."""
    return name.split()[1] in ("o", "down")


def part(name: str, ranks: int) -> tuple[int, int]:
    """(N, K) of what one of ``ranks`` GPUs holds."""
    n, k = LAYERS[name]
    return (n, k // ranks) if by_inputs(name) else (n // ranks, k)


def scheme_of(name: str, text: str, ranks: int, rank: int) -> str:
    """The scheme of a rank's part: groups are smaller where its cut falls inside one."""
    weights, k = Scheme.parse(text).weights, part(name, ranks)[1]
    if not by_inputs(name) or weights.group is None:
        return text
    return text.replace(f"g{weights.group}", f"g{shard_format(weights, rank * k, k).group}")


def parts(name: str, layer: QuantizedWeight, ranks: int) -> Iterator[QuantizedWeight]:
    """The layers of all ranks, cut from the whole one."""
    n, k = part(name, ranks)
    for rank in range(ranks):
        rows = slice(rank * n, rank * n + n)
        yield (
            shard(layer, rank * k, k)
            if by_inputs(name)
            else replace(layer, words=layer.words[rows], scale=layer.scale[rows], shape=(n, k))
        )


def check_ranks(name: str, layer: QuantizedWeight, ranks: int) -> None:
    """Every rank's part stands for exactly the whole layer's weights. Raises AssertionError."""
    whole, n, k = layer.dequantize(torch.float32), *part(name, ranks)
    for rank, mine in enumerate(parts(name, layer, ranks)):
        columns = slice(rank * k, rank * k + k) if by_inputs(name) else slice(None)
        rows = slice(None) if by_inputs(name) else slice(rank * n, rank * n + n)
        if not torch.equal(mine.dequantize(torch.float32), whole[rows, columns]):
            raise AssertionError(f"{name}: rank {rank} of {ranks} holds other weights than the whole layer")


def job(asked: tuple[str, str, int, int, int]) -> Job:
    """The product of one rank, its kernels compiled: (layer, scheme, ranks, rank, tokens)."""
    name, text, ranks, rank, tokens = asked
    case = Case(f"{name} 1/{ranks}", tokens, *part(name, ranks))
    return job_of((case, scheme_of(name, text, ranks, rank)))


def check_product(one: Job, weights: Weights) -> None:
    """Multiply, and compare with the float64 product. Raises AssertionError."""
    case = one.case
    buffers = [torch.randn(case.m * max(case.n, case.k), device="cuda").half() for _ in range(2)]
    Run(one, weights, buffers, buffers[0][: case.m * case.k].view(case.m, case.k).clone())


def rows_of(name: str, text: str, ranks: list[int], tokens: list[int], jobs: dict[Any, Job]) -> list[dict[str, Any]]:
    """Rows of a layer in a scheme. Every rank's part is multiplied and compared; the last rank's is timed."""
    layer = random_weight(Case(name, 1, *LAYERS[name]), Scheme.parse(text))
    whole: dict[int, float] = {}
    found = []
    for count in ranks:
        check_ranks(name, layer, count)
        for rank, held in enumerate(parts(name, layer, count)):
            first = jobs[name, text, count, rank, tokens[0]]
            if by_inputs(name):  # fewer inputs: larger weights keep a chain of products from fading
                held = replace(held, scale=(held.scale * count**0.5).half().float())
            weights = Weights(first.case, Scheme.parse(first.scheme), held)
            check_product(first, weights)
        for m in tokens:
            one = jobs[name, text, count, count - 1, m]
            for row in time_layer([one], {one.scheme: weights}, {}, None):
                ideal = whole.setdefault(m, row["us"]) / count
                print(
                    f"{row['case']:26s} {row['scheme']:10s} M={m:<5d}{row['us']:8.2f} us, ideal {ideal:8.2f}",
                    flush=True,
                )
                found.append(row | {"ranks": count, "layer_scheme": text, "ideal_us": round(ideal, 3)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8], help="tensor-parallel sizes, 1 first")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 2048])
    parser.add_argument("--schemes", nargs="*", default=["w4a16g128", "w4a8"])
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "shards.json")
    options = parser.parse_args()
    names = [name for name in LAYERS if options.only in name]
    if options.ranks[0] != 1:
        parser.error(f"--ranks begins with {options.ranks[0]}: 1, the whole layer, must come first")
    first = options.tokens[0]
    asked = [
        (name, scheme, ranks, rank, m)
        for name in names
        for scheme in options.schemes
        for ranks in options.ranks
        for rank in range(ranks)
        for m in (options.tokens if rank == ranks - 1 else [first])
    ]
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        jobs = dict(zip(asked, pool.map(job, asked, chunksize=2), strict=True))
    marks = stamp()
    for name in names:
        for text in options.schemes:
            found = rows_of(name, text, options.ranks, options.tokens, jobs)
            merge_rows(options.out, [row | marks for row in found])


if __name__ == "__main__":
    main()
