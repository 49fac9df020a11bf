"""What a kernel costs before it runs: first use, loading from the disk cache, and host time per launch.

python benchmarks/launch.py    # into results/h200/launch.json
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from anybit import jit
from anybit.device import Device
from anybit.jit import cache, tensor_map
from anybit.kernels.bitplane import bitplane, bitplane_layout
from anybit.kernels.bitplane.bitplane_problem import arguments
from anybit.kernels.block import quantize_activations
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from cases import Case
from linear_bitplane import random_weight
from timing import RESULTS, merge_rows, stamp

LAUNCHES, ROUNDS = 200, 20


def run(m: int, n: int, k: int, scheme: Scheme) -> dict[str, Any]:
    """Measure one product: compile into an empty cache, load from it, launch repeatedly."""
    packed = quantize_activations.quantize(torch.randn(m, k, device="cuda").half(), scheme.activations)
    weight, codes = random_weight(Case("launch", m, n, k), scheme)
    y = torch.empty(m, n, dtype=torch.float16, device="cuda")
    problem = LinearProblem(m, n, k, scheme.weights, scheme.activations, device=Device.of(y))
    config = bitplane.default(problem)
    family = bitplane.family_of(config)
    kernel = family.kernel(config)
    seconds = {}
    kept = os.environ.get("ANYBIT_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANYBIT_CACHE_DIR"] = folder
        for name in ("first use", "disk"):
            cache.clear_memory()
            start = time.perf_counter()
            compiled = jit.cached(kernel, Device.of(y).arch)
            seconds[name] = time.perf_counter() - start
    if kept is None:
        del os.environ["ANYBIT_CACHE_DIR"]
    else:
        os.environ["ANYBIT_CACHE_DIR"] = kept
    cache.clear_memory()
    y_map = tensor_map.encode(y, 64, config.tma_rows) if config.tma_rows else bytes(128)
    params, grid = arguments(packed, weight, y, y_map=y_map), family.grid(problem, config)
    costs = {"launch": lambda: jit.launch(kernel, params, grid, pdl=True)}
    costs["multiply"] = lambda: bitplane.multiply(packed, weight, Output.f16, y=y, config=config)
    x = bitplane_layout.unpack(packed.codes, m, k).double() - (scheme.activations.zero or 0)
    w = codes.double() - (scheme.weights.zero or 0)
    expected = (x @ w.T) * packed.scale.double()[:, None] * weight.scale.double()
    host = {}
    for name, call in costs.items():
        y.fill_(torch.nan)
        call()
        torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)
        found = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                call()
            found.append((time.perf_counter() - start) / LAUNCHES)
        host[name] = statistics.median(found) * 1e6
    return {
        "case": kernel.entry,
        "scheme": str(scheme),
        "m": m,
        "n": n,
        "k": k,
        "first_use_s": round(seconds["first use"], 3),
        "from_disk_ms": round(seconds["disk"] * 1e3, 2),
        "launch_host_us": round(host["launch"], 2),
        "multiply_host_us": round(host["multiply"], 2),
        "registers": compiled.registers,
        "checked": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "launch.json")
    options = parser.parse_args()
    marks = stamp()
    shown = ("case", "scheme", "first_use_s", "from_disk_ms", "launch_host_us", "multiply_host_us")
    rows = [run(m, 1024, 1024, Scheme.parse(text)) | marks for m, text in ((64, "w2a2"), (512, "w4a4"))]
    for row in rows:
        print(*(row[key] for key in shown))
    merge_rows(options.out, rows)


if __name__ == "__main__":
    main()
