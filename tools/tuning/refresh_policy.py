"""Keep the points of a map whose kernels are unchanged after a family's revision was raised.

    python tools/tuning/refresh_policy.py codes --map MAP > before.json     # in the old checkout
    python tools/tuning/refresh_policy.py keep --map MAP --codes before.json

Raising a family's revision (``anybit.choose.registry.REVISIONS``) turns all its points into hints. ``codes`` hashes the
machine code of every kernel that a map names; ``keep`` hashes again and keeps the points of equal hashes, under the
current revisions. Remeasure the others with ``tools/tuning/build_policy.py measure``. Neither needs a GPU.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from anybit.choose.policy import SHIPPED, Measured, Origin, Policy, file_name, read, text
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.jit.identity import machine_code
from anybit.kernels.linear_problem import LinearProblem
from build_policy import product_of

ARCH = "sm_90a"


def named(policy: Policy) -> Iterator[tuple[str, LinearProblem, Measured]]:
    """Every config of a map, with a name for its kernels, and the problem it was measured for."""
    for key, points in policy.layers.items():
        for m, point in points.items():
            product = product_of(key, m)
            for one in point.strategies.values():
                yield name_of(product, one), product, one


def name_of(product: LinearProblem, measured: Measured) -> str:
    """A config's name, with the sizes that decide what its fields do not, such as how tokens are quantized."""
    return f"{product} {product.dtype} {measured.kernel} {sorted(measured.fields)}"


def codes(policy: Policy, jobs: int) -> dict[str, list[str]]:
    """The machine code of each config's kernels; [] for one that is not legal in this checkout."""
    kernels: dict[str, list[Kernel]] = {}
    for name, product, measured in named(policy):
        if name not in kernels:
            try:
                kernels[name] = list(measured.candidate(product).kernels(product))
            except KernelError:
                kernels[name] = []
    distinct = list({kernel for mine in kernels.values() for kernel in mine})
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        hashes = pool.starmap(machine_code, [(kernel, ARCH) for kernel in distinct], chunksize=4)
    code = dict(zip(distinct, hashes, strict=True))
    return {name: [code[kernel] for kernel in mine] for name, mine in kernels.items()}


def still_hold(policy: Policy, before: dict[str, list[str]], now: dict[str, list[str]]) -> Policy:
    """The points whose kernels all have unchanged machine code, under the current revisions."""
    here = Origin.here(policy.origin.gpu, policy.origin.arch, policy.origin.driver, policy.origin.torch)
    found = Policy(replace(here, date=policy.origin.date))
    for key, points in policy.layers.items():
        for m, point in points.items():
            names = [name_of(product_of(key, m), measured) for measured in point.strategies.values()]
            if all(before.get(name) and before[name] == now.get(name) for name in names):
                found.layers.setdefault(key, {})[m] = point
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    for name in ("codes", "keep"):
        command = kinds.add_parser(name)
        command.add_argument("--map", type=Path, default=SHIPPED / file_name("NVIDIA H200"))
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
        if name == "keep":
            command.add_argument("--codes", type=Path, required=True, help="output of `codes` in the old checkout")
            command.add_argument("--out", type=Path, help="the new map; by default replaces the old one")
    options = parser.parse_args()
    policy = read(options.map)
    now = codes(policy, options.jobs)
    if options.command == "codes":
        json.dump(now, sys.stdout)
        return
    found = still_hold(policy, json.loads(options.codes.read_text()), now)
    print(f"{found.points} of {policy.points} points have unchanged machine code", flush=True)
    (options.out or options.map).write_text(text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
