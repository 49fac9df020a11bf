"""The search: candidates are compiled in parallel without a GPU, then checked and timed in a child process.

The child may crash or hang: the candidate that it was at is excluded, by name, and a new child goes on with the next.
The parent never touches the GPU. What is found is saved every few seconds, and a search that is started again skips
what the file already has.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.tune.families import Product
from anybit.tune.floor import floor_us
from anybit.tune.policy import Measured, Origin, Point, Policy, save, usable
from anybit.tune.runner import Effort, Runner, Time, WrongResultError
from anybit.tune.space import Candidate, builtin, promising, space

_SAVE_SECONDS = 2.0
_TIE = 1.01
"""A built-in choice that is no more than this behind the best is kept: it is measured noise, and one kernel fewer."""


@dataclass(frozen=True)
class Options:
    """How a search goes.

    each: candidates of each family, beside the built-in choices and hints.  allow: see ``space.ALLOWANCES``.
    seconds: no new product is begun after this long.  limit: seconds that one candidate may take, compiled.
    again: measure anew what the file has.  jobs: processes that compile.
    plans: a file of what ``compile_all`` planned, for the same products and maps.
    """

    each: int = 6
    allow: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)
    seconds: float = float("inf")
    limit: float = 20.0
    again: bool = False
    jobs: int = 0
    plans: Path | None = None


@dataclass(frozen=True)
class Progress:
    """Where a search stands."""

    product: Product
    done: int
    total: int
    seconds_left: float
    excluded: int


Report = Callable[[Progress], None]


class Child:
    """The process that touches the GPU, begun anew when it has died."""

    def __init__(self, factory: Callable[[], Any] = Runner) -> None:
        # Forking takes no time, but the child of a process that has begun to use CUDA cannot use it.
        forks = "fork" in multiprocessing.get_all_start_methods() and not _cuda_has_begun()
        self._context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._factory = factory
        self._process: Any = None
        self.connection: Connection[Any, Any] = None  # type: ignore[assignment]
        self.facts: dict[str, Any] = {}
        self.spent: dict[str, float] = {}
        """Seconds of the child's work, by what it was."""

    def start(self, limit: float = 120.0) -> None:
        """Begin, and wait until the GPU has answered. Raises KernelError if it does not."""
        self.stop()
        self.connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs, self._factory), daemon=True)
        self._process.start()
        theirs.close()
        message = self.receive(limit)
        if message is None or message[0] != "hello":
            what = "it did not answer" if message is None else message[-1]
            raise KernelError(f"the process that measures could not begin: {what}")
        self.facts = message[1]

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
    """What the child does: answers jobs until there are no more."""
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
    product: Product,
    candidates: list[Candidate],
    keep: list[int],
    effort: Effort,
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
    good = []
    for i, candidate in enumerate(candidates):
        connection.send(("begin", i))
        try:
            bench.check(candidate)
            good.append(i)
        except (WrongResultError, KernelError, ValueError) as error:
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
    connection.send(("times", found, times_of))


def search(
    products: Sequence[Product],
    path: Path | Callable[[str], Path] | None,
    options: Options | None = None,
    *,
    hints: Sequence[Policy] = (),
    report: Report | None = None,
    factory: Callable[[], Any] = Runner,
    child: Child | None = None,
) -> Policy:
    """Measure products, and return the map of what was found, which also goes into the file at ``path``.

    path: a file, or what names one for a GPU's name.  hints: maps whose configs are tried too.
    Products keep their order, except that those of one layer come together. child: one that has begun.
    """
    options = options or Options()
    mine = child is None
    child = child or Child(factory)
    if mine:
        child.start()
    try:
        file = path(child.facts["device"].name) if callable(path) else path
        return _search(child, products, file, options, hints, report)
    finally:
        if mine:
            child.stop()


def _search(
    child: Child,
    products: Sequence[Product],
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
    todo = [replace(product, device=device) for product in together(products)]
    if known is not None and not options.again:
        todo = [product for product in todo if known.exact(product) is None]
    began = saved = time.perf_counter()
    with Planner(maps, options) as planner:
        for done, (product, plan) in enumerate(planner.plans(todo)):
            now = time.perf_counter()
            if now - began > options.seconds:
                break
            left = (now - began) / done * (len(todo) - done) if done else float("nan")
            if report is not None:
                report(Progress(product, done, len(todo), left, len(policy.excluded)))
            for i, reason in plan.refused.items():
                policy.excluded[excluded_name(product, plan.candidates[i])] = reason
            point = measure(child, product, plan.candidates, options, policy)
            if point is not None:
                policy.put(product, point)
            if path is not None and time.perf_counter() - saved > _SAVE_SECONDS:
                save(policy, path)
                saved = time.perf_counter()
    if path is not None and (policy.points or policy.excluded):
        save(policy, path)
    if known is not None:
        known.merge(policy)
        return replace(known, origin=policy.origin)
    return policy


def together(products: Sequence[Product]) -> list[Product]:
    """Products in their order, but those of one layer side by side: its weights are made once."""
    layers: dict[Any, list[Product]] = {}
    for product in dict.fromkeys(products):
        layers.setdefault((product.n, product.k, product.weights, product.dtype), []).append(product)
    return [product for group in layers.values() for product in group]


def candidates_of(product: Product, maps: Sequence[Policy], options: Options) -> list[Candidate]:
    """What is tried for a product: built-in choices first, then what won nearby, then the most promising."""
    if product.k % 16:
        return []  # rows are padded on the way, by the built-in choice
    hints: list[Candidate] = []
    for policy in maps:
        for count, (_, _, _, point) in enumerate(policy.near(product, 2.0)):
            if count >= 2:
                break
            for measured in point.strategies.values():
                with contextlib.suppress(KernelError):
                    hints.append(measured.candidate(product))
    return promising(space(product, options.allow), options.each, hints)


def excluded_name(product: Product, candidate: Candidate) -> str:
    """What an excluded candidate is called: it is left out for its whole scheme."""
    return f"{product.scheme} {candidate.name}"


@dataclass(frozen=True)
class Plan:
    """What is tried for a product, and which of it does not compile, and why."""

    candidates: list[Candidate]
    refused: dict[int, str]


_inherited: tuple[Sequence[Policy], Options] = ((), Options())


def _inherit(maps: Sequence[Policy], options: Options) -> None:
    global _inherited
    die_with_parent()
    _inherited = maps, options


def plan(product: Product) -> list[Candidate]:
    """Choose candidates; runs in a process of its own, since there are many configs to look at."""
    return candidates_of(product, *_inherited)


class Planner:
    """Processes that plan and compile some products ahead of the measurement; they touch no GPU.

    ``Options.plans``: a file of plans that were made before, with the same maps and options.
    """

    def __init__(self, maps: Sequence[Policy], options: Options) -> None:
        self._maps, self._options = maps, options
        self._jobs = options.jobs or os.cpu_count() or 1
        self._pool = ProcessPoolExecutor(
            self._jobs, mp_context=_cheap_processes(), initializer=_inherit, initargs=(maps, options)
        )
        self._kernels: dict[tuple[jit.Kernel, str], Future[str | None]] = {}
        self._known: dict[tuple[object, ...], Plan] = {}
        if options.plans is not None and options.plans.exists():
            self._known = pickle.loads(options.plans.read_bytes())

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def plans(self, products: Sequence[Product]) -> Iterator[tuple[Product, Plan]]:
        """Each product with its plan, in order; products with nothing to try are left out."""
        planning: deque[tuple[Product, Future[list[Candidate]] | Plan]] = deque()
        compiling: deque[tuple[Product, list[Candidate], list[list[Future[str | None]]]]] = deque()
        rest = iter(products)
        while True:
            while len(planning) < 8 * self._jobs and (product := next(rest, None)) is not None:
                planning.append((product, self._begin(product)))
            while planning and len(compiling) < 4 * self._jobs:
                product, future = planning[0]
                if compiling and isinstance(future, Future) and not future.done():
                    break
                planning.popleft()
                if isinstance(future, Plan):
                    compiling.append((product, future.candidates, []))
                else:
                    candidates = self._planned(product, future)
                    compiling.append((product, candidates, [self._compile(product, c) for c in candidates]))
            if not compiling:
                return
            product, candidates, futures = compiling.popleft()
            refused = self._known[_plan_key(product)].refused if not futures and candidates else {}
            for i, waiting in enumerate(futures):
                reasons = [reason for reason in map(_reason, waiting) if reason is not None]
                if reasons:
                    refused[i] = reasons[0]
            if candidates:
                yield product, Plan(candidates, refused)

    def _begin(self, product: Product) -> "Future[list[Candidate]] | Plan":
        known = self._known.get(_plan_key(product))
        if known is not None:
            return known
        try:
            return self._pool.submit(plan, product)
        except (BrokenProcessPool, RuntimeError):
            future: Future[list[Candidate]] = Future()
            future.set_result(candidates_of(product, self._maps, self._options))
            return future

    def _planned(self, product: Product, future: "Future[list[Candidate]]") -> list[Candidate]:
        try:
            return future.result()
        except BrokenProcessPool:  # the compiler took its process with it: the child compiles, one by one
            return candidates_of(product, self._maps, self._options)

    def _compile(self, product: Product, candidate: Candidate) -> "list[Future[str | None]]":
        found = []
        for kernel in candidate.kernels(product):
            key = kernel, product.device.arch
            if key not in self._kernels:
                try:
                    self._kernels[key] = self._pool.submit(compile_one, *key)
                except (BrokenProcessPool, RuntimeError):
                    continue
            found.append(self._kernels[key])
        return found


def _reason(future: "Future[str | None]") -> str | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None


def _cheap_processes() -> Any:
    """How processes that only compile are begun: forked, which they may be even where CUDA is in use."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else "spawn")


def _plan_key(product: Product) -> tuple[object, ...]:
    """What a plan depends on: of the device, what kernels are planned with."""
    device = product.device
    return replace(product, device=Device.named(device.arch)), device.sms, device.shared_bytes


def compile_candidates(pairs: Sequence[tuple[Product, Candidate]], jobs: int = 0) -> list[str]:
    """Compile these candidates in parallel; why some do not compile."""
    found = {(kernel, product.device.arch) for product, candidate in pairs for kernel in candidate.kernels(product)}
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=_cheap_processes()) as pool:
        return [reason for reason in pool.map(compile_one, *zip(*found, strict=True)) if reason is not None]


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


def compile_one(kernel: jit.Kernel, arch: str) -> str | None:
    """Bring a kernel into the cache on disk; why it does not compile, or None."""
    try:
        jit.cached(kernel, arch)
    except KernelError as error:
        said = str(error).partition("the compiler said")[2].split("\n") + str(error).split("\n")
        return f"it does not compile: {next(line for line in said if line.strip()).strip()}"
    return None


def compile_all(products: Sequence[Product], options: Options, hints: Sequence[Policy] = ()) -> int:
    """Plan and compile everything that a search over ``products`` would, and measure nothing; how many candidates.

    The plans join those in the file ``options.plans``, for a search later.
    """
    path, count, saved = options.plans, 0, time.perf_counter()
    plans: dict[tuple[object, ...], Plan] = pickle.loads(path.read_bytes()) if path and path.exists() else {}

    def keep() -> None:
        if path is not None:
            new = path.with_suffix(".new")
            new.write_bytes(pickle.dumps(plans))
            new.replace(path)

    with Planner(hints, replace(options, plans=None)) as planner:
        for product, found in planner.plans(products):
            plans[_plan_key(product)] = found
            count += len(found.candidates)
            if time.perf_counter() - saved > _SAVE_SECONDS:
                keep()
                saved = time.perf_counter()
    keep()
    return count


def measure(
    child: Child, product: Product, candidates: Sequence[Candidate], options: Options, policy: Policy
) -> Point | None:
    """Check and time candidates in the child, and what a map says of it; exclusions go into ``policy``."""
    times = race(child, product, candidates, options, policy)
    return _point(product, times, floor_us(product))


def race(
    child: Child,
    product: Product,
    candidates: Sequence[Candidate],
    options: Options,
    policy: Policy,
    keep: Collection[Candidate] = (),
) -> list[tuple[Candidate, Time]]:
    """Check and time candidates in the child, as often as it takes; those excluded are left out.

    keep: candidates that are timed carefully however they begin, as built-in choices are.
    """
    todo = [c for c in candidates if excluded_name(product, c) not in policy.excluded]
    one_by_one = False
    for _ in range(len(candidates) + 2):
        if not todo:
            break
        kept = [*_builtin_places(product, todo), *(i for i, c in enumerate(todo) if c in keep)]
        child.connection.send((product, todo, kept, options.effort, 1.5 * floor_us(product), not one_by_one))
        times, gone, fault = _listen(child, todo, options.limit)
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


def _listen(
    child: Child, candidates: Sequence[Candidate], limit: float
) -> tuple[dict[int, Time] | None, dict[int, str], str]:
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
                for what, seconds in message[2].items():
                    child.spent[what] = child.spent.get(what, 0.0) + seconds
                return message[1], gone, ""
            case _:
                if current >= 0 and current not in gone:
                    gone[current] = str(message[-1]).strip().splitlines()[-1]
                return None, gone, str(message[-1]).strip().splitlines()[-1]


def _builtin_places(product: Product, candidates: Sequence[Candidate]) -> list[int]:
    """Which candidates are built-in choices, of any layout."""
    found = []
    for i, candidate in enumerate(candidates):
        try:
            own = builtin(replace(product, activations=candidate.activations), candidate.layout)
        except KernelError:
            continue
        if own == candidate:
            found.append(i)
    return found


def _point(product: Product, times: Sequence[tuple[Candidate, Time]], floor: float) -> Point | None:
    """The best of each strategy; built-in choices are preferred within the noise."""
    if not times:
        return None
    own = {c for c, _ in (times[i] for i in _builtin_places(product, [c for c, _ in times]))}
    strategies = {}
    for strategy in dict.fromkeys(candidate.strategy for candidate, _ in times):
        mine = [(c, t) for c, t in times if c.strategy == strategy]
        final = [(c, t) for c, t in mine if t.final] or mine
        best, best_time = min(final, key=lambda item: item[1].us)
        for candidate, found in final:
            if candidate in own and found.us <= _TIE * best_time.us:
                best, best_time = candidate, found
        strategies[strategy] = Measured.of(best, product, best_time.us)
    with contextlib.suppress(KernelError):
        default = builtin(product)
        for candidate, found in times:
            if candidate == default:
                us = round(found.us, 3)
                return Point(us, round(floor, 3), strategies, Measured.of(default, product, us))
    worst = max(measured.us for measured in strategies.values())
    return Point(worst, round(floor, 3), strategies)


def exclusions(policy: Policy) -> Collection[str]:
    """Exclusions as sentences."""
    return [f"{name}: {reason}" for name, reason in policy.excluded.items()]
