"""Build a policy map: measure the layers of real models, then keep only the points that change which config runs.

    python tools/tuning/build_policy.py measure --out whole.json [--seconds 600] [--compile]   # on the map's GPU
    python tools/tuning/build_policy.py compact whole.json --out src/anybit/choose/policies/nvidia-h200.json

``measure`` resumes an interrupted run; ``--compile`` only fills the kernel cache, which needs no GPU.

``compact`` drops points between two others without which a config within ``margin`` of their best would be chosen.
"""

import argparse
import contextlib
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from anybit.choose.choose import Map
from anybit.choose.policy import Key, Policy, read, text
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.tune.processes import Worker
from anybit.tune.search import Options, plans, search
from anybit.tune.worker import TimingBudget
from layers import MAPPED, MODELS, SCHEMES, parts

_EVERY = 64
"""Up to this token count every point stays."""


def product_of(key: Key, m: int) -> LinearProblem:
    """The problem of a map's layer at a token count."""
    scheme, dtype, n, k = key
    form = Scheme.parse(scheme)
    return LinearProblem(m, n, k, form.weights, form.activations, getattr(torch, dtype))


def compact(policy: Policy, margin: float = 1.025) -> Policy:
    """The map reduced to points that change which config runs."""
    found = replace(policy, layers={key: dict(points) for key, points in policy.layers.items()})
    for key, points in found.layers.items():
        for m in sorted(points, key=lambda m: m % 3 == 0 or m.bit_count() == 1):  # quarters first
            if m > _EVERY and m.bit_count() > 1:
                point = points.pop(m)
                chosen = Map([replace(policy, layers={key: points})]).choose(product_of(key, m)).candidate
                times = {one.candidate(product_of(key, m)): one.us for one in point.strategies.values()}
                if times.get(chosen, math.inf) > margin * min(times.values()):
                    points[m] = point
    return found


def measure(options: argparse.Namespace) -> None:
    """Measure what was asked for, or only compile it."""
    began = time.perf_counter()
    models = [name for name in MODELS if options.models is None or name in options.models]
    effort = TimingBudget(final_replays=5, finalists=3)
    how = Options(options.each, effort, again=options.again, jobs=options.jobs)
    hints = [read(path) for path in options.hints]
    with contextlib.nullcontext() if options.compile else Worker() as child:
        for part, each in parts(models, options.schemes, tuple(options.tokens), options.each):
            left = options.seconds - (time.perf_counter() - began)
            if left <= 0:
                break
            if child is None:
                count = sum(len(tried) for _, tried in plans(part, Map(hints), replace(how, each=each)))
                print(f"{part[0].scheme}: {len(part)} problems, {count} candidates compiled", flush=True)
                continue
            found = search(part, options.out, replace(how, each=each, seconds=left), hints=hints, child=child)
            print(f"{part[0].scheme}: {found.points} points after {time.perf_counter() - began:.1f} s", flush=True)
            for name, reason in found.excluded.items():
                print("excluded:", name, "--", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    measuring = kinds.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--models", nargs="*", choices=MODELS)
    measuring.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    measuring.add_argument("--tokens", type=int, nargs="*", default=list(MAPPED))
    measuring.add_argument("--each", type=int, default=4, help="candidates per family besides defaults and hints")
    measuring.add_argument("--hints", type=Path, nargs="*", default=[], help="maps whose winners to try")
    measuring.add_argument("--seconds", type=float, default=float("inf"), help="start no problem after this")
    measuring.add_argument("--again", action="store_true", help="remeasure what the file has")
    measuring.add_argument("--compile", action="store_true", help="only compile")
    measuring.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    compacting = kinds.add_parser("compact")
    compacting.add_argument("--margin", type=float, default=1.025, help="speedup a point needs to be kept")
    compacting.add_argument("--out", type=Path, required=True)
    compacting.add_argument("map", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options)
    else:
        options.out.write_text(text(compact(read(options.map), options.margin)), encoding="utf-8")


if __name__ == "__main__":
    main()
