"""Packed weights of 1 to 8 bits against 16-bit and 8-bit activations: each product followed by one that depends on it.

python benchmarks/gemm_packed.py                                  # everything, into results/h200/gemm_packed.json
python benchmarks/gemm_packed.py --only gate_up --schemes w4a16g128 --tokens 1 16 --seconds 600

Chains run in one CUDA graph under programmatic dependent launch, over copies of the weights that together exceed L2:
the output of a product is (the beginning of) the activations of the next. 8-bit activations include their quantization.
"""

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anybit import jit
from anybit.device import Device
from anybit.kernels import pack, packed_digits, packed_few, packed_large, packed_layout, packed_mid, packed_small
from anybit.kernels.pack import Packed, Target
from anybit.kernels.packed_layout import PackedWeight
from anybit.packing import QuantizedWeight, words_per_row
from anybit.scheme import Scheme
from cases import LLAMA3_8B, Case
from timing import RESULTS, baselines, floor_us, measure, merge_rows, rotations, stamp

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
FEWER_TOKENS = (1, 16, 256, 4096)
"""Unless told otherwise, of schemes with other widths than 4."""
# The first ones matter most: a run may end before the last.
SCHEMES = ("w4a16g128", "w2a16g128", "w8a16g128", "w4a8", "w2a8", "w3a16g128", "w1a16g128", "w6a16g128")
KIND = {True: "s8", False: "f16"}


@dataclass(frozen=True)
class Job:
    """One row: a case, a scheme, and the kernel family and config that run it."""

    case: Case
    scheme: Scheme
    family: ModuleType
    config: Any


def job_of(case: Case, scheme: Scheme, family: str, device: Device) -> Job | None:
    operand = torch.int8 if scheme.activations.quantized else torch.float16
    columns = -(-case.k // 128) * 128
    problem: Any = packed_small.Problem(case.m, case.n, case.k, scheme.weights, operand, torch.float16, device, columns)
    few = {"small": packed_small, "digits": packed_digits, "mid": packed_mid}
    module = few.get(family, packed_few.kernel(problem) if family == "default" else None)
    if scheme.activations.quantized and not scheme.activations.integer:
        module = None
    if module is None:
        module = packed_large
        problem = packed_large.Problem(case.m, case.n, case.k, scheme.weights, scheme.activations, device=device)
    return None if module.why_not(problem) is not None else Job(case, scheme, module, module.default(problem))


def random_weight(case: Case, scheme: Scheme) -> QuantizedWeight:
    """Random codes on the GPU, scaled so that chains neither grow nor fade, with scales of both signs."""
    bits, groups = scheme.weights.bits, scheme.weights.groups(case.k)
    words = torch.randint(-(2**31), 2**31 - 1, (case.n, words_per_row(case.k, bits)), dtype=torch.int32, device="cuda")
    spread = (((1 << 2 * bits) - 1) / 12 + 0.25) * case.k * 1.083
    scale = (torch.rand(case.n, groups, device="cuda") + 0.5) * spread**-0.5
    scale *= torch.randint(0, 2, scale.shape, device="cuda") * 2 - 1
    return QuantizedWeight(words, scale.half().float(), None, (case.n, case.k), scheme.weights)


class Weights:
    """A layer's copies and its float64 values, kept from one M to the next."""

    def __init__(self, case: Case, scheme: Scheme) -> None:
        layer = random_weight(case, scheme)
        order = "a8" if scheme.activations.quantized else "a16"
        packed_layout.prepare(layer, order)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        packed = packed_layout.prepare(layer, order)
        torch.cuda.synchronize()
        self.prepare_gb_s = layer.words.numel() * 4e-9 / (time.perf_counter() - begin)
        self.rows = torch.randint(0, case.n, (256,), device="cuda")
        self.sample = layer.dequantize(torch.float32)[self.rows].double()
        count = rotations(packed.tiles.numel(), 128)
        self.copies = [packed] + [
            PackedWeight(packed.tiles.clone(), packed.row_scale, None, None, packed.shape, packed.format, packed.order)
            for _ in range(count - 1)
        ]


def run(job: Job, weights: Weights) -> dict[str, Any]:
    """Check one product on sampled rows of the weights, then time chains of it."""
    m, n, k = job.case.m, job.case.n, job.case.k
    buffers = [torch.randn(m * max(n, k), device="cuda").half() for _ in range(2)]
    quantized = job.scheme.activations.quantized
    codes = Packed(m, k, job.scheme.activations, Target.bytes, buffers[0].device) if quantized else None
    x0 = buffers[0][: m * k].view(m, k).clone()
    quantizer = pack.default(pack.problem_of(x0, job.scheme.activations, Target.bytes)) if quantized else None

    def product(i: int, x: torch.Tensor, y: torch.Tensor) -> None:
        weight = weights.copies[i % len(weights.copies)]
        if codes is not None:
            pack.launch(pack.problem_of(x, job.scheme.activations, Target.bytes), quantizer, codes, x)
        if job.family is packed_large:
            packed_large.multiply(codes if codes is not None else x, weight, None, y, job.config)
        elif codes is not None:
            job.family.launch(weight, codes.codes[:, :k], y, codes.scale, config=job.config)
        else:
            job.family.launch(weight, x, y, config=job.config)

    def call(i: int) -> None:
        product(i, buffers[i % 2][: m * k].view(m, k), buffers[(i + 1) % 2][: m * n].view(m, n))

    error = 0.0

    def check() -> None:
        nonlocal error
        y = torch.full((m, n), torch.nan, device="cuda", dtype=torch.float16)
        product(0, x0, y)
        inputs = x0.double()
        if codes is not None:
            inputs = codes.codes[:, :k].double() * codes.scale.double()[:, None]
        expected = inputs @ weights.sample.T
        error = float((y[:, weights.rows].double() - expected).abs().mean() / expected.abs().mean())
        if not error < 1e-3:
            raise AssertionError(f"{job.case} {job.scheme}: mean relative error {error:.2e}")

    timing = measure(call, check, copies_at_hand=len(weights.copies), replays=7)
    size = weights.copies[0].tiles.numel() + m * k * (1 if quantized else 2) + 2 * m * n
    return {
        "case": job.case.name,
        "scheme": str(job.scheme),
        "m": m,
        "n": n,
        "k": k,
        "us": round(timing.us, 3),
        "kernel": job.family.__name__.rpartition(".")[2],
        "error": float(f"{error:.2e}"),
        "prepare_gb_s": round(weights.prepare_gb_s, 1),
        "floor_us": round(floor_us(size, job.case.operations, KIND[quantized]), 3),
        "checked": True,
    }


def precompile(jobs: list[Job]) -> None:
    """Fill the cache on disk with all that will run, in parallel and before CUDA is touched."""
    found = {job.family.kernel(job.config) for job in jobs}
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.starmap(jit.cached, [(kernel, "sm_90a") for kernel in found], chunksize=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(LLAMA3_8B), help="layers of Llama-3-8B")
    parser.add_argument("--tokens", type=int, nargs="*", help="default: all for 4 bits, a few for other widths")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--family", choices=("default", "digits", "small", "mid", "large"), default="default")
    parser.add_argument("--no-baselines", action="store_true", help="do not time cuBLAS fp16 and fp8 beside")
    parser.add_argument("--seconds", type=float, default=55.0, help="begin nothing after this many seconds")
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "gemm_packed.json")
    options = parser.parse_args()
    begin, device = time.monotonic(), Device.named("sm_90a")
    jobs = []
    for text in options.schemes:
        for name in options.only:
            for m in options.tokens or (TOKENS if text.startswith("w4") else FEWER_TOKENS):
                case = Case(f"llama-3-8b {name}", m, *LLAMA3_8B[name])
                job = job_of(case, Scheme.parse(text), options.family, device)
                if job is not None:
                    jobs.append(job)
    precompile(jobs)
    print(f"{len(jobs)} jobs compiled after {time.monotonic() - begin:.1f} s", flush=True)
    marks, rows, kept = stamp(), [], None
    for job in jobs:
        if time.monotonic() - begin > options.seconds:
            print("out of time")
            break
        key = (job.case.n, job.case.k, str(job.scheme))
        if kept is None or kept[0] != key:
            kept = None
            kept = (key, Weights(job.case, job.scheme))
        row = run(job, kept[1]) | marks
        if not options.no_baselines:
            row["baselines"] = baselines(job.case.m, job.case.n, job.case.k, ("cublas fp16", "fp8"))
        rows.append(row)
        print(
            f"{job.case.name:22s} {row['scheme']:10s} M={job.case.m:<5d} {row['us']:9.2f} us, floor "
            f"{row['floor_us']:9.2f}  {row['kernel']:13s} {row['error']:.1e}  {row.get('baselines', '')}",
            flush=True,
        )
        merge_rows(options.out, [row])


if __name__ == "__main__":
    main()
