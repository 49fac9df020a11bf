"""The search behind `anybit tune`: candidates are planned and compiled in parallel, then checked and timed in a child.

If the child crashes or hangs, the candidate at fault is excluded by name, and a new child continues with the next. The
parent never uses the GPU. Results are saved every few seconds, and a restarted search skips what the file already has.
"""

import contextlib
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from anybit.choose.builtin import FEW_TOKENS
from anybit.choose.choose import Map
from anybit.choose.families import Candidate
from anybit.choose.policy import Measured, Origin, Point, Policy, save, usable
from anybit.choose.space import clearly_faster, defaults_of, hints_of, preserves_pdl_overlap, promising
from anybit.kernels.linear_problem import LinearProblem
from anybit.tune.processes import CrashError, Worker, compile_one, compilers, die_with_parent
from anybit.tune.roofline import floor_us
from anybit.tune.worker import Runner, Time, TimingBudget

_logger = logging.getLogger(__name__)

_SAVE_SECONDS, _SAVE_SHARE = 2.0, 30
"""Seconds between saves: at least the first, and at least the second times the duration of a save."""
_HINTS = 8
"""Candidates to try because maps, or the running search, whose kernels are compiled already, expect them to be fast."""
_EACH_SECONDS = 0.25
"""Most seconds to check and time one candidate among others."""
_PLAUSIBLE = 0.7
"""Times at few tokens below this share of the roofline (whose rates were measured under load) are discarded."""
_TIE = 1.01
"""What would run is kept within this factor of the best: the difference is noise, and it saves a kernel."""


@dataclass(frozen=True)
class Options:
    """Options of a search.

    each: candidates per family, besides what would run and hints.
    seconds: start no new problem after this time.  limit: seconds that one compiled candidate may take.
    again: remeasure what the file has.  jobs: compiling processes; 0: one per core.
    """

    each: int = 6
    effort: TimingBudget = field(default_factory=TimingBudget)
    seconds: float = float("inf")
    limit: float = 20.0
    again: bool = False
    jobs: int = 0


Report = Callable[[str, int, int, float], None]
"""What is told of a search before each problem: the problem, how many are done, of how many, the seconds left."""


# -------- what is tried

Planned = dict[Candidate, str | None]
"""Candidates to try for a problem, each with the reason why its kernels do not compile, or None."""


def candidates_of(product: LinearProblem, by: Map, options: Options) -> list[Candidate]:
    """Candidates for a problem: what would run, what won nearby, and the most promising of every family."""
    if product.k % 16:
        return []  # what runs by default pads rows
    return promising(product, options.each, by, _HINTS)


_by = Map([])
_options = Options()


def _begin(by: Map, options: Options) -> None:
    global _by, _options
    die_with_parent()
    _by, _options = by, options


def plan(product: LinearProblem) -> Planned:
    """Choose candidates and compile their kernels into the disk cache; runs in a compiling process."""
    found: Planned = dict.fromkeys(candidates_of(product, _by, _options))
    for one in found:
        reasons = (compile_one(kernel, product.device.arch) for kernel in one.kernels(product))
        found[one] = next(filter(None, reasons), None)
    return found


def plans(products: Sequence[LinearProblem], by: Map, options: Options) -> Generator[tuple[LinearProblem, Planned]]:
    """Yield (problem, plan) in order; processes plan and compile a few problems ahead of the measurement.

    Problems without candidates are skipped.
    """
    jobs = options.jobs or os.cpu_count() or 1
    pool, rest, ahead = (
        compilers(jobs, _begin, by, options),
        iter(products),
        deque[tuple[LinearProblem, Future[Planned] | None]](),
    )
    try:
        while True:
            for product in islice(rest, 4 * jobs - len(ahead)):
                future = None
                with contextlib.suppress(BrokenProcessPool, RuntimeError):
                    future = pool.submit(plan, product)
                ahead.append((product, future))
            if not ahead:
                return
            product, future = ahead.popleft()
            made = None
            with contextlib.suppress(BrokenProcessPool):
                made = future.result() if future else None
            # If the compiler crashed its process, the child compiles instead, one by one.
            made = made or dict.fromkeys(candidates_of(product, by, options))
            if made:
                yield product, made
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# -------- the search


def search(
    products: Sequence[LinearProblem],
    path: Path | Callable[[str], Path] | None,
    options: Options | None = None,
    *,
    hints: Sequence[Policy] = (),
    report: Report | None = None,
    factory: Callable[[], Runner] = Runner,
    child: Worker | None = None,
) -> Policy:
    """Measure products, return the map of results, and merge it into the file at ``path``.

    path: a file, or a function from the GPU's name to one.  hints: maps whose configs are tried, too.  child: a started
    Worker.  Products keep their order, except that those of one layer are grouped.
    """
    options = options or Options()
    with contextlib.nullcontext(child) if child else Worker(factory) as worker:
        device = worker.facts["device"]
        path = path(device.name) if callable(path) else path
        policy = Policy(Origin.here(device.name, device.arch, worker.facts["driver"], worker.facts["torch"]))
        before = usable(path) if path is not None and path.exists() else None
        maps = [*([before] if before else []), *hints]
        known = before if before is not None and before.origin.gpu == device.name else Policy(policy.origin)
        by = Map(maps)
        policy.excluded |= known.excluded
        todo = [replace(product, device=device) for product in together(products)]
        if not options.again:
            todo = [product for product in todo if known.exact(product) is None]
        began = saved = time.perf_counter()
        pause = _SAVE_SECONDS
        with contextlib.closing(plans(todo, by, options)) as ready:
            for done, (product, made) in enumerate(ready):
                spent = time.perf_counter() - began
                if spent > options.seconds:
                    break
                if report is not None:
                    left = spent / done * (len(todo) - done) if done else float("nan")
                    report(str(product), done, len(todo), left)
                policy.excluded |= {excluded_name(product, one): reason for one, reason in made.items() if reason}
                own = defaults_of(product, by)
                every = dict.fromkeys((*made, *hints_of(product, Map([policy, known]), _HINTS)))
                tried = [one for one in every if one in own or preserves_pdl_overlap(product, one, own[0])]
                point = point_of(product, own, race(worker, product, tried, options, policy, own))
                if point is not None:
                    policy.put(product, point)
                now = time.perf_counter()
                if path is not None and now - saved > pause:
                    save(policy, path)
                    saved = time.perf_counter()
                    pause = max(_SAVE_SECONDS, _SAVE_SHARE * (saved - now))
        if path is not None and (policy.points or policy.excluded):
            save(policy, path)
        known.merge(policy)
        return replace(known, origin=policy.origin)


def together(products: Sequence[LinearProblem]) -> list[LinearProblem]:
    """Products in order, but grouped by layer, so that its weights are generated once."""
    layers: dict[Hashable, list[LinearProblem]] = {}
    for product in dict.fromkeys(products):
        layers.setdefault((product.n, product.k, product.weights, product.dtype), []).append(product)
    return [product for group in layers.values() for product in group]


def excluded_name(product: LinearProblem, candidate: Candidate) -> str:
    """The key of an excluded candidate, which is excluded for its whole scheme."""
    return f"{product.scheme} {candidate.name}"


def race(
    child: Worker,
    product: LinearProblem,
    candidates: Sequence[Candidate],
    options: Options,
    policy: Policy,
    keep: Collection[Candidate] = (),
) -> list[tuple[Candidate, Time]]:
    """Check and time candidates in the child; failing ones are excluded. Empty if one of ``keep`` finds no memory.

    keep: candidates always timed carefully, whatever their first times (what would run).
    """

    def measured(some: list[Candidate], limit: float) -> list[tuple[Candidate, Time]]:
        kept, found = [i for i, one in enumerate(some) if one in keep], []
        answers = child.measure(product, some, kept, options.effort, 1.5 * floor_us(product), limit) if some else []
        for one, answer in zip(some, answers, strict=True):
            if isinstance(answer, Time):
                found.append((one, answer))
            elif answer:
                policy.excluded[excluded_name(product, one)] = answer
            else:
                warnings.warn("out of GPU memory: the next search tries again what was not timed", stacklevel=2)
                if one in keep:
                    return []
        return found

    todo = [one for one in candidates if excluded_name(product, one) not in policy.excluded]
    with contextlib.suppress(CrashError):
        return measured(todo, options.limit + _EACH_SECONDS * len(todo))
    good = []
    for one in todo:  # measure each alone to find the one at fault
        try:
            good += [candidate for candidate, _ in measured([one], options.limit)]
        except CrashError as error:
            policy.excluded[excluded_name(product, one)] = str(error)
    try:
        return measured(good, options.limit + _EACH_SECONDS * len(good))
    except CrashError as error:
        policy.excluded[f"{product}"] = str(error)
        return []


def point_of(product: LinearProblem, own: Sequence[Candidate], times: Sequence[tuple[Candidate, Time]]) -> Point | None:
    """The point for a map: the best of each strategy, preferring what would run (``own``) within the noise.

    At few tokens, what would run is kept unless something is clearly faster.
    None if nothing was timed, or if a time at few tokens is shorter than reading the weights takes.
    """
    if not times:
        return None
    few = product.m <= FEW_TOKENS
    least = min(time.us for candidate, time in times if time.final or candidate == own[0])
    if few and least < _PLAUSIBLE * floor_us(product):
        _logger.info("discarding times of %s: shorter than reading its weights takes", product)
        return None
    strategies = {}
    for strategy in dict.fromkeys(candidate.strategy for candidate, _ in times):
        mine = [(one, time) for one, time in times if one.strategy == strategy]
        final = [(one, time) for one, time in mine if time.final] or mine
        best, best_time = min(final, key=lambda item: item[1].us)
        for candidate, found in final:
            tie = found.us <= _TIE * best_time.us or (few and not clearly_faster(best_time.us, found.us))
            if tie and candidate in own:
                best, best_time = candidate, found
        strategies[strategy] = Measured.of(best, best_time.us)
    default_us = next((round(found.us, 3) for candidate, found in times if candidate == own[0]), None)
    return Point(default_us or max(measured.us for measured in strategies.values()), strategies)
