"""Every legal config of a bit-plane product, for compute-sanitizer, or in graphs of many in random order:

    compute-sanitizer --tool memcheck --report-api-errors no python3 tests/kernels/sanitize_space.py w4a8 1176 5120 5120
    python3 tests/kernels/sanitize_space.py w4a8 1176 5120 5120 --graphs 40

Results must be bitwise equal. ``--part 0 2`` takes every second config; ``--compile`` only compiles, without a GPU.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS), str(TESTS / "emulator")]

import torch  # noqa: E402

from anybit import jit  # noqa: E402
from anybit.kernels.bitplane import bitplane, bitplane_layout  # noqa: E402
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm  # noqa: E402
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm  # noqa: E402
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident  # noqa: E402
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny  # noqa: E402
from anybit.kernels.block import quantize_activations  # noqa: E402
from anybit.kernels.common.types import Output  # noqa: E402
from anybit.kernels.gemm_kernel import GemmKernel  # noqa: E402
from anybit.kernels.linear_problem import LinearProblem  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from cases import random_weight  # noqa: E402
from cases_bitplane import H200  # noqa: E402

TOGETHER = 24
"""Products per graph."""


def space(m: int, n: int, k: int, scheme: Scheme) -> list[tuple[GemmKernel[Any], Any]]:
    """All families' configs."""
    problem = LinearProblem(m, n, k, scheme.weights, scheme.activations, device=H200)
    families = (sm90_bitplane_gemm, sm90_bitplane_skinny, sm90_bitplane_resident, sm80_bitplane_gemm)
    return [(family, config) for family in families for config in family.configs(problem)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheme", type=Scheme.parse)
    parser.add_argument("shape", type=int, nargs=3, metavar=("M", "N", "K"))
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("WHICH", "OF"))
    parser.add_argument("--graphs", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    m, n, k = options.shape
    found = space(m, n, k, options.scheme)[options.part[0] :: options.part[1]]
    if options.compile:
        for family, config in found:
            jit.cached(family.kernel(config), H200.arch)
        print(f"{len(found)} kernels compiled")
        return
    weight = bitplane_layout.prepare(random_weight(n, k, options.scheme.weights).to("cuda"))
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).half().cuda()
    first: torch.Tensor | None = None
    began = time.perf_counter()
    for i, (_, config) in enumerate(found):
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {len(found) - i} of {len(found)} configs")
            found = found[:i]
            break
        try:
            y = bitplane.multiply(
                quantize_activations.quantize(x, options.scheme.activations), weight, Output.f16, config=config
            )
            torch.cuda.synchronize()
        except RuntimeError:
            print(f"fault of config {i}: {config}", flush=True)
            raise
        first = y if first is None else first
        assert torch.equal(y, first), f"other bits of config {i}: {config}"
    print(f"{len(found)} configs one by one: equal bits", flush=True)
    assert first is not None
    if options.graphs:
        in_graphs(found, x, weight, first, options)


def in_graphs(
    found: list[tuple[GemmKernel[Any], Any]], x: torch.Tensor, weight: Any, first: torch.Tensor, options: Any
) -> None:
    """Configs in random order, each after the quantizer, as in the tuner's races."""
    stream, began, rounds = torch.cuda.Stream(), time.perf_counter(), 0
    while time.perf_counter() - began < options.graphs:
        rounds += 1
        random.Random(rounds).shuffle(found)
        for start in range(0, len(found), TOGETHER):
            chosen, graph = found[start : start + TOGETHER], torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin()
                results = [
                    bitplane.multiply(
                        quantize_activations.quantize(x, options.scheme.activations), weight, Output.f16, config=config
                    )
                    for _, config in chosen
                ]
                graph.capture_end()
                for _ in range(4):
                    graph.replay()
            try:
                stream.synchronize()
            except RuntimeError:
                print("fault in a graph of", *(config for _, config in chosen), sep="\n", flush=True)
                raise
            for (_, config), y in zip(chosen, results, strict=True):
                assert torch.equal(y, first), f"other bits in a graph: {config}"
            if time.perf_counter() - began > options.graphs:
                break
    print(f"{rounds} rounds of graphs of {len(found)} configs: equal bits")


if __name__ == "__main__":
    main()
