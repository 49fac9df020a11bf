"""Bit-plane GEMMs over the cases of cases.py, with the full epilogue: alone and after quantize-and-pack.

python benchmarks/linear_bitplane.py                      # everything, into results/h200/gemm_bitwise.json
python benchmarks/linear_bitplane.py --only gate_up --tokens 64 --schemes w2a2
"""

import argparse
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from anybit import jit
from anybit.choose.dispatch import dispatcher
from anybit.choose.families import Layout
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels.bitplane import bitplane, bitplane_layout
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.block import quantize_activations
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply
from anybit.scheme import Scheme
from cases import BITWISE_SCHEMES, GEMM, PAPERS, Case, select
from timing import (
    RESULTS,
    Captured,
    Row,
    baselines,
    calls_for,
    floor_us,
    merge_rows,
    replays_at_full_clocks,
    rest,
    rotations,
    stamp,
    time_graph,
    time_in_turns,
)

# Most informative shapes first: large products, few tokens, one token; then the papers' tables, then the rest.
FIRST = [(4096, 28672, 4096), (64, 4096, 4096), (1024, 4096, 4096), (1, 4096, 14336), (1, 28672, 4096)]
Job = tuple[Case, str]


def compiled_config(job: Job) -> object:
    """The config of a job, compiled into the disk cache without a GPU; None if its kernel refuses it."""
    case, scheme_text = job
    scheme, device = Scheme.parse(scheme_text), Device.named("sm_90a")
    problem = LinearProblem(case.m, case.n, case.k, scheme.weights, scheme.activations, device=device)
    if sm80_bitplane_gemm.why_not(problem) is not None:
        return None
    config = dispatcher(device.name).choose(problem, Layout.planes).candidate.config  # what a layer would run
    family, quantizing = bitplane.family_of(config), quantize_activations.Problem(case.m, case.k, scheme.activations)
    for kernel in (quantize_activations.kernel(quantize_activations.default(quantizing)), family.kernel(config)):
        jit.cached(kernel, device.arch)
    return config


def random_weight(case: Case, scheme: Scheme) -> tuple[PlaneWeight, torch.Tensor]:
    """Random codes on the GPU, as planes and as they are."""
    codes = torch.randint(0, 2**scheme.weights.bits, (case.n, case.k), dtype=torch.uint8, device="cuda")
    scale = torch.rand(case.n, 1, device="cuda") * 0.01 + 0.005
    return bitplane_layout.prepare(QuantizedWeight.from_codes(codes, scale, None, scheme.weights)), codes


def run(case: Case, scheme: Scheme, config: object) -> Row:
    """Check one config of one case on sampled weight rows, then time it."""
    weight, codes = random_weight(case, scheme)
    x = torch.randn(case.m, case.k, device="cuda").half()
    form = scheme.activations
    problem = quantize_activations.problem_of(x, form)
    pack_config = quantize_activations.default(problem)
    packed = quantize_activations.Packed(case.m, case.k, form, quantize_activations.Target.planes, x.device)
    y = torch.empty(case.m, case.n, device="cuda", dtype=torch.float16)
    count = rotations(weight.planes.numel(), 128)
    weights = [weight, *(replace(weight, planes=weight.planes.clone()) for _ in range(count - 1))]

    def quantize() -> None:
        quantize_activations.launch(problem, pack_config, packed, x)

    def product(i: int) -> None:
        multiply(bitplane.family_of(config), packed, weights[i % count], y, config=config)

    def both(i: int) -> None:
        quantize()
        product(i)

    def check() -> None:
        y.fill_(torch.nan)
        both(0)
        rows = torch.randint(0, case.n, (64,), device="cuda")
        ux = bitplane_layout.unpack(packed.codes, case.m, case.k).double() - (form.zero or 0)
        uw = codes[rows].double() - (scheme.weights.zero or 0)
        expected = (ux @ uw.T) * packed.scale.double()[:, None] * weight.scale[rows].double()
        torch.testing.assert_close(y[:, rows].double(), expected, rtol=2e-3, atol=2e-3)

    check()
    torch.cuda.synchronize()
    guess = time_graph(product, max(4, min(count, 8)), replays=1).us
    calls = calls_for(guess, count)
    graphs = [Captured(product, calls), Captured(both, calls)]
    rest(case.operations)
    alone, with_pack = time_in_turns(graphs, replays_at_full_clocks(2 * calls * guess, 9))
    p, q = scheme.weights.bits, form.bits
    size = bitplane_layout.size(case.n, case.k, p) + bitplane_layout.size(case.m, case.k, q) + 2 * case.m * case.n
    return {
        "case": case.name, "scheme": str(scheme), "m": case.m, "n": case.n, "k": case.k, "us": round(alone.us, 3),
        "us_with_pack": round(with_pack.us, 3), "tops": round(case.operations / alone.us * 1e-6, 1),
        "floor_us": round(floor_us(size, case.operations * p * q, "b1"), 3), "checked": True,
    }  # fmt: skip


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--schemes", nargs="*", default=BITWISE_SCHEMES)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after this many seconds")
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "gemm_bitwise.json")
    options = parser.parse_args()
    order = [*FIRST, *((case.m, case.n, case.k) for case in PAPERS)]
    shapes: dict[tuple[int, int, int], list[Case]] = {shape: [] for shape in order}
    for case in select(GEMM, options.only, tuple(options.tokens) if options.tokens else None):
        shapes.setdefault((case.m, case.n, case.k), []).append(case)
    cases = [named[0] for named in shapes.values() if named]
    jobs = [(case, scheme) for case in cases for scheme in options.schemes]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:  # before CUDA is initialized
        configs = dict(zip(jobs, pool.map(compiled_config, jobs, chunksize=1), strict=True))
    print(f"{len(jobs)} jobs compiled after {time.perf_counter() - began:.0f} s", flush=True)
    marks = stamp()
    for case in cases:
        if time.perf_counter() - began > options.seconds:
            print(f"out of time before {case}")
            break
        vendor = baselines(case.m, case.n, case.k)
        rows: list[Row] = []
        for job in (job for job in jobs if job[0] is case and configs[job] is not None):
            row = run(case, Scheme.parse(job[1]), configs[job])
            row |= {"kernel": "wgmma", "baselines": vendor} | marks
            shown = [row[key] for key in ("case", "scheme", "m", "n", "k", "us", "us_with_pack", "tops")]
            print(*shown, row["floor_us"], vendor, flush=True)
            rows += [row | {"case": named.name} for named in shapes[case.m, case.n, case.k]]
        merge_rows(options.out, rows, ("case", "scheme", "m", "n", "k", "kernel"))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
