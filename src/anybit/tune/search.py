"""The search behind `anybit tune`: candidates are compiled in parallel, then checked and timed in a child process.

The child may crash or hang: the candidate that it was at is excluded, by name, and a new child goes on with the next.
The parent never touches the GPU. What is found is saved every few seconds, and a search that is started again skips
what the file already has.
"""

import ctypes
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from anybit.device import Device
from anybit.errors import KernelError
from anybit.tune.plans import Options, Plan, Planner, die_with_parent, neighbor_hints
from anybit.tune.policy import Measured, Origin, Point, Policy, save, usable
from anybit.tune.registry import LinearProblem
from anybit.tune.roofline import floor_us
from anybit.tune.space import FEW_TOKENS, Candidate, clearly_faster, preserves_pdl_overlap, promising
from anybit.tune.worker import Runner, Time, TimingBudget, WrongResultError

_logger = logging.getLogger(__name__)

_SAVE_SECONDS, _SAVE_SHARE = 2.0, 30
"""How often what was found is saved; at least so many times what saving it takes."""
_NEIGHBORS, _DISTANCE = 6, 3.0
"""What won at so many of the nearest problems of the same search is tried, too: its kernels are compiled."""
_PLAUSIBLE = 0.7
"""Of the roofline's time, whose rates were measured under load: a time of few tokens below it is not believed."""
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
    effort: TimingBudget,
    guess_us: float,
    together: bool,
) -> None:
    bench = runner.prepare(product)
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
    found: dict[int, Time] = {}
    groups = [good] if together else [[i] for i in good]
    for group in groups:
        connection.send(("begin", group[0] if len(group) == 1 else -1))
        kept = [place for place, i in enumerate(group) if i in keep]
        times = bench.times([candidates[i] for i in group], kept, effort, guess_us) if group else []
        found |= dict(zip(group, times, strict=True))
    connection.send(("times", found))


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
    maps = [*([known] if known else []), *hints]
    if known is not None and known.origin.foreign(device.name) is None:
        known = known.current()
        policy.excluded |= known.excluded
    else:
        known = None
    nearby = [policy, *([known] if known else [])]
    todo = [replace(product, device=device) for product in together(products)]
    if known is not None and not options.again:
        todo = [product for product in todo if not _answers(known.exact(product), product, options)]
    began = saved = time.perf_counter()
    pause = _SAVE_SECONDS
    with Planner(maps, options) as planner:
        plans = planner.plans(todo)
        item, done = next(plans, None), 0
        while item is not None:
            product, plan = item
            now = time.perf_counter()
            if now - began > options.seconds:
                break
            left = (now - began) / done * (len(todo) - done) if done else float("nan")
            if report is not None:
                report(Progress(product, done, len(todo), left, len(policy.excluded)))
            for i, reason in plan.refused.items():
                policy.excluded[excluded_name(product, plan.candidates[i])] = reason
            own = [plan.candidates[i] for i in plan.own]
            more = neighbor_hints(nearby, product, _DISTANCE, _NEIGHBORS)
            every = dict.fromkeys((*plan.candidates, *more))
            tried = [one for one in every if one in own or preserves_pdl_overlap(product, one)]
            ahead: list[tuple[LinearProblem, Plan] | None] = []
            times = race(child, product, tried, options, policy, own, lambda: ahead.append(next(plans, None)))  # noqa: B023
            point = point_of(product, plan, times)
            if point is not None:
                policy.put(product, point)
            now = time.perf_counter()
            if path is not None and now - saved > pause:
                save(policy, path)
                saved = time.perf_counter()
                pause = max(_SAVE_SECONDS, _SAVE_SHARE * (saved - now))
            item, done = ahead[0] if ahead else next(plans, None), done + 1
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


def excluded_name(product: LinearProblem, candidate: Candidate) -> str:
    """What an excluded candidate is called: it is left out for its whole scheme."""
    return f"{product.scheme} {candidate.name}"


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

    keep: candidates that are timed carefully however they begin, as built-in choices are. meanwhile: called once, while
    the child is at work.
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


def _listen(child: Worker, limit: float) -> tuple[dict[int, Time] | None, dict[int, str], str]:
    """What the child says of a job: times, if it came so far; what failed, and why; and how the child ended."""
    gone: dict[int, str] = {}
    current = -1
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
            case "failed":
                gone[message[1]] = message[2]
            case "times":
                return message[1], gone, ""
            case _:
                if current >= 0 and current not in gone:
                    gone[current] = _said(message[-1])
                return None, gone, _said(message[-1])


def _said(traceback_: object) -> str:
    """What a traceback says happened: its first line that is no frame's, since CUDA's errors have more after it."""
    lines = [line for line in str(traceback_).splitlines() if line.strip()]
    return next((line for line in lines if line[0] != " " and not line.startswith("Traceback")), lines[-1]).strip()


def point_of(product: LinearProblem, plan: Plan, times: Sequence[tuple[Candidate, Time]]) -> Point | None:
    """What a map says of times: the best of each strategy; built-in choices are preferred within the noise.

    Of few tokens a built-in choice is preferred, too, unless something is clearly faster than it.
    None where nothing was timed, or a time of few tokens is shorter than reading the weights takes.
    """
    if not times:
        return None
    own, few = [plan.candidates[i] for i in plan.own], product.m <= FEW_TOKENS
    least = min(time.us for candidate, time in times if time.final or candidate == plan.default)
    if few and least < _PLAUSIBLE * floor_us(product):
        _logger.info("%s is not written down: it took less than reading its weights takes", product)
        return None
    strategies = {}
    for strategy in dict.fromkeys(candidate.strategy for candidate, _ in times):
        mine = [(c, t) for c, t in times if c.strategy == strategy]
        final = [(c, t) for c, t in mine if t.final] or mine
        best, best_time = min(final, key=lambda item: item[1].us)
        for candidate, found in final:
            tie = found.us <= _TIE * best_time.us or (few and not clearly_faster(best_time.us, found.us))
            if candidate in own and tie:
                best, best_time = candidate, found
        strategies[strategy] = Measured.of(best, product, best_time.us)
    default_us = next((round(found.us, 3) for candidate, found in times if candidate == plan.default), None)
    return Point(default_us or max(measured.us for measured in strategies.values()), strategies)


def exclusions(policy: Policy) -> Collection[str]:
    """Exclusions as sentences."""
    return [f"{name}: {reason}" for name, reason in policy.excluded.items()]
