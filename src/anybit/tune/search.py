"""The search: candidates are compiled in parallel without a GPU, then checked and timed in a child process.

The child may crash or hang: the candidate that it was at is excluded, by name, and a new child goes on with the next.
The parent never touches the GPU. What is found is saved every few seconds, and a search that is started again skips
what the file already has.
"""

import contextlib
import ctypes
import heapq
import logging
import math
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from anybit.device import Device
from anybit.errors import KernelError
from anybit.scheme import Scheme
from anybit.tune.interpolate import scaled
from anybit.tune.lower_bound import lower_bound_us
from anybit.tune.plans import Options, Plan, Planner, die_with_parent
from anybit.tune.policy import Measured, Origin, Point, Policy, save, usable
from anybit.tune.registry import LinearProblem, steps_to
from anybit.tune.roofline import floor_us
from anybit.tune.space import FEW_TOKENS, Candidate, leaves_room, promising
from anybit.tune.worker import (
    Runner,
    StagedPruning,
    Time,
    TimingBudget,
    WrongResultError,
)

_logger = logging.getLogger(__name__)

_SAVE_SECONDS, _SAVE_SHARE = 2.0, 30
"""How often what was found is saved; at least so many times what saving it takes."""
_NEIGHBOURS = 6
_MOST_HINTS = 6
"""What won at so many of the nearest products of the same search is tried too, at most so many configs."""
_WORTH_TRYING = 1.5
"""A strategy that was so many times slower than another nearby is left to the plan."""
_FALLS = 6
"""How often a whole space may take the child down."""
_TIE = 1.01
"""A built-in choice that is no more than this behind the best is kept: it is measured noise, and one kernel fewer."""


@dataclass(frozen=True)
class Progress:
    """Where a search stands."""

    product: LinearProblem
    done: int
    total: int
    seconds_left: float
    excluded: int


Report = Callable[[Progress], None]


class Worker:
    """The process that uses the GPU, restarted when it has died."""

    def __init__(self, factory: Callable[[], Any] = Runner) -> None:
        self._factory = factory
        self._process: Any = None
        self.connection: Connection[Any, Any] = None  # type: ignore[assignment]
        self.facts: dict[str, Any] = {}
        self.spent: dict[str, float] = {}
        """Seconds of the child's work, by what it was."""
        self.left_out = 0
        self.running: list[int] = []

    def start(self, limit: float = 120.0) -> None:
        """Begin, and wait until the GPU has answered. Raises KernelError if it does not."""
        self.stop()
        # Forking takes no time, but the child of a process that has begun to use CUDA cannot use it.
        forks = "fork" in multiprocessing.get_all_start_methods() and not _cuda_has_begun()
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._factory), daemon=True)
        self._process.start()
        theirs.close()
        message = self.receive(limit)
        if message is None or message[0] != "hello":
            what = "it did not answer" if message is None else message[-1]
            raise KernelError(f"the measuring process could not start: {what}")
        self.facts = message[1]

    def send(self, job: tuple[Any, ...]) -> None:
        """Hand over a job; a child that has died since the last one is restarted."""
        try:
            self.connection.send(job)
        except OSError:
            self.start()
            self.connection.send(job)

    def receive(self, limit: float) -> Any:
        """The next message; None if there is none within ``limit`` seconds or the process has died."""
        try:
            return self.connection.recv() if self.connection.poll(limit) else None
        except (EOFError, OSError):
            return None

    def stop(self) -> int | None:
        """End the process; its exit code, or None where it had to be killed."""
        if self._process is None:
            return 0
        self._process.join(0.2)
        code: int | None = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        self.connection.close()
        self._process = None
        return code


def _cuda_has_begun() -> bool:
    """Whether anything in this process has initialized the CUDA driver; asking does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialized = 3
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != not_initialized)


def serve(connection: "Connection[Any, Any]", factory: Callable[[], Any]) -> None:
    """The child's loop: answer jobs until there are no more."""
    die_with_parent()
    try:
        runner = factory()
        connection.send(("hello", runner.describe()))
    except Exception as error:
        connection.send(("refused", f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            return
        try:
            _serve_one(connection, runner, *job)
        except Exception:
            connection.send(("broken", traceback.format_exc(limit=4)))
            os._exit(3)


def _serve_one(
    connection: "Connection[Any, Any]",
    runner: Any,
    product: LinearProblem,
    candidates: list[Candidate],
    keep: list[int],
    effort: TimingBudget | StagedPruning,
    guess_us: float,
    together: bool,
) -> None:
    times_of: dict[str, float] = {}
    mark = time.perf_counter()

    def passed(what: str) -> None:
        nonlocal mark
        now = time.perf_counter()
        times_of[what] = times_of.get(what, 0.0) + now - mark
        mark = now

    bench = runner.prepare(product)
    passed("prepare")
    if isinstance(effort, StagedPruning):
        sifted, wrong, left_out = bench.sift(
            candidates, keep, effort, guess_us, lambda places: connection.send(("running", list(places)))
        )
        for i, reason in wrong.items():
            connection.send(("failed", i, reason))
        passed("sift")
        connection.send(("times", sifted, times_of, left_out))
        return
    good = []
    for i, candidate in enumerate(candidates):
        connection.send(("begin", i))
        try:
            bench.check(candidate)
            good.append(i)
        except (WrongResultError, KernelError, ValueError, torch.OutOfMemoryError) as error:
            connection.send(("failed", i, f"{error}".splitlines()[0]))
        except RuntimeError as error:
            # After a fault the context is of no more use: a new process is.
            connection.send(("failed", i, f"{error}".splitlines()[0]))
            os._exit(3)
    passed("check")
    found: dict[int, Time] = {}
    groups = [good] if together else [[i] for i in good]
    for group in groups:
        connection.send(("begin", group[0] if len(group) == 1 else -1))
        kept = [place for place, i in enumerate(group) if i in keep]
        times = bench.times([candidates[i] for i in group], kept, effort, guess_us) if group else []
        found |= dict(zip(group, times, strict=True))
    passed("time")
    connection.send(("times", found, times_of, 0))


def search(
    products: Sequence[LinearProblem],
    path: Path | Callable[[str], Path] | None,
    options: Options | None = None,
    *,
    hints: Sequence[Policy] = (),
    report: Report | None = None,
    factory: Callable[[], Any] = Runner,
    child: Worker | None = None,
) -> Policy:
    """Measure products, and return the map of what was found, which also goes into the file at ``path``.

    path: a file, or what names one for a GPU's name.  hints: maps whose configs are tried too.
    Products keep their order, except that those of one layer come together. child: one that has begun.
    """
    options = options or Options()
    mine = child is None
    child = child or Worker(factory)
    try:
        if mine:
            child.start()
        file = path(child.facts["device"].name) if callable(path) else path
        return _search(child, products, file, options, hints, report)
    finally:
        if mine:
            child.stop()


def _search(
    child: Worker,
    products: Sequence[LinearProblem],
    path: Path | None,
    options: Options,
    hints: Sequence[Policy],
    report: Report | None,
) -> Policy:
    device: Device = child.facts["device"]
    policy = Policy(Origin.here(device.name, device.arch, child.facts["driver"], child.facts["torch"]))
    known = usable(path) if path is not None and path.exists() else None
    maps, won = [*([known] if known else []), *hints], NeighborHints()
    if known is not None and known.origin.foreign(device.name) is None:
        known = known.current()
        policy.excluded |= known.excluded
        won.learn(known)
    else:
        known = None
    todo = [replace(product, device=device) for product in together(products)]
    if known is not None and not options.again:
        todo = [product for product in todo if not _answers(known.exact(product), product, options)]
    began = saved = time.perf_counter()
    pause = _SAVE_SECONDS
    with Planner(maps, options) as planner:
        plans = planner.plans(todo)

        def following() -> tuple[LinearProblem, Plan, list[Candidate]] | None:
            one = next(plans, None)
            return None if one is None else (*one, won.near(*one))

        item, done = following(), 0
        while item is not None:
            product, plan, more = item
            now = time.perf_counter()
            if now - began > options.seconds:
                break
            left = (now - began) / done * (len(todo) - done) if done else float("nan")
            if report is not None:
                report(Progress(product, done, len(todo), left, len(policy.excluded)))
            for i, reason in plan.refused.items():
                policy.excluded[excluded_name(product, plan.candidates[i])] = reason
            ahead: list[tuple[LinearProblem, Plan, list[Candidate]] | None] = []
            times = timed(child, product, plan, options, policy, more, lambda: ahead.append(following()))  # noqa: B023
            point = point_of(product, plan, options, times)
            if point is not None:
                policy.put(product, point)
                won.add(product, point)
            now = time.perf_counter()
            if path is not None and now - saved > pause:
                save(policy, path)
                saved = time.perf_counter()
                pause = max(_SAVE_SECONDS, _SAVE_SHARE * (saved - now))
            item, done = ahead[0] if ahead else following(), done + 1
    if path is not None and (policy.points or policy.excluded):
        save(policy, path)
    if known is not None:
        known.merge(policy)
        return replace(known, origin=policy.origin)
    return policy


def _answers(point: Point | None, product: LinearProblem, options: Options) -> bool:
    """Whether a point holds all that is asked: 8-bit activations too where they are allowed now and a kernel runs."""
    if point is None or product.activations.quantized or "a8" not in options.allow:
        return point is not None
    if any(measured.activations for measured in point.strategies.values()):
        return True
    return all(one.activations == product.activations for one in promising(product, 1, allow=options.allow))


def together(products: Sequence[LinearProblem]) -> list[LinearProblem]:
    """Products in their order, but those of one layer side by side: its weights are made once."""
    layers: dict[Any, list[LinearProblem]] = {}
    for product in dict.fromkeys(products):
        layers.setdefault((product.n, product.k, product.weights, product.dtype), []).append(product)
    return [product for group in layers.values() for product in group]


class NeighborHints:
    """What won so far in a search: tried at products nearby, since their kernels are compiled."""

    def __init__(self) -> None:
        self._points: dict[Any, list[tuple[float, float, float, Point]]] = {}

    def add(self, product: LinearProblem, point: Point) -> None:
        """Remember a point."""
        place = math.log2(product.n), math.log2(product.k), 2 * math.log2(product.m)
        self._points.setdefault((product.weights, product.activations, product.dtype), []).append((*place, point))

    def learn(self, policy: Policy) -> None:
        """Remember all points of a map."""
        for (scheme, dtype, n, k), points in policy.layers.items():
            parsed = Scheme.parse(scheme)
            for m, point in points.items():
                self.add(LinearProblem(m, n, k, parsed.weights, parsed.activations, getattr(torch, dtype)), point)

    def near(self, product: LinearProblem, plan: Plan) -> list[Candidate]:
        """The best configs of every strategy at the nearest products, where they are legal and not planned already."""
        n, k, m = math.log2(product.n), math.log2(product.k), 2 * math.log2(product.m)
        points = self._points.get((product.weights, product.activations, product.dtype), [])
        nearest = heapq.nsmallest(_NEIGHBOURS, points, lambda p: abs(p[0] - n) + abs(p[1] - k) + abs(p[2] - m))
        found: dict[Candidate, None] = {}
        for *_, point in nearest:
            for _, measured in point.ordered():
                if len(found) < _MOST_HINTS and measured.us < _WORTH_TRYING * point.ordered()[0][1].us:
                    with contextlib.suppress(KernelError):
                        candidate = measured.candidate(product)
                        if candidate not in plan.candidates:
                            found[candidate] = None
        return list(found)


def excluded_name(product: LinearProblem, candidate: Candidate) -> str:
    """What an excluded candidate is called: it is left out for its whole scheme."""
    return f"{product.scheme} {candidate.name}"


def timed(
    child: Worker,
    product: LinearProblem,
    plan: Plan,
    options: Options,
    policy: Policy,
    more: Sequence[Candidate] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> list[tuple[Candidate, Time]]:
    """Check and time what is planned, and ``more``, in the child; exclusions go into ``policy``.

    Of few tokens only what leaves room to others. meanwhile: called once, while the child is at work.
    """
    own = [plan.candidates[i] for i in plan.own]
    candidates = [one for one in (*plan.candidates, *more) if one in own or leaves_room(product, one)]
    return race(child, product, candidates, options, policy, own, meanwhile)


def race(
    child: Worker,
    product: LinearProblem,
    candidates: Sequence[Candidate],
    options: Options,
    policy: Policy,
    keep: Collection[Candidate] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> list[tuple[Candidate, Time]]:
    """Check and time candidates in the child, as often as it takes; those excluded are left out.

    keep: candidates that are timed carefully however they begin, as built-in choices are. meanwhile: see ``timed``.
    """
    todo = [c for c in candidates if excluded_name(product, c) not in policy.excluded]
    one_by_one = False
    for turn in range(len(candidates) + 2):
        if not todo:
            break
        kept = [i for i, candidate in enumerate(todo) if candidate in keep]
        child.send((product, todo, kept, options.effort, 1.5 * floor_us(product), not one_by_one))
        if not turn:
            meanwhile()
        times, gone, fault = _listen(child, options.limit)
        for i, reason in gone.items():
            policy.excluded[excluded_name(product, todo[i])] = reason
        if times is not None:
            return [(todo[i], time) for i, time in times.items()]
        child.stop()
        child.start()
        if not gone:
            if one_by_one:
                policy.excluded[f"{product}"] = fault
                break
            one_by_one = True
        todo = [c for c in todo if excluded_name(product, c) not in policy.excluded]
    return []


def sift(
    child: Worker,
    product: LinearProblem,
    candidates: Sequence[Candidate],
    options: Options,
    policy: Policy,
    keep: Collection[Candidate],
    sieve: StagedPruning,
) -> tuple[list[tuple[Candidate, Time]], int]:
    """Times of a whole space, and how many of its candidates were left out by their bounds (``runner.StagedPruning``).

    What takes the child down is excluded, and the rest is gone through anew. Where many were under way, each of these
    runs by itself first at the next go; what falls again without saying which is left out whole, its names kept.
    """
    bounds = dict(zip(candidates, sieve.bounds or [0.0] * len(candidates), strict=True))
    suspects: set[Candidate] = set()
    fault = ""
    for _ in range(_FALLS):
        todo = [c for c in candidates if excluded_name(product, c) not in policy.excluded]
        if not todo:
            break
        alone = frozenset(i for i, c in enumerate(todo) if c in suspects)
        sieve = replace(sieve, bounds=tuple(bounds[c] for c in todo), alone=alone)
        kept = [i for i, candidate in enumerate(todo) if candidate in keep]
        child.send((product, todo, kept, sieve, 1.5 * floor_us(product), True))
        times, gone, fault = _listen(child, options.limit)
        for i, reason in gone.items():
            policy.excluded[excluded_name(product, todo[i])] = reason
        if times is not None:
            return [(todo[i], time) for i, time in times.items()], child.left_out
        child.stop()
        child.start()
        if not gone:
            among = {todo[i] for i in child.running}
            if not among:  # it fell before it ran any of them
                break
            names = ", ".join(excluded_name(product, one) for one in among)
            policy.excluded[f"{product}, many together"] = f"{fault}; one of {names}"
            if suspects >= among:  # alone they did nothing: without them, then
                policy.excluded |= {excluded_name(product, one): f"with others: {fault}" for one in among}
            suspects |= among
    policy.excluded[f"{product}"] = fault or "all of its candidates are excluded"
    return [], 0


def _listen(child: Worker, limit: float) -> tuple[dict[int, Time] | None, dict[int, str], str]:
    """What the child says of a job: times, if it came so far; what failed, and why; and how the child ended.

    ``child.running``: the places of what was under way last.
    """
    gone: dict[int, str] = {}
    current = -1
    child.running = []
    while True:
        message = child.receive(limit)
        if message is None:
            code = child.stop()
            fault = f"it hung for {limit:g} s" if code is None else f"it crashed (exit code {code})"
            if current >= 0 and current not in gone:
                gone[current] = fault
            return None, gone, fault
        match message[0]:
            case "begin":
                current = message[1]
            case "running":
                child.running = message[1]
                current = message[1][0] if len(message[1]) == 1 else -1
            case "failed":
                gone[message[1]] = message[2]
            case "times":
                for what, seconds in message[2].items():
                    child.spent[what] = child.spent.get(what, 0.0) + seconds
                child.left_out = message[3]
                return message[1], gone, ""
            case _:
                if current >= 0 and current not in gone:
                    gone[current] = _said(message[-1])
                return None, gone, _said(message[-1])


def _said(traceback_: object) -> str:
    """What a traceback says happened: its first line that is no frame's, since CUDA's errors have more after it."""
    lines = [line for line in str(traceback_).splitlines() if line.strip()]
    return next((line for line in lines if line[0] != " " and not line.startswith("Traceback")), lines[-1]).strip()


def point_of(
    product: LinearProblem, plan: Plan, options: Options, times: Sequence[tuple[Candidate, Time]]
) -> Point | None:
    """What a map says of times: the best of each strategy; built-in choices are preferred within the noise.

    None where nothing was timed, or a time of few tokens is shorter than reading and multiplying takes.
    """
    if not times:
        return None
    own, default = [plan.candidates[i] for i in plan.own], plan.default
    looked_at = [(candidate, time) for candidate, time in times if time.final or candidate == default]
    if product.m <= FEW_TOKENS and any(time.us < lower_bound_us(product, candidate) for candidate, time in looked_at):
        _logger.info("%s is not written down: it took less than reading its weights takes", product)
        return None
    floor = round(floor_us(product), 3)
    strategies = {}
    for strategy in dict.fromkeys(candidate.strategy for candidate, _ in times):
        mine = [(c, t) for c, t in times if c.strategy == strategy]
        final = [(c, t) for c, t in mine if t.final] or mine
        best, best_time = min(final, key=lambda item: item[1].us)
        for candidate, found in final:
            if candidate in own and found.us <= _TIE * best_time.us:
                best, best_time = candidate, found
        strategies[strategy] = Measured.of(best, product, best_time.us)
    also = _between(product, times, strategies, options.grid)
    for candidate, found in times:
        if candidate == default:
            us = round(found.us, 3)
            return Point(us, floor, strategies, Measured.of(candidate, product, us), also)
    return Point(max(measured.us for measured in strategies.values()), floor, strategies, None, also)


_MOST_BETWEEN = 6


def _between(
    product: LinearProblem,
    times: Sequence[tuple[Candidate, Time]],
    strategies: dict[str, Measured],
    grid: Sequence[int],
) -> tuple[Measured, ...]:
    """What is expected to win a strategy at a token count from the grid's last one before this to its next."""
    following = next((m for m in grid if m > product.m), product.m)
    won: Counter[Measured] = Counter()
    for tokens in sorted({*steps_to(product.m, grid), *steps_to(following, grid)} - {product.m, following}):
        here = replace(product, m=tokens)
        best: dict[str, tuple[float, Measured]] = {}
        for candidate, found in times:
            us = None if candidate.activations != product.activations else scaled(candidate, found.us, product, here)
            if us is not None and us < best.get(candidate.strategy, (float("inf"),))[0]:
                best[candidate.strategy] = us, Measured.of(candidate, product, found.us)
        won.update(measured for _, measured in best.values())
    known = set(strategies.values())
    return tuple(measured for measured, _ in won.most_common() if measured not in known)[:_MOST_BETWEEN]


def exclusions(policy: Policy) -> Collection[str]:
    """Exclusions as sentences."""
    return [f"{name}: {reason}" for name, reason in policy.excluded.items()]
