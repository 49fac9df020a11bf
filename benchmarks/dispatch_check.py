"""How near chosen configs are to the best there is: problems at random against a search of whole spaces.

A problem is a layer of one of eleven models, one of five schemes and a number of tokens between 1 and 8192 that need
not be one of a map's. Its space is every legal config of every family. Left out are only configs that provably lose
(``bounds.lower_bound_us`` of them is more than the best time measured), those of few tokens that no map is obeyed in
(``space.leaves_room``), and, where the compiler did not come so far, those whose kernels are not there; a row says how
many of each. Everything else is timed (``runner.StagedPruning``: all of it
once, what is within 25 % of the best again, what is within 8 % carefully, and checked against the reference), side by
side with three choices:

    map       what the map that is given says, nothing of the problem measured
    tuned     what a search as ``anybit tune`` does it finds at the token count that stands for the problem's
    built in  what runs without any map

``verify --compile`` compiles spaces problem by problem in processes of its own until it is ended; problems that are
complete are compared first, the others when time runs out. ``replay`` tells, without a GPU, what a map of today would
choose in problems that were compared, and how far that was from the best where the comparison timed it.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anybit.device import Device
from anybit.jit import Kernel
from anybit.jit.cache import folder, key
from anybit.scheme import Scheme
from anybit.tune.dispatch import Dispatcher
from anybit.tune.lower_bound import lower_bound_us
from anybit.tune.plans import Options, Plan, candidates_of, compile_one, die_with_parent, plan_key, plan_of
from anybit.tune.policy import SHIPPED, Origin, Policy, file_name, read
from anybit.tune.registry import (
    STEPS,
    LinearProblem,
    step,
)
from anybit.tune.search import NeighborHints, Worker, point_of, sift, timed
from anybit.tune.space import Candidate, builtin, leaves_room, promising
from anybit.tune.worker import (
    StagedPruning,
    Time,
    TimingBudget,
)
from dispatch_layers import drawn
from timing import merge_rows, stamp

KEY = ("case", "seed", "scheme", "m", "n", "k")
CHOICES = ("map", "tuned", "built in")
_SECONDS = 1.0
"""About what a problem takes, until some are compared: kept back for each that is not begun."""


@dataclass(frozen=True)
class Space:
    """The space of a problem: its candidates, what each needs compiled (by name), and what it cannot be faster than;
    and what a search tries at the token count that stands for the problem's.
    """

    candidates: tuple[Candidate, ...]
    legal: int
    names: tuple[tuple[str, ...], ...]
    bounds: tuple[float, ...]
    expected_us: float
    """What the best surely takes no more than, by a map of before: what cannot be faster is not compiled."""
    near: LinearProblem
    plan: Plan
    plan_names: tuple[tuple[str, ...], ...]

    def wanted(self) -> Iterator[int]:
        """Places of what is to be compiled."""
        return (i for i, bound in enumerate(self.bounds) if bound <= self.expected_us)

    def complete(self, present: set[str]) -> bool:
        """Whether all that is wanted is compiled."""
        return all(map(present.issuperset, self.plan_names)) and all(
            present.issuperset(self.names[i]) for i in self.wanted()
        )


_older: list[Policy] = []
_usual = Options()


def whole_space(product: LinearProblem) -> Space:
    """The space of a problem."""
    near = replace(product, m=step(product.m))
    plan = plan_of(near, candidates_of(near, (), _usual))
    legal = promising(product, 10**6)
    candidates = tuple(candidate for candidate in legal if leaves_room(product, candidate))
    kernels = [list(candidate.kernels(product)) for candidate in candidates]
    planned = [list(candidate.kernels(near)) for candidate in plan.candidates]
    arch = product.device.arch
    names = {kernel: key(kernel, arch) for kernel in {k for mine in (*kernels, *planned) for k in mine}}
    bounds = tuple(lower_bound_us(product, candidate) for candidate in candidates)
    by_name = [tuple(tuple(names[k] for k in mine) for mine in some) for some in (kernels, planned)]
    return Space(candidates, len(legal), by_name[0], bounds, _expected_us(product), near, plan, by_name[1])


def _wanted_kernels(product: LinearProblem, space: Space) -> dict[str, Kernel]:
    """The kernels of what is to be compiled, by name: the search's first."""
    found: dict[str, Kernel] = {}
    asked = [(one, names, space.near) for one, names in zip(space.plan.candidates, space.plan_names, strict=True)]
    asked += [(space.candidates[i], space.names[i], product) for i in space.wanted()]
    for candidate, names, whose in asked:
        if not found.keys() >= {*names}:
            found |= dict(zip(names, candidate.kernels(whose), strict=True))
    return found


def _expected_us(product: LinearProblem) -> float:
    """The best time of a product by a map of before, of this scheme or of one with more bits."""
    w, x = product.weights, product.activations
    found = float("inf")
    for policy in _older:
        by = Dispatcher(policy.origin.gpu, [])
        by.policies = [policy]
        for bits in itertools.product(range(w.bits, 9), range(x.bits, 9) if x.integer else (x.bits,)):
            wider = replace(product, weights=replace(w, bits=bits[0]), activations=replace(x, bits=bits[1]))
            point = by.point(wider)
            if point is not None:
                found = min(found, point[1].ordered()[0][1].us)
    return found


def compile_spaces(options: argparse.Namespace) -> None:
    """Plan all spaces, unless that was done, then compile them problem by problem, until this process is ended.

    Spaces in the file of plans are taken as they are: it must be of these kernels.
    """
    began = time.perf_counter()
    os.nice(options.nice)
    problems = drawn(options.problems, options.seed)
    jobs = options.jobs or os.cpu_count() or 1
    global _usual
    _usual = Options(options.tune_each, grid=STEPS)
    _older[:] = [read(options.map or SHIPPED / file_name("NVIDIA H200"))]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), die_with_parent) as pool:
        spaces: dict[Any, Space] = _read(_spaces(options.plans))
        if not all(plan_key(product) in spaces for product in problems):
            spaces = dict(zip(map(plan_key, problems), pool.map(whole_space, problems), strict=True))
            new = _spaces(options.plans).with_suffix(".new")
            new.write_bytes(pickle.dumps(spaces))
            new.replace(_spaces(options.plans))
        kernels: dict[str, Kernel] = {}
        for product in problems:
            kernels |= _wanted_kernels(product, spaces[plan_key(product)])
        present = Compiled().names()
        todo = [kernel for name, kernel in kernels.items() if name not in present]
        legal = sum(space.legal for space in spaces.values())
        wanted = sum(sum(1 for _ in space.wanted()) for space in spaces.values())
        print(f"{legal} legal candidates, {wanted} may win, {len(kernels)} kernels, ", end="")
        print(f"{len(todo)} to compile, {_passed(began)}", flush=True)
        for count, _ in enumerate(pool.map(compile_one, todo, ["sm_90a"] * len(todo), chunksize=4), 1):
            if count % 500 == 0 or count == len(todo):
                print(f"{count} kernels are there, {_passed(began)}", flush=True)


def _passed(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


def start_compiling(options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """Compile the spaces in processes beside measurements, which wait for no compiler."""
    command = [sys.executable, str(Path(__file__).parent / "dispatch.py"), "verify", "--compile"]
    command += ["--problems", str(options.problems), "--seed", str(options.seed), "--plans", str(options.plans)]
    command += ["--tune-each", str(options.tune_each)]
    command += ["--jobs", str(options.compile_jobs or max(1, (os.cpu_count() or 4) - 3)), "--nice", "19"]
    return subprocess.Popen(command, stdout=options.check_rows.with_suffix(".compiling").open("wb"))


class Compiled:
    """Which kernels are there, looked up anew every other second."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._read = 0.0

    def names(self) -> set[str]:
        """The names of all entries."""
        if time.perf_counter() - self._read > 2:
            self._names = {path.stem for path in folder().glob("*.kernel")}
            self._read = time.perf_counter()
        return self._names


def _in_turn(
    problems: list[LinearProblem], spaces: dict[Any, Space], compiled: Compiled, end: float
) -> Iterator[LinearProblem]:
    """Problems whose spaces are complete, as they become so; what is left when time becomes short, as it is."""
    left = [problem for problem in problems if plan_key(problem) in spaces]
    done, busy = 1, _SECONDS
    while left:
        names = compiled.names()
        ready = next((one for one in left if spaces[plan_key(one)].complete(names)), None)
        if ready is None and time.perf_counter() + 1.1 * busy / done * len(left) < end:
            time.sleep(0.2)
            continue
        chosen = ready or left[0]
        left.remove(chosen)
        start = time.perf_counter()
        yield chosen
        done, busy = done + 1, busy + time.perf_counter() - start


def verify(options: argparse.Namespace, child: Worker, by: Dispatcher, found: Policy | None = None) -> None:
    """Compare; rows go to ``options.check_rows``. found: the map just measured, whose winners a search tries, too."""
    began = time.perf_counter()
    device: Device = child.facts["device"]
    compiling = start_compiling(options) if options.beside else None
    while compiling is not None and not _spaces(options.plans).exists():
        time.sleep(0.2)
    spaces: dict[Any, Space] = _read(_spaces(options.plans))
    if not spaces:
        sys.exit(f"{_spaces(options.plans)} holds no spaces: `verify --compile` writes them, or give --beside")
    usual = Options(options.tune_each, effort=TimingBudget(60, 2, 5), limit=options.limit, grid=STEPS)
    policy, winners, compiled = Policy(Origin.here(device.name, device.arch)), NeighborHints(), Compiled()
    if found is not None:
        winners.learn(found)
    rows: list[dict[str, Any]] = []
    marks = stamp(device.name)
    part, parts = options.part
    problems = [replace(one, device=device) for one in drawn(options.problems, options.seed)[part::parts]]
    rows += _rows_of(options.check_rows, options.seed, marks)
    done = {tuple(row[name] for name in KEY[2:]) for row in rows}
    problems = [one for one in problems if (str(one.scheme), one.m, one.n, one.k) not in done]
    print(f"{len(problems)} problems, {len(rows)} compared before", flush=True)
    for product in _in_turn(problems, spaces, compiled, began + options.verify_seconds):
        start = time.perf_counter()
        if start - began > options.verify_seconds:
            break
        space = spaces[plan_key(product)]
        near, names, before = replace(space.near, device=device), compiled.names(), {*policy.excluded}
        planned = enumerate(zip(space.plan.candidates, space.plan_names, strict=True))
        plan = plan_of(near, [one for i, (one, needs) in planned if i in space.plan.own or names.issuperset(needs)])
        searched_times = timed(child, near, plan, usual, policy, winners.near(near, plan))
        point = point_of(near, plan, usual, searched_times)
        if point is None:
            print(f"{product}: a search found nothing", flush=True)
            continue
        chosen = {"map": by.choose(near).candidate, "tuned": _by_point(near, point, child).choose(near).candidate}
        chosen["built in"] = builtin(product)
        searched = time.perf_counter() - start
        there = [one for one, needs in zip(space.candidates, space.names, strict=True) if names.issuperset(needs)]
        candidates = list(dict.fromkeys([*chosen.values(), *there[: options.most]]))
        sieve = StagedPruning(bounds=tuple(lower_bound_us(product, candidate) for candidate in candidates))
        times, _ = sift(child, product, candidates, usual, policy, list(chosen.values()), sieve)
        final = {candidate: time.us for candidate, time in times if time.final}
        if not all(candidate in final for candidate in chosen.values()):
            print(f"{product}: {policy.excluded.get(str(product), 'a choice was wrong')}", flush=True)
            continue
        best = min(final, key=final.__getitem__)
        lose = {one for one, bound in zip(space.candidates, space.bounds, strict=True) if bound > final[best]}
        untried = {*space.candidates} - {*candidates} - lose
        ratios = {name: round(final[candidate] / final[best], 4) for name, candidate in chosen.items()}
        rows.append(
            {"case": "random problem", "scheme": str(product.scheme), "m": product.m, "n": product.n, "k": product.k}
            | {"us": round(final[best], 3), "best": best.name, "legal": space.legal, "timed": len(times)}
            | {"no_room": space.legal - len(space.candidates), "lose": len(lose), "untried": len(untried)}
            | {"timed_carefully": len(final), "ratios": ratios, "search": _of_best(best, searched_times)}
            | {"excluded": {name: policy.excluded[name] for name in policy.excluded.keys() - before}}
            | {"chosen": {n: c.name for n, c in chosen.items()}, "seed": options.seed, "checked": True} | marks
        )  # fmt: skip
        counts = f"{len(times)} timed, {len(lose)} lose, {len(untried)} untried of {space.legal}"
        took = f"{searched:.2f} + {time.perf_counter() - start - searched:.2f} s"
        found_us = f"{point.default_us:.2f} -> {point.ordered()[0][1].us:.2f} us by the search at {near.m} tokens"
        print(f"{product}: {counts}, {took}; {ratios}; {found_us}; {final[best]:.2f} us {best.name}", flush=True)
        if options.times:
            with options.times.open("a") as file:
                us = {candidate.name: round(time.us, 3) for candidate, time in times}
                print(json.dumps({name: rows[-1][name] for name in KEY} | {"us": us}), file=file)
        if len(rows) % 10 == 0:
            merge_rows(options.check_rows, rows, KEY)
    if rows:
        merge_rows(options.check_rows, rows, KEY)
    if compiling is not None:
        compiling.terminate()
        compiling.wait()
    for label, some in (("all", rows), ("whole spaces", [row for row in rows if not row["untried"]])):
        for name in CHOICES if some else ():
            print(f"{label}, {name}: {_summary([row['ratios'][name] for row in some])} of {len(some)} problems")
    print(f"{len(policy.excluded)} excluded; {_passed(began)}; {child.spent}")
    for name, reason in policy.excluded.items():
        print("excluded:", name, "--", reason)


def replay(options: argparse.Namespace) -> None:
    """Print what a map chooses now in problems that were compared; a row has the times of the best and of its choices,
    ``--times`` those of all, most of them of one call alone.

    Rows are of the kernels of their commit: where these have changed since, what is printed tells nothing.
    """
    device = Device.named("sm_90a")
    by = Dispatcher(device.name, [read(options.map or SHIPPED / file_name(device.name))])
    compared = json.loads(options.check_rows.read_text())
    kept: dict[tuple[Any, ...], dict[str, float]] = {}
    for path in options.times:
        for line in map(json.loads, path.read_text().splitlines()):
            kept[tuple(line[name] for name in KEY)] = line["us"]
    known: list[tuple[float, str]] = []
    for row in compared:
        scheme = Scheme.parse(row["scheme"])
        shape = row["n"], row["k"]
        product = LinearProblem(
            step(row["m"]), *shape, scheme.weights, scheme.activations, device=device
        )  # as layers ask
        us_of = kept.get(tuple(row[name] for name in KEY), {})
        times = {name: us / row["us"] for name, us in us_of.items()}
        times |= {row["best"]: 1.0} | {row["chosen"][name]: row["ratios"][name] for name in CHOICES}
        chosen = by.choose(product).candidate.name
        if chosen in times:
            known.append((times[chosen], f"{product}: {times[chosen]:.3f} (then {row['ratios']['map']:.3f})"))
    known.sort(reverse=True)
    for _, line in known[:10]:
        print(line)
    print(f"of {len(known)} of {len(compared)} problems: {_summary([ratio for ratio, _ in known])}")


def _summary(ratios: list[float]) -> str:
    ratios = sorted(ratios)
    tenth = ratios[int(0.9 * (len(ratios) - 1))]
    return f"median {statistics.median(ratios):.3f}, nine in ten {tenth:.3f}, worst {ratios[-1]:.3f}"


def _rows_of(path: Path, seed: int, marks: dict[str, Any]) -> list[dict[str, Any]]:
    """What a check of this seed and these kernels that was broken off has compared."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [row for row in rows if row["seed"] == seed and all(row.get(name) == marks[name] for name in marks)]


def _of_best(best: Candidate, times: Sequence[tuple[Candidate, Time]]) -> dict[str, Any] | None:
    """What a search found of the config that is the best: None where it did not try it, ``final`` where it came to the
    careful round.
    """
    found = next((time for candidate, time in times if candidate.name == best.name), None)
    return None if found is None else {"us": round(found.us, 3), "final": found.final}


def _by_point(product: LinearProblem, point: Any, child: Worker) -> Dispatcher:
    """What chooses by a map that holds the point just measured."""
    device = child.facts["device"]
    mine = Policy(Origin.here(device.name, device.arch))
    mine.put(product, point)
    return Dispatcher(device.name, [mine])


def _spaces(plans: Path) -> Path:
    return plans.with_suffix(".spaces")


def _read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = pickle.loads(path.read_bytes()) if path.exists() else {}
    return found
