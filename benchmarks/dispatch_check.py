"""How near chosen configs are to the best there is: problems at random against a search of whole spaces.

A problem is a layer of one of ten models, one of five schemes and a number of tokens between 1 and 8192 that need not
be one of a map's. Its space is every legal config of every family whose kernel is compiled: for all problems in turn
the family's most promising one, one from the middle of the rest, the next most promising one and so on, as far as the
time for compiling goes, at most ``--most`` (a row says how many of how many legal ones that are). Left out is only
what is hopeless (``skipped``). The space is timed (``runner.Sieve``: all of it once, what is within 25 % of the best
again, what is within 8 % carefully, and checked against the reference), side by side with three choices:

    map       what the map that is given says, nothing of the problem measured
    tuned     what a search as ``anybit tune`` does it finds at the token count that stands for the problem's
    built in  what runs without any map

With few tokens the dispatcher runs the built-in config of the kernel that won, since it leaves room to its neighbours
in a model; ``alone``: the config that won by itself.
"""

import argparse
import itertools
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybit.device import Device
from anybit.jit import Kernel
from anybit.jit.cache import folder, key
from anybit.tune.dispatcher import Dispatcher
from anybit.tune.families import Product, bucket
from anybit.tune.plans import Options, Plan, compile_all, compile_one, die_with_parent, plan_key, plan_of
from anybit.tune.policy import Origin, Policy
from anybit.tune.runner import Effort, Sieve
from anybit.tune.search import Child, Winners, measure, sift
from anybit.tune.space import Candidate, builtin, promising
from dispatch_layers import drawn
from timing import merge_rows, stamp

KEY = ("case", "scheme", "m", "n", "k")


def skipped(product: Product, candidate: Candidate) -> bool:
    """Whether a candidate is hopeless: mma.sync beside wgmma, more work in planes than in int8 for many tokens."""
    work = product.weights.bits * product.activations.bits
    return candidate.kernel == "bitwise_sync" or (candidate.strategy == "bitwise" and work > 8 and product.m > 64)


Space = tuple[Plan, list[tuple[str, ...]]]
"""A whole space, and the names of the kernels of each of its candidates."""


def whole_space(product: Product) -> tuple[Space, list[list[Kernel]]]:
    """The space of a problem, and its kernels in the order in which they are worth compiling, a candidate an entry."""
    families: dict[str, list[Candidate]] = {}
    for candidate in promising(product, 10**6):
        if not skipped(product, candidate):
            families.setdefault(candidate.kernel, []).append(candidate)
    ordered = [_spread(mine) for mine in families.values()]
    turns = [one for turn in itertools.zip_longest(*ordered) for one in turn if one is not None]
    kernels = {candidate: list(candidate.kernels(product)) for candidate in turns}
    names = {kernel: key(kernel, product.device.arch) for kernel in {k for mine in kernels.values() for k in mine}}
    plan = plan_of(product, turns)
    return (plan, [tuple(names[k] for k in kernels[one]) for one in turns]), [kernels[one] for one in turns]


def _spread(ranked: list[Candidate]) -> list[Candidate]:
    """By turns the most promising one that is left, and one from further and further apart places of the ranking."""
    places = sorted(range(len(ranked)), key=lambda i: int(f"{i:012b}"[::-1], 2))  # bits turned round: evenly spread
    return list(dict.fromkeys(one for i, place in enumerate(places) for one in (ranked[i], ranked[place])))


def compile_spaces(options: argparse.Namespace) -> None:
    """Plan all spaces, then compile them in turns until this process is ended."""
    began = time.perf_counter()
    os.nice(options.nice)
    problems = drawn(options.problems, options.seed)
    usual = Options(options.tune_each, jobs=options.jobs, plans=_tuned(options.plans))
    near = [replace(one, m=bucket(one.m)) for one in problems]
    print(f"{compile_all(near, usual)} candidates of searches, {time.perf_counter() - began:.1f} s", flush=True)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs or os.cpu_count(), context, die_with_parent) as pool:
        found = list(pool.map(whole_space, problems))
        spaces = {plan_key(product): space for product, (space, _) in zip(problems, found, strict=True)}
        new = _spaces(options.plans).with_suffix(".new")
        new.write_bytes(pickle.dumps(spaces))
        new.replace(_spaces(options.plans))
        turns = itertools.chain.from_iterable(itertools.zip_longest(*(kernels for _, kernels in found)))
        todo = list(dict.fromkeys(kernel for kernels in turns if kernels for kernel in kernels))
        print(f"{len(todo)} kernels to compile, {time.perf_counter() - began:.1f} s", flush=True)
        for count, _ in enumerate(pool.map(compile_one, todo, ["sm_90a"] * len(todo), chunksize=4), 1):
            if count % 250 == 0:
                print(f"{count} kernels are there, {time.perf_counter() - began:.1f} s", flush=True)


def start_compiling(options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """Compile the spaces in processes beside the measurement of a map, which waits for no compiler."""
    command = [sys.executable, str(Path(__file__).parent / "dispatch.py"), "verify", "--compile"]
    command += ["--problems", str(options.problems), "--seed", str(options.seed), "--plans", str(options.plans)]
    command += ["--jobs", str(max(1, (os.cpu_count() or 4) - 3)), "--nice", "10"]
    return subprocess.Popen(command, stdout=options.rows.with_suffix(".compiling").open("wb"))


def verify(options: argparse.Namespace, child: Child, by: Dispatcher, found: Policy | None = None) -> None:
    """Compare; rows go to ``options.check_rows``. found: the map just measured, whose winners a search tries, too."""
    began = time.perf_counter()
    device: Device = child.facts["device"]
    spaces, tuned = _read(_spaces(options.plans)), _read(_tuned(options.plans))
    present = {path.stem for path in folder().glob("*.kernel")}
    usual = Options(options.tune_each, effort=Effort(60, 2, 5), limit=options.limit)
    policy, winners = Policy(Origin.here(device.name, device.arch)), Winners()
    if found is not None:
        winners.learn(found)
    rows: list[dict[str, Any]] = []
    marks = stamp(device.name)
    for product in (replace(one, device=device) for one in drawn(options.problems, options.seed)):
        if time.perf_counter() - began > options.verify_seconds:
            break
        near = replace(product, m=bucket(product.m))
        space, plan = spaces.get(plan_key(product)), tuned.get(plan_key(near))
        if space is None or plan is None:
            print(f"{product}: its space was not planned in time", flush=True)
            continue
        point = measure(child, near, plan, usual, policy, winners.near(near, plan))
        if point is None:
            continue
        chosen = {"built in": builtin(product)}
        for name, of in (("map", by), ("tuned", _by_point(product, point, child))):
            for alone in (False, True):
                of.alone = alone
                chosen[f"{name}, alone" if alone else name] = of.choose(product).candidate
            of.alone = False
        whole, names = space
        compiled = [one for one, needs in zip(whole.candidates, names, strict=True) if present.issuperset(needs)]
        candidates = list(dict.fromkeys([*chosen.values(), *compiled[: options.most]]))
        times, left_out = sift(child, product, candidates, usual, policy, list(chosen.values()), Sieve())
        final = {candidate: time.us for candidate, time in times if time.final}
        if not all(candidate in final for candidate in chosen.values()):
            print(f"{product}: {policy.excluded.get(str(product), 'a choice was wrong')}", flush=True)
            continue
        best = min(final, key=final.__getitem__)
        ratios = {name: round(final[candidate] / final[best], 4) for name, candidate in chosen.items()}
        rows.append(
            {"case": "random problem", "scheme": str(product.scheme), "m": product.m, "n": product.n, "k": product.k}
            | {"us": round(final[best], 3), "best": best.name, "candidates": len(candidates)}
            | {"legal": len(whole.candidates), "left_out": left_out}
            | {"timed_carefully": len(final), "ratios": ratios, "chosen": {n: c.name for n, c in chosen.items()}}
            | {"seed": options.seed, "checked": True} | marks
        )  # fmt: skip
        print(f"{product}: {len(times)} timed, best {final[best]:.2f} us {best.name}; {ratios}", flush=True)
        if len(rows) % 10 == 0:
            merge_rows(options.check_rows, rows, KEY)
    if rows:
        merge_rows(options.check_rows, rows, KEY)
    for name in ("map", "map, alone", "tuned", "tuned, alone", "built in"):
        values = [row["ratios"][name] for row in rows]
        if values:
            print(f"{name}: median {statistics.median(values):.3f}, worst {max(values):.3f} of {len(values)} problems")
    print(f"{len(policy.excluded)} excluded; {time.perf_counter() - began:.1f} s; {child.spent}")
    for name, reason in policy.excluded.items():
        print("excluded:", name, "--", reason)


def _by_point(product: Product, point: Any, child: Child) -> Dispatcher:
    """What chooses by a map that holds the point just measured."""
    device = child.facts["device"]
    mine = Policy(Origin.here(device.name, device.arch))
    mine.put(replace(product, m=bucket(product.m)), point)
    return Dispatcher(device.name, [mine])


def _spaces(plans: Path) -> Path:
    return plans.with_suffix(".spaces")


def _tuned(plans: Path) -> Path:
    return plans.with_suffix(".tuned")


def _read(path: Path) -> dict[tuple[object, ...], Any]:
    found: dict[tuple[object, ...], Any] = pickle.loads(path.read_bytes()) if path.exists() else {}
    return found
