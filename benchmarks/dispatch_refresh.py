"""The shipped map after kernels have changed: keep what still holds, measure the rest in the order of what it is worth.

    python benchmarks/dispatch_refresh.py keep --since CHECKOUT      # no GPU; CHECKOUT: the library as the map knew it
    python benchmarks/dispatch_refresh.py measure --work DIR --out MAP --seconds 300      # a process a GPU
    python benchmarks/dispatch_refresh.py measure --work DIR --ahead              # plans and compiles for them, no GPU

A map knows kernels by their sources. ``keep`` compiles every kernel that a point names in both checkouts: where all of
a point's have the same machine code its times are still those of what runs, whatever else the sources have gained.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from anybit import jit
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.scheme import Scheme
from anybit.tune.dispatch import holds
from anybit.tune.plans import Options, compile_all
from anybit.tune.policy import SHIPPED, Key, Measured, Origin, Point, Policy, file_name, read, text
from anybit.tune.registry import LinearProblem
from anybit.tune.search import Worker, search
from anybit.tune.worker import TimingBudget
from dispatch_layers import MAPPED, SHAPES, of, rank_of

ARCH = "sm_90a"
RANKS = {
    name: tuple(m for m in MAPPED if rank_of(m) == rank) for rank, name in enumerate(("powers", "halves", "quarters"))
}
ORDER = [(scheme, rank) for rank in RANKS for scheme in ("w4a16g128", "w4a8")]
ORDER += [(scheme, rank) for scheme in ("w2a4", "w2a2") for rank in ("powers", "halves")]
ORDER += [(scheme, "powers") for scheme in ("w8a8", "w2a8", "w4a4", "w2a16g128", "w3a16g128")]
ORDER += [("w4a4", "halves"), *((scheme, "quarters") for scheme in ("w2a4", "w2a2", "w4a4"))]
ORDER += [(scheme, "halves") for scheme in ("w8a8", "w2a8", "w2a16g128", "w3a16g128")]
"""Parts, what is worth most first; w4a4 has w4a8's points meanwhile, whose kernels are the same."""
PARTS = tuple(f"{scheme}-{rank}" for scheme, rank in ORDER)


# -------- keep


def named(policy: Policy) -> Iterator[tuple[str, LinearProblem, Measured]]:
    """Every config of a map, with a name that two checkouts share, and the product that it was measured for."""
    for key, points in policy.layers.items():
        for m, point in points.items():
            product = product_of(key, m)
            for one in point.named():
                yield name_of(product, one), product, one


def product_of(key: Key, m: int) -> LinearProblem:
    """A map's layer at a token count."""
    scheme, dtype, n, k = key
    form = Scheme.parse(scheme)
    return LinearProblem(m, n, k, form.weights, form.activations, getattr(torch, dtype))


def name_of(product: LinearProblem, measured: Measured) -> str:
    """What a config is called: sizes decide what of its kernels it does not say, such as how tokens are coded.

    Fields that a later version added are not in it.
    """
    return f"{product} {product.dtype} {measured.kernel} {sorted(measured.fields)} {measured.activations}"


def machine_code(kernel: Kernel) -> str:
    """A hash of a kernel's instructions and constants, without its name and line numbers."""
    cubin = jit.cached(kernel, ARCH).cubin
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    found = hashlib.sha256()
    for section in sections:
        start = sections[names][4] + section[0]
        if cubin[start : cubin.index(b"\0", start)].startswith((b".text.", b".nv.constant0")):
            found.update(cubin[section[4] : section[4] + section[5]])
    return found.hexdigest()


def codes(policy: Policy, jobs: int) -> dict[str, list[str]]:
    """The machine code of each config's kernels; none of one that is not legal in this checkout."""
    kernels: dict[str, list[Kernel]] = {}
    for name, product, measured in named(policy):
        if name not in kernels:
            try:
                kernels[name] = list(measured.candidate(product).kernels(product))
            except KernelError:
                kernels[name] = []
    distinct = list({kernel for mine in kernels.values() for kernel in mine})
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        code = dict(zip(distinct, pool.map(machine_code, distinct, chunksize=4), strict=True))
    return {name: [code[kernel] for kernel in mine] for name, mine in kernels.items()}


def whole(product: LinearProblem, point: Point) -> Point:
    """A point whose configs have the fields that were added since, as they run now: choices are compared by fields."""

    def of_now(one: Measured) -> Measured:
        return replace(one, fields=tuple(one.candidate(product).fields.items()))

    return replace(
        point,
        strategies={name: of_now(one) for name, one in point.strategies.items()},
        default=None if point.default is None else of_now(point.default),
        also=tuple(map(of_now, point.also)),
    )


def stale(policy: Policy) -> Policy:
    """The points of a map that do not hold for these sources."""
    current = policy.current().layers
    layers = {
        key: {m: point for m, point in points.items() if m not in current.get(key, {})}
        for key, points in policy.layers.items()
    }
    return replace(policy, layers={key: points for key, points in layers.items() if points})


def still_hold(policy: Policy, before: dict[str, list[str]], now: dict[str, list[str]]) -> Policy:
    """The points whose kernels all have the machine code that they had, as points of the kernels of now."""
    here = Origin.here(policy.origin.gpu, policy.origin.arch, policy.origin.driver, policy.origin.torch)
    found = Policy(replace(here, date=policy.origin.date))
    for key, points in policy.layers.items():
        for m, point in points.items():
            names = [name_of(product_of(key, m), measured) for measured in point.named()]
            if all(before.get(name) and before[name] == now.get(name) for name in names):
                found.layers.setdefault(key, {})[m] = whole(product_of(key, m), point)
    return found


def keep(options: argparse.Namespace) -> None:
    """Write the map with what still holds; only points of kernels whose sources have changed are looked at."""
    policy = read(options.map)
    found, changed = policy.current(), stale(policy)
    if changed.points:
        now = codes(changed, options.jobs)
        before = json.loads(options.codes.read_text()) if options.codes else codes_there(changed, options)
        kept = still_hold(changed, before, now)
        kept.merge(found)
        found = kept
    print(f"{found.points} of {policy.points} points have kernels of the same machine code", flush=True)
    options.out.write_text(text(found), encoding="utf-8")


def codes_there(policy: Policy, options: argparse.Namespace) -> dict[str, list[str]]:
    """``codes`` in the other checkout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stale.json"
        path.write_text(text(policy), encoding="utf-8")
        command = [sys.executable, __file__, "codes", "--map", str(path), "--jobs", str(options.jobs)]
        there = {**os.environ, "PYTHONPATH": str(options.since.resolve() / "src")}
        done = subprocess.run(command, env=there, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


# -------- measure


def claim(work: Path, name: str) -> bool:
    """Whether this process is the first that asks for ``name``."""
    try:
        os.close(os.open(work / f"{name}.claim", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def held(layer: tuple[Key, dict[int, Point]]) -> tuple[Key, dict[int, Point]]:
    """A layer's points whose built-in choice is the one of now."""
    key, points = layer
    return key, {m: point for m, point in points.items() if holds(product_of(key, m), point)}


def measure(options: argparse.Namespace) -> None:
    """Measure what holds no more, part by part; each part is of one process."""
    began = time.perf_counter()
    options.work.mkdir(parents=True, exist_ok=True)
    shipped = read(options.map)
    holding = Policy(shipped.origin)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:  # 7,000 built-in choices: a minute of one core
        for found in pool.imap(held, shipped.current().layers.items(), chunksize=4):
            holding.merge(Policy(shipped.origin, dict([found] if found[1] else [])))
    for (scheme, *_), points in holding.layers.items():
        for m in [m for m in points if scheme in options.anew and options.least <= m <= options.most]:
            del points[m]
    print(f"{holding.points} of {shipped.points} points hold", flush=True)
    how = Options(4, (), TimingBudget(60.0, 2, 5, finalists=3), jobs=options.jobs, grid=MAPPED)
    child: Worker | None = None
    order = [one for one, name in zip(ORDER, PARTS, strict=True) if name in options.parts]
    if options.ahead:  # those that measure begin with the first
        order = order[1:] + order[:1]
    for scheme, rank in order:
        name = f"{scheme}-{rank}"
        each = options.each or (6 if scheme in ("w4a16g128", "w4a8") else 4 if rank == "powers" else 2)
        counts = tuple(m for m in RANKS[rank] if options.least <= m <= options.most)
        mine = [product for product in of(scheme, SHAPES, counts) if holding.exact(product) is None]
        left = options.seconds - (time.perf_counter() - began)
        if not mine or left < 1:
            continue
        plans = options.work / f"{name}.plans"
        if options.ahead:
            if not (options.work / f"{name}.claim").exists():
                count = compile_all(mine, replace(how, each=each, plans=plans), [shipped])
                plans.with_suffix(".done").touch()
                print(f"{name}: {len(mine)} products, {count} candidates compiled", flush=True)
            continue
        if not claim(options.work, name):
            continue
        if child is None:
            child = Worker()
            child.start()
            if claim(options.work, "first"):
                options.out.write_text(text(holding), encoding="utf-8")
                (options.work / "first.done").touch()
            while not (options.work / "first.done").exists():
                time.sleep(0.05)
        ready = plans if plans.with_suffix(".done").exists() else None
        policy = search(
            mine, options.out, replace(how, each=each, seconds=left, plans=ready), hints=[shipped], child=child
        )
        print(f"{name}: {policy.points} points, {time.perf_counter() - began:.1f} s", flush=True)
        for what, why in policy.excluded.items():
            print("excluded:", what, "--", why)
    if child is not None:
        child.stop()


def main() -> None:
    shipped = SHIPPED / file_name("NVIDIA H200")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    for name in ("keep", "codes", "measure"):
        command = kinds.add_parser(name)
        command.add_argument("--map", type=Path, default=shipped)
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
        if name == "keep":
            command.add_argument("--out", type=Path, default=shipped)
            there = command.add_mutually_exclusive_group(required=True)
            there.add_argument("--since", type=Path, help="a checkout of what the map was measured with")
            there.add_argument("--codes", type=Path, help="what `codes` printed in one")
        if name == "measure":
            command.add_argument("--out", type=Path, help="the new map; all processes write into one")
            command.add_argument("--work", type=Path, required=True, help="a new folder that all processes share")
            command.add_argument("--seconds", type=float, default=300.0, help="begin no more products after this")
            command.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
            command.add_argument(
                "--anew", nargs="*", default=(), help="schemes whose points are measured though they hold"
            )
            command.add_argument("--least", type=int, default=1, help="measure from so many tokens")
            command.add_argument("--most", type=int, default=max(MAPPED), help="to so many")
            command.add_argument("--each", type=int, default=0, help="candidates of each family; by default 2 to 6")
            command.add_argument("--ahead", action="store_true", help="plan and compile ahead of those that measure")
    options = parser.parse_args()
    if options.command == "measure" and not (options.ahead or options.out):
        parser.error("measure needs --out, the new map (or --ahead, to plan and compile alone)")
    if options.command == "codes":
        json.dump(codes(read(options.map), options.jobs), sys.stdout)
    else:
        {"keep": keep, "measure": measure}[options.command](options)


if __name__ == "__main__":
    main()
