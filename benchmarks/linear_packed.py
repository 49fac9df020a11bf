"""Packed weights of 1 to 8 bits with 16-bit and 8-bit activations, timed in chains of dependent products.

python benchmarks/linear_packed.py --compile            # compile the kernels of all rows; needs no GPU
python benchmarks/linear_packed.py --seconds 200        # all rows, into results/h200/gemm_packed.json
python benchmarks/linear_packed.py --only gate_up --schemes w4a16g128 --tokens 1 16
python benchmarks/linear_packed.py --steady 0.2 --tokens 1024 4096 --schemes w4a8   # each kernel at its own clock

Chains run in one CUDA graph under programmatic dependent launch, over weight copies that together exceed L2: (the
beginning of) a product's output is the activations of the next. `us` includes the quantization of 8-bit
activations, `us_product` does not.
All schemes of a layer at one M, cuBLAS fp16, fp8 `_scaled_mm` and humming-kernels (if installed) are timed
interleaved, or, with --steady, each after running alone for so many seconds: at the power limit, an interleaved
kernel inherits the clock that the one before left. Rows already written by this commit are skipped (`--again`
repeats them), so an interrupted run continues.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path

import torch

import peers_humming
from anybit import jit
from anybit.choose import heuristics
from anybit.choose.builtin import step
from anybit.choose.dispatch import dispatcher
from anybit.choose.families import FAMILIES, tiles_of
from anybit.codes.packing import QuantizedWeight, table_of, words_per_row
from anybit.device import Device
from anybit.errors import KernelError, dtype_name
from anybit.jit import Slot
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.kernels.gemm_kernel import Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.repack import repack
from anybit.scheme import Scheme
from cases import LLAMA3_8B, MODELS, Case, random_places
from timing import (
    RESULTS,
    Captured,
    Row,
    Timing,
    VendorWeights,
    calls_for,
    floor_us,
    merge_rows,
    rotations,
    stamp,
    time_exactly,
)

LAYERS = tuple(LLAMA3_8B)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
BITS = (4, 2, 3, 8, 1, 6)
SCHEMES = (
    *(f"w{bits}a16g128" for bits in BITS),
    *(f"w{bits}a8" for bits in BITS),
    *(f"w{bits}a8fp" for bits in BITS if bits <= 4),  # e4m3 holds no wider codes exactly
)
RECORDED = ["llama-3-8b", "llama-2-7b", "qwen3-14b"]
VENDORS = ("cublas fp16", "fp8")
KEY = ("case", "scheme", "dtype", "m", "n", "k")
"""Key of a row; the default dtype is float16."""
CHAIN = 32
"""Products after which a chain restarts, so values neither overflow nor vanish."""
RATES = {"float": "e4m3", "sym": "s8"}


@dataclass(frozen=True)
class Job:
    """One row: a case, a scheme, and the kernel family and config that run it."""

    case: Case
    scheme: str
    family: str
    config: object
    dtype: torch.dtype = torch.float16

    @property
    def other_dtype(self) -> str | None:
        """The name of a dtype other than float16, which rows do not name."""
        return None if self.dtype == torch.float16 else dtype_name(self.dtype)


def job_of(asked: tuple[Case, str], dtype: torch.dtype = torch.float16) -> Job | None:
    """The job as ops/packed.py runs it, its kernels in the disk cache; prints why and returns None if none can."""
    case, text = asked
    scheme, device = Scheme.parse(text), Device.named("sm_90a")
    x = scheme.activations
    product = LinearProblem(step(case.m), case.n, case.k, scheme.weights, x, dtype, device)
    try:
        chosen = dispatcher(device.name).choose(product, tiles_of(x)).candidate
    except KernelError as error:
        print(f"{asked}: {error}", flush=True)
        return None
    name, config = chosen.kernel, heuristics.limit_occupancy(chosen.config, device)
    some = Slot("")
    operands = Operands(some, case.k, (some,) * 4, some, case.n, x_scale=some, x_sum=some, scratch=(some, some))
    made = launches(FAMILIES[name].module, operands, replace(product, m=case.m), config)
    kernels = [launch.kernel for launch in made]
    if not scheme.weights.sparse:
        kernels.append(repack.kernel(repack.config_of(scheme.weights, "a8" if x.quantized else "a16")))
    if x.quantized:
        problem = quantize_activations.Problem(case.m, case.k, x, dtype, target=Target.bytes)
        kernels.append(quantize_activations.kernel(quantize_activations.default(problem)))
    for kernel in kernels:
        jit.cached(kernel, device.arch)
    return Job(case, text, name, config, dtype)


def random_weight(case: Case, scheme: Scheme) -> QuantizedWeight:
    """Random codes, scales of both signs: a product has its input's size on average."""
    fmt, shape = scheme.weights, (case.n, case.k)
    bits, groups, kept = fmt.bits, fmt.groups(case.k), case.k // (1 + fmt.sparse)
    words = torch.randint(-(2**31), 2**31 - 1, (case.n, words_per_row(kept, bits)), dtype=torch.int32, device="cuda")
    square = ((1 << 2 * bits) - 1) / 12 + 0.25 * (fmt.code in ("sym", "asym"))  # mean square of a code minus its zero
    if fmt.code == "e4m3":
        words &= 0x77777777  # no NaN
    if fmt.tabled:
        square = float(table_of(fmt.code).float()[: 120 if fmt.code == "e4m3" else None].square().mean())
    scale = (torch.rand(case.n, groups, device="cuda") + 0.5) * 0.97 * (square * kept * 1.083) ** -0.5
    scale = (scale * (torch.randint(0, 2, scale.shape, device="cuda") * 2 - 1)).half().float()
    middle = 2 ** (bits - 1)
    zero = torch.full((case.n, groups), middle, dtype=torch.uint8, device="cuda") if fmt.code == "asym" else None
    minimum = -scale * (middle - 0.5) if fmt.code == "min" else None
    places = random_places(case.n, case.k) if fmt.sparse else None
    return QuantizedWeight(words, scale, zero, shape, fmt, indices=places, minimum=minimum)


class Weights:
    """A layer in one scheme: tiled copies, and float64 values of some rows; reused for every M."""

    def __init__(self, case: Case, scheme: Scheme, layer: QuantizedWeight | None = None) -> None:
        self.layer = layer = random_weight(case, scheme) if layer is None else layer
        order = "a8" if scheme.activations.quantized else "a16"
        packed_tiles.prepare(layer, order)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_stats()["requested_bytes.all.current"], time.perf_counter()
        packed = packed_tiles.prepare(layer, order)
        torch.cuda.synchronize()
        self.prepare_gb_s = layer.words.numel() * 4e-9 / (time.perf_counter() - begin)
        # Repacking's peak memory besides its input, in packed layers.
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        self.prepare_layers = (peak - before) / (packed.tiles.nbytes + packed.row_scale.nbytes)
        self.rows = torch.randint(0, case.n, (256,), device="cuda")
        self.sample = layer.rows(self.rows).dequantize(torch.float32).double()
        count = rotations(packed.tiles.numel(), 128)
        self.copies = [packed, *(replace(packed, tiles=packed.tiles.clone()) for _ in range(count - 1))]


def error_of(y: torch.Tensor, x: torch.Tensor, weights: Weights) -> float:
    """Mean relative error of some columns of y [m, n] against the float64 product of x [m, k]."""
    expected = x.double() @ weights.sample.T
    return float((y[:, weights.rows].double() - expected).abs().mean() / expected.abs().mean())


class Run:
    """A job, checked and captured; ``row`` makes its row from timings."""

    def __init__(self, job: Job, weights: Weights, buffers: list[torch.Tensor], x0: torch.Tensor) -> None:
        self.job, self.weights, self.buffers, self.x0 = job, weights, buffers, x0
        case, self.scheme = job.case, Scheme.parse(job.scheme)
        x = self.scheme.activations
        self.codes = Packed(case.m, case.k, x, Target.bytes, x0.device) if x.quantized else None
        self.problem = quantize_activations.problem_of(x0, x, Target.bytes)
        self.quantizer = quantize_activations.default(self.problem) if x.quantized else None
        self.error = self.check()
        size = weights.copies[0].tiles.numel() + case.m * case.k * (1 if x.quantized else 2) + 2 * case.m * case.n
        rate = "sparse " * self.scheme.weights.sparse + (RATES[x.code] if x.quantized else "f16")
        self.bytes, self.floor = size, floor_us(size, case.operations, rate)
        calls = calls_for(1.3 * self.floor, len(weights.copies), 900.0)
        self.graphs = {"us": Captured(self.call, calls)}
        if x.quantized:
            self.graphs["us_product"] = Captured(self.call_product, calls)

    def product(self, i: int, x: torch.Tensor, y: torch.Tensor, codes: bool = True) -> None:
        """Launch the product, after quantization."""
        weight = self.weights.copies[i % len(self.weights.copies)]
        config, coded = self.job.config, self.codes
        if coded is not None and codes:
            quantize_activations.launch(self.problem, self.quantizer, coded, x)
        multiply(FAMILIES[self.job.family].module, x if coded is None else coded, weight, y, config=config)

    def call(self, i: int, codes: bool = True) -> None:
        """Call i of a chain."""
        m, n, k = self.job.case.m, self.job.case.n, self.job.case.k
        x = self.x0 if i % CHAIN == 0 else self.buffers[i % 2][: m * k].view(m, k)
        self.product(i, x, self.buffers[(i + 1) % 2][: m * n].view(m, n), codes)

    def call_product(self, i: int) -> None:
        """The same without quantization: reuses the last quantized activations."""
        self.call(i, codes=False)

    def check(self) -> float:
        """Run once and compare; raises AssertionError."""
        y = torch.full((self.job.case.m, self.job.case.n), torch.nan, device="cuda", dtype=self.job.dtype)
        self.product(0, self.x0, y)
        x = self.x0
        if self.codes is not None:
            x = self.codes.codes[:, : self.job.case.k].float() * self.codes.scale[:, None]
        error = error_of(y, x, self.weights)
        if not error < (1e-3 if self.job.dtype == torch.float16 else 5e-3):
            raise AssertionError(f"{self.job.case} {self.job.scheme}: mean relative error {error:.2e}")
        return error

    def row(self, us: dict[str, float], theirs: dict[str, float], steady: bool) -> Row:
        """The row to write. us: times by graph name. steady: whether each graph ran alone (--steady)."""
        case = self.job.case
        return {
            "case": case.name, "scheme": self.job.scheme, "m": case.m, "n": case.n, "k": case.k, **us,
            **({"steady": True} if steady else {}),
            **({"dtype": self.job.other_dtype} if self.job.other_dtype else {}),
            "tops": round(case.operations / us["us"] * 1e-6, 1), "kernel": self.job.family,
            "error": float(f"{self.error:.1e}"), "prepare_gb_s": round(self.weights.prepare_gb_s, 1),
            "prepare_layers": round(self.weights.prepare_layers, 2), "bytes": self.bytes,
            "floor_us": round(self.floor, 3), "baselines": theirs, "checked": True,
        }  # fmt: skip


def time_steadily(graphs: Sequence[Captured], seconds: float) -> list[Timing]:
    """Time per call of each graph after running alone for so long; interleaved if 0.

    A model's products share a scheme, so they run at the clock that their own power allows.
    """
    if not seconds:
        return time_exactly(graphs)
    found = []
    for graph in graphs:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            graph.replay()
        found.extend(time_exactly([graph], 9))
    return found


def time_layer(
    jobs: Sequence[Job], weights: dict[str, Weights], peers: dict[str, peers_humming.Peer],
    vendors: VendorWeights | None, steady: float = 0.0, names: Sequence[str] = VENDORS,
) -> list[Row]:  # fmt: skip
    """All jobs of one layer and M, interleaved with the baselines or each alone: their rows."""
    case = jobs[0].case
    m, n, k = case.m, case.n, case.k
    buffers = [torch.randn(m * max(n, k), device="cuda").to(jobs[0].dtype) for _ in range(2)]
    x0 = buffers[0][: m * k].view(m, k).clone()
    runs: list[Run] = []
    graphs: dict[tuple[str, str], Captured] = {}
    for job in jobs:
        try:
            runs.append(Run(job, weights[job.scheme], buffers, x0))
        except (AssertionError, KernelError) as error:  # one failed row must not lose the others
            print(f"REFUSED {job.case} {job.scheme} {job.config}: {error}", flush=True)
            continue
        graphs |= {(job.scheme, name): graph for name, graph in runs[-1].graphs.items()}
    for name in names if vendors is not None else ():
        graph = vendors.captured(name, m)
        if graph is not None:
            graphs["", name] = graph
    for scheme, peer in peers.items():
        try:
            graphs[scheme, "humming"] = peer.captured(x0, weights[scheme], error_of)
        except (AssertionError, RuntimeError) as error:
            print(f"humming {case} {scheme}: {str(error)[:300]}", flush=True)
    timings = dict(zip(graphs, time_steadily(list(graphs.values()), steady), strict=True))
    if not all(buffer.isfinite().all() for buffer in buffers):
        print(f"REFUSED {case}: a chain of products left the range of fp16", flush=True)
        return []
    us = {name: round(timing.us, 3) for name, timing in timings.items()}
    vendor = {name: us["", name] for name in names if ("", name) in us}
    rows = []
    for run in runs:
        scheme = run.job.scheme
        theirs = vendor | ({"humming": us[scheme, "humming"]} if (scheme, "humming") in us else {})
        rows.append(run.row({name: us[scheme, name] for name in run.graphs}, theirs, steady > 0))
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=RECORDED)
    parser.add_argument("--only", nargs="*", choices=LAYERS, default=list(LAYERS), help="layers")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--no-baselines", action="store_true", help="do not time cuBLAS fp16 and fp8")
    parser.add_argument("--humming", nargs="*", default=["w4a16g128", "w4a8"], help="schemes to time it in")
    parser.add_argument("--humming-models", nargs="*", choices=MODELS, default=["llama-3-8b"], help="and models")
    parser.add_argument("--again", action="store_true", help="repeat rows of this commit")
    parser.add_argument("--steady", type=float, default=0.0, help="seconds each runs alone before timing")
    parser.add_argument("--compile", action="store_true", help="only compile; needs no GPU")
    parser.add_argument("--seconds", type=float, default=200.0, help="start nothing after this many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "gemm_packed.json")
    return parser.parse_args()


def jobs_of(options: argparse.Namespace, pool: Pool) -> Iterator[Job]:
    """Every job, layer by layer and M by M; other processes choose configs and compile ahead."""
    asked = [
        (Case(f"{model} {layer}", m, *MODELS[model][layer]), scheme)
        for model in options.models
        for layer in options.only
        for m in options.tokens
        for scheme in options.schemes
    ]
    yield from (job for job in pool.imap(job_of, asked, chunksize=4) if job is not None)


def main() -> None:
    options = parse()
    begin = time.monotonic()
    # Fork these processes before CUDA is initialized; they compile into the disk cache.
    pool = multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1))
    jobs = jobs_of(options, pool)
    if options.compile:
        print(f"{sum(1 for _ in jobs)} jobs compiled after {time.monotonic() - begin:.1f} s", flush=True)
        return
    try:
        measure(options, jobs, begin)
    finally:
        pool.terminate()


def measure(
    options: argparse.Namespace, jobs: Iterator[Job], begin: float,
    names: Callable[[Case], Sequence[str]] = lambda _: VENDORS, steady: Callable[[int], float] | None = None,
) -> None:  # fmt: skip
    """Time the jobs, and write rows after each M. names: of a product's vendors.  steady: seconds alone, by M."""
    marks = stamp()
    old = json.loads(options.out.read_text()) if options.out.exists() and not options.again else []
    same = [row for row in old if all(row.get(name) == marks[name] for name in ("commit", "gpu"))]
    done = {(row["case"], row["scheme"], row["m"], row.get("dtype")) for row in same}
    for _, layer in itertools.groupby(jobs, key=lambda job: job.case.name):
        weights: dict[str, Weights] = {}
        peers: dict[str, peers_humming.Peer] = {}
        vendors = None
        for m, group in itertools.groupby(layer, key=lambda job: job.case.m):
            mine = [job for job in group if (job.case.name, job.scheme, m, job.other_dtype) not in done]
            if not mine:
                continue
            if time.monotonic() - begin > options.seconds:
                print("out of time")
                return
            case = mine[0].case
            for job in mine:
                if job.scheme not in weights:
                    weights[job.scheme] = Weights(case, Scheme.parse(job.scheme))
                    theirs = case.name.split()[0] in options.humming_models and job.scheme in options.humming
                    if theirs and peers_humming.installed():
                        try:
                            peers[job.scheme] = peers_humming.Peer(weights[job.scheme].layer, Scheme.parse(job.scheme))
                        except (AssertionError, RuntimeError) as error:  # it compiles, and may lack a compiler
                            print(f"humming {case.name} {job.scheme}: {str(error)[:300]}", flush=True)
            if vendors is None and not options.no_baselines:
                vendors = VendorWeights(case.n, case.k)
            alone = options.steady if steady is None else steady(m)
            rows = [row | marks for row in time_layer(mine, weights, peers, vendors, alone, names(case))]
            for row in rows:
                other = row.get("us_product", row["us"])
                print(
                    f"{case.name:20s} {row['scheme']:9s} M={m:<4d} {row['us']:8.2f} us ({other:.2f}), floor "
                    f"{row['floor_us']:8.2f} {row['kernel'].removeprefix('packed_'):6s} {row['error']:.1e} "
                    f"{row['baselines'] or ''}"
                )
            print(f"{time.monotonic() - begin:.1f} s", flush=True)
            merge_rows(options.out, rows, KEY)


if __name__ == "__main__":
    main()
