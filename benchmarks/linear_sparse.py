"""2:4 sparse against dense weights of the same width, cuBLAS and cuSPARSELt: rows as in linear_packed.py.

python benchmarks/linear_sparse.py --compile       # compile the kernels of all rows; needs no GPU
python benchmarks/linear_sparse.py --seconds 90    # into results/<machine>/sparse.json

A layer at one M is timed in one run: interleaved up to 128 tokens, and from 256 on each after running alone for
half a second (`steady`), since at the power limit an interleaved kernel inherits the clock that the one before left.
cuSPARSELt multiplies 16-bit and int8 weights with the algorithm that its own search chooses. That search can die of
an illegal instruction (fp16, results [tokens, outputs], torch 2.11 and cuSPARSELt 0.8.0): each product is first tried
in its own process, and omitted if that fails.
"""

import argparse
import functools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from anybit.scheme import Scheme
from cases import LLAMA3_8B, Case
from linear_packed import job_of, measure
from timing import RESULTS, SPARSE_VENDORS, without_crash

TOKENS = (1, 2, 16, 32, 64, 128, 256, 1024, 4096)
"""Tokens of gate_up with 4-bit codes; other layers and widths use ``FEW_TOKENS``, unless given."""
FEW_TOKENS = (1, 16, 64, 1024)
PAIRS = ("w4a16g128", "w4a8", "w2a16g128", "w8a16g128", "w4a16g128asym")
HOT_TOKENS, HOT_SECONDS = 256, 0.5


def asked(tokens: Sequence[int] | None, schemes: Sequence[str] | None) -> Iterator[tuple[Case, str]]:
    """Every requested row: layer by layer, largest first, M by M, dense and sparse."""
    for layer, (n, k) in sorted(LLAMA3_8B.items(), key=lambda item: -item[1][0] * item[1][1]):
        whole = layer == "gate_up"
        for m in tokens or (TOKENS if whole else FEW_TOKENS):
            for text in schemes or (PAIRS if whole else PAIRS[:2]):
                lean = text not in PAIRS[:2] and m not in FEW_TOKENS and schemes is None
                if lean or (m < 16 and Scheme.parse(text).activations.quantized):
                    continue
                for scheme in (text, f"{text}s24"):
                    yield Case(f"llama-3-8b {layer}", m, n, k), scheme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="only compile; needs no GPU")
    parser.add_argument("--only", nargs="*", choices=tuple(LLAMA3_8B), default=list(LLAMA3_8B), help="layers")
    parser.add_argument("--tokens", type=int, nargs="*", help="of every layer")
    parser.add_argument("--schemes", nargs="*", choices=PAIRS, help="dense ones, each with its 2:4")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of x and y")
    parser.add_argument("--vendors", nargs="*", choices=SPARSE_VENDORS, default=SPARSE_VENDORS, help="timed beside")
    parser.add_argument("--seconds", type=float, default=90.0, help="start nothing after this many seconds")
    parser.add_argument("--again", action="store_true", help="repeat rows of this commit")
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "sparse.json")
    parser.set_defaults(no_baselines=False, humming=(), humming_models=())
    options = parser.parse_args()
    begin = time.monotonic()
    wanted = [
        (case, scheme)
        for case, scheme in asked(options.tokens, options.schemes)
        if case.name.split()[1] in options.only
    ]
    job = functools.partial(job_of, dtype=getattr(torch, options.dtype))
    # Fork these processes before CUDA is initialized; they compile into the disk cache.
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        jobs = (found for found in pool.imap(job, wanted) if found is not None)
        if options.compile:
            print(f"{sum(1 for _ in jobs)} jobs compiled after {time.monotonic() - begin:.1f} s")
            return
        shapes = list(dict.fromkeys((case.m, case.n, case.k) for case, _ in wanted))
        usable = without_crash([name for name in options.vendors if "cusparselt" in name], shapes)

        def names(case: Case) -> list[str]:
            shape = (case.m, case.n, case.k)
            return [name for name in options.vendors if shape in usable.get(name, {shape})]

        measure(options, jobs, begin, names, lambda m: HOT_SECONDS if m >= HOT_TOKENS else 0.0)


if __name__ == "__main__":
    main()
