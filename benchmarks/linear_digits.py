"""sm80_packed_digits beside the kernel that runs today, timed in chains of products: narrow weights at few tokens.

python benchmarks/linear_digits.py --compile       # compile the kernels of all rows; needs no GPU
python benchmarks/linear_digits.py                 # all rows: floor, today's time, every config's
python benchmarks/linear_digits.py --bits 2 --tokens 4 16 --shapes 14336x12288 --all

A chain is one CUDA graph under programmatic dependent launch, over weight copies that together exceed L2; `digitize` is
part of the time. Every config is checked against float64 before it is timed.
"""

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from anybit import jit
from anybit.choose import heuristics
from anybit.choose.builtin import step
from anybit.choose.dispatch import dispatcher
from anybit.choose.families import FAMILIES, tiles_of
from anybit.device import Device
from anybit.jit import Plan, Slot
from anybit.kernels.gemm_kernel import GemmKernel, Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.scheme import Scheme
from anybit.tune.roofline import read_us
from cases import Case
from linear_packed import random_weight
from timing import Captured, calls_for, time_in_turns

SHAPES = ((14336, 12288), (28672, 4096))
MMA = {(1, 8): (2, 3, 4, 6), (2, 6): (2, 3, 4), (1, 12): (2, 3), (2, 8): (2, 3), (1, 16): (2, 3), (2, 4): (3,)}
WGMMA = {(4, 2): (3, 4, 6), (4, 3): (3, 4), (4, 4): (3, 4), (8, 1): (3, 4), (8, 2): (3,)}
"""Stages by (row_warps, k_warps) of the configs that are timed without --all."""


def asked(scheme: str, m: int, n: int, k: int) -> LinearProblem:
    """A problem of an H200."""
    return LinearProblem(m, n, k, Scheme.parse(scheme).weights, device=Device.named("sm_90a"))


def configs(p: LinearProblem, everything: bool) -> list[Any]:
    """The digits configs to time."""
    if everything:
        return list(sm80_packed_digits.configs(p))
    found = []
    for wgmma, shapes in ((False, MMA), (True, WGMMA)):
        if wgmma <= (p.m > 4) and (wgmma or p.m <= 8):
            for warps, depths in shapes.items():
                for stages, cluster in itertools.product(depths, (1, 2)):
                    found.append(sm80_packed_digits.fitted(p, *warps, stages, cluster, wgmma))
    return list(dict.fromkeys(c for c in found if sm80_packed_digits.why_not(p, c) is None))


def today(p: LinearProblem) -> tuple[GemmKernel[Any], Any]:
    """What runs without digits: the map's choice."""
    like = LinearProblem(step(p.m), p.n, p.k, p.weights, device=p.device)
    chosen = dispatcher(p.device.name).choose(like, tiles_of(p.activations)).candidate
    return FAMILIES[chosen.kernel].module, heuristics.limit_occupancy(chosen.config, p.device)


def ways(p: LinearProblem, everything: bool) -> Iterator[tuple[GemmKernel[Any], Any]]:
    """Today's kernel, then digits."""
    yield today(p)
    for config in configs(p, everything):
        yield sm80_packed_digits, config


def compile_launches(work: tuple[LinearProblem, bool, int, int]) -> int:
    """Compile every ``of``-th launch of a problem, from the ``first`` on; the number of kernels."""
    p, everything, first, of = work
    slots = tuple(Slot(name) for name in "0123")
    operands = Operands(Slot("x"), p.k, slots, Slot("y"), p.n, scratch=(Slot("s"), Slot("z")))
    made = (launches(kernel, operands, p, config) for kernel, config in ways(p, everything))
    mine = sorted({launch.kernel for one in made for launch in one}, key=repr)[first::of]
    for kernel in mine:
        jit.cached(kernel, p.device.arch)
    return len(mine)


class Layer:
    """Weights of a scheme on the GPU, enough copies to defeat L2, and float64 results of some rows."""

    def __init__(self, scheme: str, n: int, k: int) -> None:
        quantized = random_weight(Case("", 1, n, k), Scheme.parse(scheme))
        packed = packed_tiles.prepare(quantized, "a16")
        self.bytes = packed.tiles.numel() + 4 * n
        count = max(3, -(-(256 << 20) // self.bytes))
        self.tiles = [packed.tiles, *(packed.tiles.clone() for _ in range(count - 1))]
        self.rest = [None if one is None else one.data_ptr() for one in packed.pointers[1:]]
        self.keep = packed
        self.rows = torch.randperm(n, device="cuda")[:512]
        self.values = quantized.dequantize(torch.float64)[self.rows].cuda()
        self.rounded = quantized.dequantize(torch.float16)[self.rows].double().cuda()

    def chain(self, p: LinearProblem, kernel: GemmKernel[Any], config: Any, x: torch.Tensor) -> tuple[Captured, float]:
        """A chain of products, and the error of one before y is rounded to 16 bits, as far as that shows."""
        y = torch.full((p.m, p.n), torch.nan, dtype=p.dtype, device="cuda")
        sizes = kernel.traits.scratch(p, config)
        scratch = tuple(torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda") for size in sizes)
        slots = tuple(Slot(name) for name in "0123")
        operands = Operands(x, x.stride(0), slots, y, p.n, scratch=scratch)  # type: ignore[arg-type]
        plan = Plan(launches(kernel, operands, p, config), "0123", 0)
        places = [[tiles.data_ptr(), *(one or 0 for one in self.rest)] for tiles in self.tiles]
        plan.run(places[0])
        error = self.error(y[:, self.rows], x)
        y.fill_(torch.nan)
        plan.run(places[1])
        error = max(error, self.error(y[:, self.rows], x))

        def call(i: int, keep: object = (scratch, y, plan)) -> None:
            plan.run(places[i % len(places)])

        calls = calls_for(15.0, len(places), 1600.0)
        return Captured(call, calls - calls % len(places)), error

    def error(self, y: torch.Tensor, x: torch.Tensor) -> float:
        """Of the chosen rows' results, relative to float64."""
        wanted = x.double() @ self.values.T
        found = float((y.double() - wanted).norm() / wanted.norm())
        return found if found == found else float("inf")


def main() -> None:
    """Print a line a config, best first, and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES])
    parser.add_argument("--all", action="store_true", help="time every config")
    parser.add_argument("--best", type=int, default=6, help="configs to print")
    parser.add_argument("--workers", type=int, default=12)
    asks = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in asks.shapes]
    layers = [(f"w{bits}a16g128", n, k) for (n, k), bits in itertools.product(shapes, asks.bits)]
    problems = [asked(scheme, m, n, k) for (scheme, n, k), m in itertools.product(layers, asks.tokens)]
    work = [(p, asks.all, first, 4) for p, first in itertools.product(problems, range(4))]
    with multiprocessing.get_context("fork").Pool(asks.workers) as pool:
        print(f"{sum(pool.imap_unordered(compile_launches, work))} kernels are compiled", flush=True)
    if asks.compile:
        return
    table = []
    for scheme, n, k in layers:
        layer = Layer(scheme, n, k)
        for m in asks.tokens:
            p = asked(scheme, m, n, k)
            x = torch.randn(m, k, device="cuda").half()
            rounded = layer.error((x.double() @ layer.rounded.T).half(), x)
            made = [(kernel, config, *layer.chain(p, kernel, config, x)) for kernel, config in ways(p, asks.all)]
            times = [one.us for one in time_in_turns([chain for _, _, chain, _ in made], 9)]
            floor = read_us(layer.bytes + 2 * m * (n + k))
            order = sorted(range(len(made)), key=times.__getitem__)
            print(f"{scheme} {m} x {n} x {k}: floor {floor:.2f}, fp16 product of rounded weights {rounded:.1e}")
            for i in dict.fromkeys([0, *order[: asks.best], order[-1]]):
                kernel, c, _, error = made[i]
                how = (
                    f"{kernel.traits.name}"
                    if i == 0
                    else f"{c.row_warps} x {c.k_warps} warps, {c.units} units, {c.together} together, "
                    f"{'wgmma, ' * c.wgmma}"
                    f"{c.stages} stages, cluster {c.cluster_k}, {sm80_packed_digits.shared_bytes(c) >> 10} KB"
                )
                print(f"  {times[i]:7.2f} us  error {error:.1e}  {how}", flush=True)
            best = min(order, key=lambda i: (i == 0, times[i]))
            table.append((scheme, m, n, k, floor, times[0], times[best], made[best][3], rounded))
            del made
    print("scheme        tokens  shape            floor  today  digits  ratio  error    fp16's")
    for scheme, m, n, k, floor, before, now, *errors in table:
        found = "  ".join(f"{error:.1e}" for error in errors)
        print(f"{scheme:12} {m:6}  {n:5} x {k:5}  {floor:8.2f} {before:6.2f} {now:7.2f} {now / before:6.3f}  {found}")
    print(f"geometric mean {statistics.geometric_mean(row[6] / row[5] for row in table):.3f}")


if __name__ == "__main__":
    main()
