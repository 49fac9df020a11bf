"""How near chosen configs are to the best there is: problems at random against a search of whole spaces.

A problem is a layer of one of ten models, one of five schemes and a number of tokens between 1 and 8192 that need not
be one of a map's. Its space is every legal config of packed_large and packed_digits, and of the other families the 16
that they find most promising and 16 spread evenly over the rest: more are not compiled in the time there is. Bit planes
are left out where they are more than the work of int8 and tokens are many (``skipped``). All of the space is timed
(``runner.Sieve``: once, those within 25 % of the best again, those within 8 % carefully and checked against the
reference), side by side with three choices:

    map       what the map that is given says, nothing of the problem measured
    tuned     what a search as ``anybit tune`` does it finds at the token count that stands for the problem's
    built in  what runs without any map
"""

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybit.device import Device
from anybit.tune.dispatcher import Dispatcher
from anybit.tune.families import Product, bucket
from anybit.tune.plans import Options, Plan, compile_all, plan_key
from anybit.tune.policy import Origin, Policy, read
from anybit.tune.runner import Effort, Sieve
from anybit.tune.search import Child, Winners, measure, sift
from anybit.tune.space import Candidate, builtin, promising
from dispatch_layers import drawn
from timing import merge_rows, stamp

KEY = ("case", "scheme", "m", "n", "k")


MOST = {"bitwise": 32, "packed_small": 32, "packed_mid": 32}
"""Configs of a family in a space; of those not named here, all."""


def space_of(product: Product, maps: Sequence[Policy], options: Options) -> list[Candidate]:
    """The space of a problem, thinned as ``MOST`` says."""
    by_family: dict[str, list[Candidate]] = {}
    for candidate in promising(product, 10**6):
        if not skipped(product, candidate):
            by_family.setdefault(candidate.kernel, []).append(candidate)
    found: list[Candidate] = []
    for name, mine in by_family.items():
        most = MOST.get(name, len(mine))
        rest = mine[most // 2 :]
        spread = [rest[i * len(rest) // (most - most // 2)] for i in range(most - most // 2)]
        found += mine if len(mine) <= most else [*mine[: most // 2], *spread]
    return found


def skipped(product: Product, candidate: Candidate) -> bool:
    """Whether a candidate is hopeless: mma.sync beside wgmma, more work in planes than in int8 for many tokens."""
    work = product.weights.bits * product.activations.bits
    return candidate.kernel == "bitwise_sync" or (candidate.strategy == "bitwise" and work > 8 and product.m > 64)


def compile_spaces(options: argparse.Namespace) -> None:
    """Plan and compile the whole spaces, problem by problem; what is done by the end of the time is whole."""
    began = time.perf_counter()
    os.nice(options.nice)
    usual = Options(options.tune_each, jobs=options.jobs, plans=_tuned(options.plans))
    every = Options(10**6, jobs=options.jobs, plans=_spaces(options.plans))
    hints = [read(options.map)] if options.map else []
    problems = drawn(options.problems, options.seed)
    for part in range(0, len(problems), 20):
        some = problems[part : part + 20]
        count = compile_all([replace(one, m=bucket(one.m)) for one in some], usual, hints)
        count += compile_all(some, every, (), space_of)
        print(f"{count} of problems to {part + 19} compiled, {time.perf_counter() - began:.1f} s", flush=True)


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
    usual = Options(options.tune_each, effort=Effort(60, 2, 5), limit=options.limit)
    policy, winners = Policy(Origin.here(device.name, device.arch)), Winners()
    if found is not None:
        winners.learn(found)
    rows: list[dict[str, Any]] = []
    marks = stamp()
    for product in (replace(one, device=device) for one in drawn(options.problems, options.seed)):
        if time.perf_counter() - began > options.verify_seconds:
            break
        near = replace(product, m=bucket(product.m))
        space, plan = spaces.get(plan_key(product)), tuned.get(plan_key(near))
        if space is None or plan is None:
            print(f"{product}: its space was not compiled in time", flush=True)
            continue
        point = measure(child, near, plan, usual, policy, winners.near(near, plan))
        if point is None:
            continue
        chosen = {"map": by.choose(product).candidate, "built in": builtin(product)}
        chosen["tuned"] = _tuned_choice(product, point, child)
        candidates = list(dict.fromkeys([*chosen.values(), *_without(space)]))
        times, left_out = sift(child, product, candidates, usual, policy, list(chosen.values()), Sieve())
        final = {candidate: time.us for candidate, time in times if time.final}
        if not all(candidate in final for candidate in chosen.values()):
            print(f"{product}: {policy.excluded.get(str(product), 'a choice was wrong')}", flush=True)
            continue
        best = min(final, key=final.__getitem__)
        ratios = {name: round(final[candidate] / final[best], 4) for name, candidate in chosen.items()}
        rows.append(
            {"case": "random problem", "scheme": str(product.scheme), "m": product.m, "n": product.n, "k": product.k}
            | {"us": round(final[best], 3), "best": best.name, "candidates": len(candidates), "left_out": left_out}
            | {"timed_carefully": len(final), "ratios": ratios, "chosen": {n: c.name for n, c in chosen.items()}}
            | {"seed": options.seed, "checked": True} | marks
        )  # fmt: skip
        print(f"{product}: {len(times)} timed, best {final[best]:.2f} us {best.name}; {ratios}", flush=True)
        if len(rows) % 10 == 0:
            merge_rows(options.check_rows, rows, KEY)
    if rows:
        merge_rows(options.check_rows, rows, KEY)
    for name in ("map", "tuned", "built in"):
        values = [row["ratios"][name] for row in rows]
        if values:
            print(f"{name}: median {statistics.median(values):.3f}, worst {max(values):.3f} of {len(values)} problems")
    print(f"{len(policy.excluded)} excluded; {time.perf_counter() - began:.1f} s; {child.spent}")
    for name, reason in policy.excluded.items():
        print("excluded:", name, "--", reason)


def _tuned_choice(product: Product, point: Any, child: Child) -> Candidate:
    """What runs the problem by a map that holds the point just measured."""
    device = child.facts["device"]
    mine = Policy(Origin.here(device.name, device.arch))
    mine.put(replace(product, m=bucket(product.m)), point)
    return Dispatcher(device.name, [mine]).choose(product).candidate


def _without(space: Plan) -> list[Candidate]:
    return [candidate for i, candidate in enumerate(space.candidates) if i not in space.refused]


def _spaces(plans: Path) -> Path:
    return plans.with_suffix(".spaces")


def _tuned(plans: Path) -> Path:
    return plans.with_suffix(".tuned")


def _read(path: Path) -> dict[tuple[object, ...], Plan]:
    found: dict[tuple[object, ...], Plan] = pickle.loads(path.read_bytes()) if path.exists() else {}
    return found
