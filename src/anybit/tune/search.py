"""The search: candidates are compiled in parallel without a GPU, then checked and timed in a child process.

The child may crash or hang: the candidate that it was at is excluded, by name, and a new child goes on with the next.
The parent never touches the GPU. What is found is saved every few seconds, and a search that is started again skips
what the file already has.
"""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

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
    """

    each: int = 6
    allow: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)
    seconds: float = float("inf")
    limit: float = 20.0
    again: bool = False
    jobs: int = 0


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
        # A process that has not touched CUDA can be forked in no time; one that has cannot.
        forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
        self._context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._factory = factory
        self._process: Any = None
        self.connection: Connection[Any, Any] = None  # type: ignore[assignment]
        self.facts: dict[str, Any] = {}

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


def serve(connection: "Connection[Any, Any]", factory: Callable[[], Any]) -> None:
    """What the child does: answers jobs until there are no more."""
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
    bench = runner.prepare(product)
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
    found: dict[int, Time] = {}
    groups = [good] if together else [[i] for i in good]
    for group in groups:
        connection.send(("begin", group[0] if len(group) == 1 else -1))
        kept = [place for place, i in enumerate(group) if i in keep]
        times = bench.times([candidates[i] for i in group], kept, effort, guess_us) if group else []
        found |= dict(zip(group, times, strict=True))
    connection.send(("times", found))


def search(
    products: Sequence[Product],
    path: Path | None,
    options: Options | None = None,
    *,
    hints: Sequence[Policy] = (),
    report: Report | None = None,
    factory: Callable[[], Any] = Runner,
) -> Policy:
    """Measure products, and return the map of what was found, which also goes into the file at ``path``.

    Products keep their order, except that those of one layer come together. hints: maps whose configs are tried too.
    """
    options = options or Options()
    child = Child(factory)
    child.start()
    try:
        return _search(child, products, path, options, hints, report)
    finally:
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
        policy.excluded |= known.excluded
    else:
        known = None
    todo = [replace(product, device=device) for product in together(products)]
    if known is not None and not options.again:
        todo = [product for product in todo if known.exact(product) is None]
    began = saved = time.perf_counter()
    jobs = options.jobs or os.cpu_count() or 1
    with compiling(jobs) as compile_ahead:
        plans = _planned(todo, maps, options, compile_ahead, policy)
        for done, (product, candidates, ready) in enumerate(plans):
            now = time.perf_counter()
            if now - began > options.seconds:
                break
            left = (now - began) / done * (len(todo) - done) if done else float("nan")
            if report is not None:
                report(Progress(product, done, len(todo), left, len(policy.excluded)))
            for candidate, reason in ready():
                policy.excluded[excluded_name(product, candidate)] = reason
            point = measure(child, product, candidates, options, policy)
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
            if count >= 4:
                break
            for measured in point.strategies.values():
                with contextlib.suppress(KernelError):
                    hints.append(measured.candidate(product))
    return promising(space(product, options.allow), options.each, hints)


Ready = Callable[[], list[tuple[Candidate, str]]]


def _planned(
    todo: Sequence[Product], maps: Sequence[Policy], options: Options, compile_ahead: Any, policy: Policy
) -> Iterator[tuple[Product, list[Candidate], Ready]]:
    """Products with their candidates; compilation runs some products ahead of the measurement."""
    ahead: list[tuple[Product, list[Candidate], Ready]] = []
    for product in todo:
        candidates = candidates_of(product, maps, options)
        candidates = [c for c in candidates if excluded_name(product, c) not in policy.excluded]
        if not candidates:
            continue
        ahead.append((product, candidates, compile_ahead(product, candidates)))
        if len(ahead) > 64:
            yield ahead.pop(0)
    yield from ahead


def excluded_name(product: Product, candidate: Candidate) -> str:
    """What an excluded candidate is called: it is left out for its whole scheme."""
    return f"{product.scheme} {candidate.name}"


@contextlib.contextmanager
def compiling(jobs: int) -> Iterator[Callable[[Product, Sequence[Candidate]], Ready]]:
    """Compile candidates in ``jobs`` processes that touch no GPU.

    Yields what begins to compile a product's candidates; that returns what waits for them and names those refused.
    """
    context = multiprocessing.get_context("fork" if not torch.cuda.is_initialized() else "spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    futures: dict[tuple[jit.Kernel, str], Future[str | None]] = {}

    def begin(product: Product, candidates: Sequence[Candidate]) -> Ready:
        waiting = []
        for candidate in candidates:
            for kernel in candidate.kernels(product):
                key = kernel, product.device.arch
                if key not in futures:
                    with contextlib.suppress(BrokenProcessPool, RuntimeError):  # the child compiles it then
                        futures[key] = pool.submit(compile_one, *key)
                if key in futures:
                    waiting.append((candidate, futures[key]))

        def ready() -> list[tuple[Candidate, str]]:
            refused = []
            for candidate, future in waiting:
                try:
                    reason = future.result()
                except BrokenProcessPool:
                    continue
                if reason is not None:
                    refused.append((candidate, reason))
            return refused

        return ready

    try:
        yield begin
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compile_one(kernel: jit.Kernel, arch: str) -> str | None:
    """Bring a kernel into the cache on disk; why it does not compile, or None."""
    try:
        jit.cached(kernel, arch)
    except KernelError as error:
        return f"it does not compile: {str(error).splitlines()[0]}"
    return None


def compile_all(products: Sequence[Product], options: Options, hints: Sequence[Policy] = ()) -> int:
    """Compile everything that a search over ``products`` would, and measure nothing; how many candidates."""
    count = 0
    with compiling(options.jobs or os.cpu_count() or 1) as begin:
        waiting = []
        for product in products:
            candidates = candidates_of(product, hints, options)
            count += len(candidates)
            waiting.append(begin(product, candidates))
        for ready in waiting:
            ready()
    return count


def measure(
    child: Child, product: Product, candidates: Sequence[Candidate], options: Options, policy: Policy
) -> Point | None:
    """Check and time candidates in the child, as often as it takes; exclusions go into ``policy``."""
    floor = floor_us(product)
    todo = [c for c in candidates if excluded_name(product, c) not in policy.excluded]
    one_by_one = False
    for _ in range(len(candidates) + 2):
        if not todo:
            return None
        keep = _builtin_places(product, todo)
        child.connection.send((product, todo, keep, options.effort, 1.5 * floor, not one_by_one))
        times, gone, fault = _listen(child, todo, options.limit)
        for i, reason in gone.items():
            policy.excluded[excluded_name(product, todo[i])] = reason
        if times is not None:
            return _point(product, [(todo[i], time) for i, time in times.items()], floor)
        child.stop()
        child.start()
        if not gone:
            if one_by_one:
                policy.excluded[f"{product}"] = fault
                return None
            one_by_one = True
        todo = [c for c in todo if excluded_name(product, c) not in policy.excluded]
    return None


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
                return Point(round(found.us, 3), round(floor, 3), strategies)
    worst = max(measured.us for measured in strategies.values())
    return Point(worst, round(floor, 3), strategies)


def exclusions(policy: Policy) -> Collection[str]:
    """Exclusions as sentences."""
    return [f"{name}: {reason}" for name, reason in policy.excluded.items()]
