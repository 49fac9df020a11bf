"""How close chosen configs are to the best: random problems against a search of the whole config space.

    python tools/tuning/check_policy.py verify --problems 200 --seed 1 [--part 0 8]   # on a GPU
    python tools/tuning/check_policy.py replay                                        # without one

A problem is a layer of one of eleven models, one of five schemes and a number of tokens between 1 and 8192. Its space
is every legal config of every family, except few-token ones that no map may choose (``preserves_pdl_overlap``).
``verify`` times all of it interleaved with three choices: ``map``, by the policy map; ``tuned``, by a search like
``anybit tune`` at the token count that stands for the problem's; ``built in``. Configs that provably lose
(``lower_bound``) are left out. ``replay`` rates the choices of today's map in problems already compared; with
``--without-own`` as if the problem's layer had not been measured.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

import torch

from anybit.choose.builtin import builtin, step
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import Candidate
from anybit.choose.policy import SHIPPED, Origin, Policy, file_name, read
from anybit.choose.space import defaults_of, preserves_pdl_overlap, promising
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.tune import worker
from anybit.tune.processes import Worker, compile_one
from anybit.tune.search import Options, candidates_of, point_of, race
from anybit.tune.worker import Bench, Runner, Time, TimingBudget, WrongResultError
from layers import drawn
from lower_bound import lower_bound_us
from timing import RESULTS, merge_rows, stamp

KEY = ("case", "seed", "scheme", "m", "n", "k")
CHOICES = ("map", "tuned", "built in")
JUDGE = Path(__file__).with_name("judge.json")
_CHUNK = 48
"""Candidates per graph in the first pass."""


@dataclass(frozen=True)
class StagedPruning(TimingBudget):
    """How a whole space is timed: everything once; what is within ``first`` of the best with more replays; what is
    within ``last`` of it, at most ``finalists``, carefully and after a check against the reference.
    """

    microseconds: float = 80.0
    replays: int = 3
    final_replays: int = 9
    finalists: int = 10
    first: float = 1.25
    last: float = 1.08
    most: int = 48


class SpaceBench(Bench):
    """A bench for whole spaces: checks only finalists, since a wrong result can at most look fast."""

    def check(self, candidate: Candidate) -> None:
        """Run a candidate for the first time and synchronize, so that a fault is attributed to it."""
        self.again(candidate)(0)
        torch.cuda.synchronize()

    def times(
        self, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget, guess_us: float
    ) -> list[Time]:
        """Times of a whole space; infinite for configs that provably lose."""
        assert isinstance(effort, StagedPruning)
        once = self._once(candidates, keep, guess_us)
        best = min(once.values())
        near = [i for i in sorted(once, key=once.__getitem__) if once[i] <= effort.first * best][: effort.most]
        near += [i for i in keep if i not in near]
        again = self._race(candidates, near, effort.microseconds, effort.replays, once, worker.race)
        last = self._finalists(candidates, keep, effort, again)
        careful = self._race(
            candidates, last, 2 * effort.microseconds, effort.final_replays, again, worker.race_in_orders
        )
        us = once | again | careful
        return [Time(us.get(i, float("inf")), i in careful) for i in range(len(candidates))]

    def _race(
        self,
        candidates: Sequence[Candidate],
        places: Sequence[int],
        microseconds: float,
        replays: int,
        guess: dict[int, float],
        how: Callable[..., list[float]],
    ) -> dict[int, float]:
        if not places:
            return {}
        counts = [worker.calls_in(microseconds, guess[i], worker.MOST_CALLS) for i in places]
        us = how(self.stream, [self.again(candidates[i]) for i in places], counts, replays)
        return dict(zip(places, us, strict=True))

    def _once(self, candidates: Sequence[Candidate], keep: Collection[int], guess_us: float) -> dict[int, float]:
        """Microseconds, from a first pass over candidates that their bound does not rule out, most promising first."""
        bounds = [lower_bound_us(self.product, one) for one in candidates]
        order = list(dict.fromkeys([*keep, *sorted(range(len(candidates)), key=bounds.__getitem__)]))
        found: dict[int, float] = {}
        for chunk in (order[at : at + _CHUNK] for at in range(0, len(order), _CHUNK)):
            best = min(found.values(), default=float("inf"))
            some = [i for i in chunk if bounds[i] <= best or i in keep]
            guess = dict.fromkeys(some, min(best, guess_us))
            found |= self._race(candidates, some, 40.0, 1, guess, worker.race)
        return found

    def _finalists(
        self, candidates: Sequence[Candidate], keep: Collection[int], effort: StagedPruning, again: dict[int, float]
    ) -> list[int]:
        """``keep``, and the candidates closest to the best that match the reference."""
        last: list[int] = []
        best = 0.0
        for i in [*keep, *sorted(again, key=again.__getitem__)]:
            if i in last or (i not in keep and best and again[i] > effort.last * best):
                continue
            if len(last) >= effort.finalists + len(keep):
                break
            try:
                super().check(candidates[i])
            except (WrongResultError, KernelError, ValueError):
                continue
            last.append(i)
            best = min(best or again[i], again[i])
        return last


class SpaceRunner(Runner):
    """A runner with benches for whole spaces."""

    bench = SpaceBench


def verify(options: argparse.Namespace) -> None:
    """Compare choices with whole spaces; rows go to ``options.rows``."""
    began = time.perf_counter()
    child, spaces = Worker(), Worker(SpaceRunner)
    child.start()
    spaces.start()
    device: Device = child.facts["device"]
    by = Dispatcher(device.name, [read(options.map or SHIPPED / file_name(device.name))])
    usual = Options(options.each, effort=TimingBudget(60, 2, 5), limit=options.limit)
    whole = replace(usual, effort=StagedPruning())
    policy, marks = Policy(Origin.here(device.name, device.arch)), stamp(device.name)
    part, parts = options.part
    problems = [replace(one, device=device) for one in drawn(options.problems, options.seed)[part::parts]]
    rows = rows_of(options.rows, options.seed, marks)
    done = {tuple(row[name] for name in KEY[2:]) for row in rows}
    with ProcessPoolExecutor(options.jobs or None) as pool:
        for product in problems:
            if time.perf_counter() - began > options.seconds:
                break
            if (str(product.scheme), product.m, product.n, product.k) in done:
                continue
            near = replace(product, m=step(product.m))
            legal, own = promising(product, 10**6, by), defaults_of(near, by)
            candidates = [one for one in legal if preserves_pdl_overlap(product, one, own[0])]
            tried = candidates_of(near, by, usual)
            kernels = {k for one in candidates for k in one.kernels(product)}
            kernels |= {k for one in tried for k in one.kernels(near)}
            list(pool.map(compile_one, kernels, [device.arch] * len(kernels), chunksize=4))
            tried = [one for one in tried if one in own or preserves_pdl_overlap(near, one, own[0])]
            before = {*policy.excluded}
            point = point_of(near, own, race(child, near, tried, usual, policy, own))
            if point is None:
                print(f"{product}: a search found nothing", flush=True)
                continue
            mine = Policy(Origin.here(device.name, device.arch))
            mine.put(near, point)
            chosen = {"map": by.choose(near).candidate, "built in": builtin(product)}
            chosen["tuned"] = Dispatcher(device.name, [mine]).choose(near).candidate
            everything = list(dict.fromkeys([*chosen.values(), *candidates]))
            times = race(spaces, product, everything, whole, policy, list(chosen.values()))
            final = {candidate: one.us for candidate, one in times if one.final}
            if not all(one in final for one in chosen.values()):
                print(f"{product}: {policy.excluded.get(str(product), 'a choice was wrong')}", flush=True)
                continue
            best = min(final, key=final.__getitem__)
            ratios = {name: round(final[candidate] / final[best], 4) for name, candidate in chosen.items()}
            timed = sum(math.isfinite(one.us) for _, one in times)
            rows.append(
                {"case": "random problem", "scheme": str(product.scheme), "m": product.m, "n": product.n}
                | {"k": product.k, "us": round(final[best], 3), "best": best.name, "legal": len(legal), "timed": timed}
                | {"no_room": len(legal) - len(candidates), "lose": len(times) - timed, "untried": 0}
                | {"timed_carefully": len(final), "ratios": ratios}
                | {"excluded": {name: policy.excluded[name] for name in policy.excluded.keys() - before}}
                | {"chosen": {n: c.name for n, c in chosen.items()}, "seed": options.seed, "checked": True} | marks
            )  # fmt: skip
            print(f"{product}: {timed} timed of {len(legal)}; {ratios}; {final[best]:.2f} us {best.name}", flush=True)
            merge_rows(options.rows, rows, KEY)
    child.stop()
    spaces.stop()
    for name in CHOICES if rows else ():
        print(f"{name}: {summary([row['ratios'][name] for row in rows])}")


def rows_of(path: Path, seed: int, marks: dict[str, object]) -> list[dict[str, Any]]:
    """The rows of an interrupted check with this seed and these kernels."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [row for row in rows if row["seed"] == seed and all(row.get(name) == marks[name] for name in marks)]


# -------- replay


class Judge:
    """What is known of the compared problems, frozen: scores depend on no estimate or map that may change.

    judge.json was written at commit 2d4891d. It has for each problem the ratios, in thousandths, of configs that no row
    names: ``times``, by times of that commit's map at a nearby token count, and ``estimates``, by that commit's cost
    model beside a config that the row names (up to 1.3). defaults: of config fields, which names leave out.
    """

    def __init__(self, path: Path = JUDGE) -> None:
        frozen = json.loads(path.read_text())
        self._defaults: dict[str, dict[str, object]] = frozen["defaults"]
        self._names = {name: i for i, name in enumerate(frozen["configs"])}
        self._known = {
            tuple(key): [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in (times, estimates)]
            for *key, times, estimates in frozen["problems"]
        }

    def ratio(self, row: dict[str, Any], name: str) -> tuple[float, str]:
        """The ratio of a config, by name, to the best of a row's problem, and its source.

        A config that cannot be scored is taken to be as slow as the slowest named one.
        """
        named = {row["best"]: 1.0} | {row["chosen"][choice]: row["ratios"][choice] for choice in CHOICES}
        named = {self.short(one): ratio for one, ratio in named.items()}
        mine = self.short(name)
        if mine in named:
            return named[mine], "named"
        known = self._known.get(tuple(row[part] for part in KEY[1:]), [{}, {}])
        for ratios, how in zip(known, ("map times", "estimate"), strict=True):
            if (found := ratios.get(self._names.get(mine))) is not None:
                return found / 1000, how
        return max(named.values()), "unscored"

    def short(self, name: str) -> str:
        """A config's name, its fields sorted, without those at their default."""
        kernel, fields = name.partition("(")[0], fields_of(name)
        defaults = self._defaults.get(kernel, {})
        kept = (f"{key}={value}" for key, value in sorted(fields.items()) if defaults.get(key) != value)
        return f"{kernel}({', '.join(kept)})"


def fields_of(name: str) -> dict[str, object]:
    """Parse the fields of a config's name."""
    pairs = (pair.split("=") for pair in name[name.index("(") + 1 : -1].split(", ") if pair)
    words = {"True": True, "False": False}
    return {key: words.get(value, int(value) if value.isdigit() else value) for key, value in pairs}


def without(policy: Policy, n: int, k: int) -> Policy:
    """A map without the points of layers of this shape, of any scheme."""
    return replace(policy, layers={key: points for key, points in policy.layers.items() if key[2:] != (n, k)})


def replay(options: argparse.Namespace) -> None:
    """Print how far the choices of a map are from the best of the compared problems."""
    device, judge = Device.named("sm_90a"), Judge()
    map_, found = read(options.map or SHIPPED / file_name(device.name)), list[tuple[float, str, str]]()
    whole = Dispatcher(device.name, [map_])
    for row in json.loads(options.rows.read_text()):
        scheme, n, k = Scheme.parse(row["scheme"]), row["n"], row["k"]
        m = step(row["m"])  # as layers round it
        product = LinearProblem(m, n, k, scheme.weights, scheme.activations, device=device)
        by = Dispatcher(device.name, [without(map_, n, k)]) if options.without_own else whole
        chosen = by.choose(product).candidate
        found.append((*judge.ratio(row, chosen.name), str(product)))
    print(f"{summary([ratio for ratio, *_ in found])}; {dict(Counter(how for _, how, _ in found))}")
    print(f"those that can be scored: {summary([ratio for ratio, how, _ in found if how != 'unscored'])}")
    for ratio, how, name in sorted(found, reverse=True)[: options.worst]:
        print(f"    {ratio:.3f} ({how}) {name}")


def summary(ratios: Sequence[float]) -> str:
    """Summarize ratios."""
    ordered = sorted(ratios)
    mean = math.exp(sum(map(math.log, ordered)) / len(ordered))
    tenth = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{len(ordered)} problems, geometric mean {mean:.4f}, 90th percentile {tenth:.3f}, worst {ordered[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    for name in ("verify", "replay"):
        command = kinds.add_parser(name)
        command.add_argument("--map", type=Path, help="by default the shipped one")
        command.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch_check.json")
        if name == "replay":
            command.add_argument("--worst", type=int, default=5, help="how many to show")
            command.add_argument("--without-own", action="store_true", help="leave out the points of a problem's layer")
            continue
        command.add_argument("--problems", type=int, default=200)
        command.add_argument("--seed", type=int, default=20261121)
        command.add_argument("--part", type=int, nargs=2, default=(0, 1), help="part I of N, for several GPUs")
        command.add_argument("--each", type=int, default=16, help="candidates per family in the search")
        command.add_argument("--seconds", type=float, default=300.0, help="start no problem after this")
        command.add_argument("--limit", type=float, default=20.0, help="seconds per candidate")
        command.add_argument("--jobs", type=int, default=0, help="processes that compile")
    options = parser.parse_args()
    {"verify": verify, "replay": replay}[options.command](options)


if __name__ == "__main__":
    main()
