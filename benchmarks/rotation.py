"""A Hadamard rotation, and quantize-and-pack after it: by a kernel each, and by one.

    python benchmarks/rotation.py [--seconds 10]

Rows to results/h200/rotate.json: ``us`` of the one kernel, ``baselines`` of both apart, of each alone, and of torch's
operations. Both ways must give the same codes, bit for bit.
"""

import argparse
import multiprocessing
import os
import time
from pathlib import Path

import torch

from anybit import hadamard, jit
from anybit.kernels.elementwise import hadamard as kernel
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Target
from anybit.kernels.gemm import bitplane_layout
from anybit.scheme import ActivationFormat
from timing import RESULTS, calls_for, copies, merge_rows, read_floor_us, stamp, time_graph

SHAPES = [(m, k) for k in (4096, 14336, 576, 1536) for m in (1, 16, 64, 256, 4096)]
FORMATS = ((ActivationFormat(4, "asym"), Target.planes), (ActivationFormat(8, "sym"), Target.bytes))


def kernels() -> list:
    """All that is launched."""
    found = []
    for m, k in SHAPES:
        found.append(kernel.kernel(kernel.default(kernel.Problem(m, k))))
        for format, target in FORMATS:
            for rotated in (False, True):
                problem = quantize_activations.Problem(m, k, format, target=target, rotated=rotated)
                found += [
                    quantize_activations.kernel(c)
                    for c in (
                        quantize_activations.configs(problem) if rotated else [quantize_activations.default(problem)]
                    )
                ]
    return list(dict.fromkeys(found))


def run(m: int, k: int, format: ActivationFormat, target: Target, every: bool) -> list[dict[str, object]]:
    x = torch.randn(m, k, device="cuda").half()
    inputs = copies(x, 64)
    apart, fused = (quantize_activations.problem_of(x, format, target, rotated=rotated) for rotated in (False, True))
    out = quantize_activations.Packed(m, k, format, target, x.device)

    def microseconds(call) -> float:
        guess = time_graph(call, 8, replays=1)
        return round(time_graph(call, calls_for(guess.us, len(inputs), 400.0), 7).us, 3)

    def both(i: int) -> None:
        quantize_activations.launch(
            apart, quantize_activations.default(apart), out, kernel.transform(inputs[i % len(inputs)])
        )

    quantize_activations.launch(apart, quantize_activations.default(apart), out, kernel.transform(x))
    wanted = _results(out)
    baselines = {
        "kernel each": microseconds(both),
        "rotation alone": microseconds(lambda i: kernel.transform(inputs[i % len(inputs)])),
        "pack alone": microseconds(
            lambda i: quantize_activations.launch(
                apart, quantize_activations.default(apart), out, inputs[i % len(inputs)]
            )
        ),
        "torch": microseconds(lambda i: hadamard.transform(inputs[i % len(inputs)])),
    }
    rows = []
    for config in quantize_activations.configs(fused) if every else [quantize_activations.default(fused)]:
        out.buffer.zero_()
        quantize_activations.launch(fused, config, out, x)
        if any(not torch.equal(a, b) for a, b in zip(wanted, _results(out), strict=True)):
            raise AssertionError(f"{m} x {k} in {format}, {config}: other codes than by two kernels")
        rows.append(
            {
                "case": f"rotate and pack {target.value}",
                "scheme": f"a{format.bits}{format.code}",
                "m": m,
                "n": 0,
                "k": k,
                "us": microseconds(
                    lambda i, c=config: quantize_activations.launch(fused, c, out, inputs[i % len(inputs)])
                ),
                "floor_us": round(read_floor_us(x.numel() * 2 + out.buffer.numel()), 3),
                "baselines": baselines,
                "config": f"{config.threads} threads x {config.vectors}",
                "checked": True,
            }
        )
    return rows


def _results(packed: quantize_activations.Packed) -> list[torch.Tensor]:
    """Codes of the rows that there are, and what goes with them."""
    in_planes = packed.target is Target.planes
    codes = bitplane_layout.unpack(packed.codes.cpu(), packed.m, packed.k) if in_planes else packed.codes[:, : packed.k]
    return [codes.clone(), *(part.clone() for part in (packed.scale, packed.sum, packed.zero) if part is not None)]


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="every config, not the default alone; nothing is written")
    parser.add_argument("--compile", action="store_true", help="only compile what is launched")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this time")
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "rotate.json")
    options = parser.parse_args()
    if options.compile:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            pool.starmap(jit.cached, [(found, "sm_90a") for found in kernels()])
        return
    marks = stamp()
    for m, k in SHAPES:
        if time.perf_counter() - began > options.seconds:
            print(f"out of time before {m} x {k}")
            break
        rows = [row | marks for format, target in FORMATS for row in run(m, k, format, target, options.every)]
        for row in rows:
            print(*(row[name] for name in ("scheme", "m", "k", "us", "floor_us", "baselines", "config")), flush=True)
        if not options.every:
            merge_rows(options.out, rows)


if __name__ == "__main__":
    main()
