"""Packed weights of 1 to 8 bits against 16-bit and 8-bit activations: each product followed by one that depends on it.

python benchmarks/gemm_packed.py --seconds 600        # most telling rows first, into results/h200/gemm_packed.json
python benchmarks/gemm_packed.py --only gate_up --schemes w4a16g128 --tokens 1 16
python benchmarks/gemm_packed.py --sweep              # M = 1 to 4096 and neighbours, to gemm_packed_sweep.json: cliffs

Chains run in one CUDA graph under programmatic dependent launch, over copies of the weights that together exceed L2:
the output of a product is (the beginning of) the activations of the next. 8-bit activations include their quantization.
cuBLAS fp16 and fp8 `_scaled_mm` are timed in turns with each row. Rows that this commit has written before are skipped
(`--again` repeats them), so that a run cut short goes on where it ended.
"""

import argparse
import collections
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anybit import jit
from anybit.device import Device
from anybit.kernels import pack, packed_large, packed_layout
from anybit.kernels.pack import Packed, Target
from anybit.kernels.packed_layout import PackedWeight
from anybit.ops.inputs import token_bucket
from anybit.packing import QuantizedWeight, words_per_row
from anybit.scheme import Scheme
from anybit.tune.dispatcher import dispatcher
from anybit.tune.families import FAMILIES, Product, tiles_of
from cases import LLAMA3_8B, MODELS, Case
from timing import RESULTS, floor_us, measure_beside, merge_rows, rotations, stamp, vendor

LAYERS = tuple(LLAMA3_8B)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
FEWER_TOKENS = (1, 16, 256, 4096)
"""Unless told otherwise, of schemes with other widths than 4."""
WIDTHS = ("w2a16g128", "w3a16g128", "w8a16g128", "w1a16g128", "w6a16g128")
INTEGERS = ("w4a8", "w2a8")
SCHEMES = ("w4a16g128", *INTEGERS, *WIDTHS)
SWEEP = sorted({m + d for m in (1 << i for i in range(13)) for d in (-1, 0, 1)} - {0, 4097})
KIND = {True: "s8", False: "f16"}


@dataclass(frozen=True)
class Job:
    """One row: a case, a scheme, and the kernel family and config that run it."""

    case: Case
    scheme: Scheme
    family: ModuleType
    config: Any


def job_of(case: Case, scheme: Scheme, family: str, device: Device) -> Job | None:
    """The job as the op would run it, or by the kernel that is asked for; None where that kernel takes no such case."""
    x = scheme.activations
    product = Product(token_bucket(case.m), case.n, case.k, scheme.weights, x, device=device)
    asked = FAMILIES.get(f"packed_{family}")
    if asked is not None:
        if asked.why_not(product) is not None:
            return None
        return Job(case, scheme, asked.module, asked.default(product))
    chosen = dispatcher(device.name).choose(product, (tiles_of(x),)).candidate
    return Job(case, scheme, FAMILIES[chosen.kernel].module, chosen.config)


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """(model, layer, scheme, M), each once, those that say most first; neighbours share a layer's weights."""
    if options.schemes or options.tokens:
        for model in options.models:
            for scheme in options.schemes or SCHEMES:
                for layer in options.only:
                    for m in options.tokens or (TOKENS if scheme.startswith("w4") else FEWER_TOKENS):
                        yield model, layer, scheme, m
        return
    steps: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]]] = [
        (("llama-3-8b",), LAYERS, ("w4a16g128",), (1, 16, 64, 256, 4096)),
        (("llama-3-8b",), ("gate_up",), INTEGERS, (1024, 4096)),
        (("llama-3-8b",), ("gate_up",), WIDTHS, (1,)),
        (("llama-3-8b",), LAYERS, ("w4a16g128",), TOKENS),
        (("llama-3-8b",), LAYERS, INTEGERS, TOKENS),
        (("llama-3-8b",), ("gate_up",), WIDTHS, TOKENS),
        (("llama-2-7b", "qwen3-14b"), LAYERS, ("w4a16g128",), TOKENS),
        (("llama-3-8b",), LAYERS, WIDTHS, FEWER_TOKENS),
        (("llama-2-7b", "qwen3-14b"), LAYERS, (*INTEGERS, *WIDTHS), FEWER_TOKENS),
        (tuple(MODELS), LAYERS, (*INTEGERS, *WIDTHS), TOKENS),
    ]
    for models, layers, schemes, tokens in steps:
        for model in models:
            for layer in layers:
                for scheme in schemes:
                    for m in tokens:
                        if model in options.models and layer in options.only:
                            yield model, layer, scheme, m


def random_weight(case: Case, scheme: Scheme) -> QuantizedWeight:
    """Random codes and scales of both signs, such that a chain of 256 products neither overflows nor fades.

    A product keeps the size of its input on average; of a few widths the largest eigenvalue is some per cent above one.
    """
    bits, groups = scheme.weights.bits, scheme.weights.groups(case.k)
    words = torch.randint(-(2**31), 2**31 - 1, (case.n, words_per_row(case.k, bits)), dtype=torch.int32, device="cuda")
    spread = (((1 << 2 * bits) - 1) / 12 + 0.25) * case.k * 1.083
    scale = (torch.rand(case.n, groups, device="cuda") + 0.5) * 0.97 * spread**-0.5
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


def run(job: Job, weights: Weights, beside: tuple[str, ...]) -> dict[str, Any]:
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

    def call(i: int) -> None:  # every chain begins with the same activations
        x = x0 if i == 0 else buffers[i % 2][: m * k].view(m, k)
        product(i, x, buffers[(i + 1) % 2][: m * n].view(m, n))

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

    others = {name: graph for name in beside if (graph := vendor(name, m, n, k)) is not None}
    timing, theirs = measure_beside(call, check, others, copies_at_hand=len(weights.copies))
    if not all(buffer.isfinite().all() for buffer in buffers):
        raise AssertionError(f"{job.case} {job.scheme}: a chain of products left the range of fp16")
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
        "bytes": size,
        "floor_us": round(floor_us(size, job.case.operations, KIND[quantized]), 3),
        "baselines": {name: round(timed.us, 3) for name, timed in theirs.items()},
        "checked": True,
    }


class Ahead:
    """Jobs in order, whose kernels other processes compile before they are needed.

    The processes begin before CUDA is touched; what they compile is found in the cache on disk.
    """

    def __init__(self, jobs: Iterator[Job], window: int = 96) -> None:
        self._jobs, self._window = jobs, window
        self._pool = multiprocessing.get_context("fork").Pool(os.cpu_count())
        self._known: dict[Any, Any] = {}
        self._waiting: collections.deque[Job] = collections.deque()

    def __iter__(self) -> Iterator[Job]:
        while True:
            while len(self._waiting) < self._window and (job := next(self._jobs, None)) is not None:
                kernel = job.family.kernel(job.config)
                if kernel not in self._known:
                    self._known[kernel] = self._pool.apply_async(jit.cached, (kernel, "sm_90a"))
                self._waiting.append(job)
            if not self._waiting:
                return
            job = self._waiting.popleft()
            self._known[job.family.kernel(job.config)].wait()
            yield job


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="*", choices=LAYERS, default=list(LAYERS), help="layers")
    parser.add_argument("--tokens", type=int, nargs="*", help="default: all for 4 bits, a few for other widths")
    parser.add_argument("--schemes", nargs="*", help="default: " + " ".join(SCHEMES))
    parser.add_argument("--family", choices=("default", "digits", "small", "mid", "large"), default="default")
    parser.add_argument("--sweep", action="store_true", help="w4a16g128 at powers of two and their neighbours")
    parser.add_argument("--no-baselines", action="store_true", help="do not time cuBLAS fp16 and fp8 beside")
    parser.add_argument("--again", action="store_true", help="repeat rows that this commit has written")
    parser.add_argument("--compile", action="store_true", help="compile and end")
    parser.add_argument("--most", type=int, help="take only the first so many rows")
    parser.add_argument("--seconds", type=float, default=55.0, help="begin nothing after this many seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.sweep:
        options.schemes, options.no_baselines = options.schemes or ["w4a16g128"], True
        options.tokens, options.models = options.tokens or SWEEP, ["llama-3-8b"]
    name = "gemm_packed_sweep.json" if options.sweep else "gemm_packed.json"
    options.out = options.out or Path(RESULTS) / "h200" / name
    return options


def main() -> None:
    options = parse()
    begin, device = time.monotonic(), Device.named("sm_90a")
    cases = [
        (Case(f"{model} {layer}", m, *MODELS[model][layer]), Scheme.parse(scheme))
        for model, layer, scheme, m in dict.fromkeys(wanted(options))
    ][: options.most]
    found = (job_of(case, scheme, options.family, device) for case, scheme in cases)
    jobs = Ahead(job for job in found if job is not None)
    if options.compile:
        print(f"{sum(1 for _ in jobs)} jobs compiled after {time.monotonic() - begin:.1f} s", flush=True)
        return
    marks, kept = stamp(), None
    old = json.loads(options.out.read_text()) if options.out.exists() and not options.again else []
    same = [row for row in old if all(row.get(name) == marks[name] for name in ("commit", "gpu"))]
    done = {(row["case"], row["scheme"], row["m"]) for row in same}
    beside = () if options.no_baselines else ("cublas fp16", "fp8")
    for job in jobs:
        if (job.case.name, str(job.scheme), job.case.m) in done:
            continue
        if time.monotonic() - begin > options.seconds:
            print("out of time")
            break
        key = (job.case.n, job.case.k, str(job.scheme))
        if kept is None or kept[0] != key:
            kept = None
            kept = (key, Weights(job.case, job.scheme))
        row = run(job, kept[1], beside) | marks
        print(
            f"{job.case.name:22s} {row['scheme']:10s} M={job.case.m:<5d} {row['us']:9.2f} us, floor "
            f"{row['floor_us']:9.2f}  {row['kernel']:13s} {row['error']:.1e}  {row['baselines']}",
            flush=True,
        )
        merge_rows(options.out, [row])
    if options.sweep:
        cliffs(json.loads(options.out.read_text()))


def cliffs(rows: list[dict[str, Any]], allowed: float = 1.1) -> None:
    """Print, of every layer, where more tokens take less time by more than the allowed factor."""
    for case, scheme in dict.fromkeys((row["case"], row["scheme"]) for row in rows):
        mine = sorted((row["m"], row["us"]) for row in rows if (row["case"], row["scheme"]) == (case, scheme))
        worst = max(
            ((us / later, m, larger) for m, us in mine for larger, later in mine if larger > m), default=(0, 0, 0)
        )
        verdict = "no cliff" if worst[0] <= allowed else "a CLIFF"
        print(f"{case} {scheme}: {verdict}; time({worst[1]}) is {worst[0]:.3f} x time({worst[2]})")


if __name__ == "__main__":
    main()
