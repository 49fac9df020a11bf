"""Plans of a search, made without a GPU: what is tried for each product, compiled in parallel processes.

A plan may be made and compiled in one place and measured in another: `compile_all` keeps plans in a file.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.tune.policy import Policy
from anybit.tune.registry import GRID, LinearProblem
from anybit.tune.space import Candidate, builtin, promising
from anybit.tune.worker import TimingBudget

_SAVE_SECONDS, _SAVE_SHARE = 2.0, 30
"""How often what is done is saved; at least so many times what saving it takes."""


@dataclass(frozen=True)
class Options:
    """How a search goes.

    each: candidates of each family, beside the built-in choices and hints.  allow: see ``space.ALLOWANCES``.
    seconds: no new product is begun after this long.  limit: seconds that one candidate may take, compiled.
    again: measure anew what the file has.  jobs: processes that compile.
    plans: a file of what ``compile_all`` planned, for the same products and maps.
    grid: the token counts that are measured, to know which lie between two of them.
    """

    each: int = 6
    allow: tuple[str, ...] = ()
    effort: TimingBudget = field(default_factory=TimingBudget)
    seconds: float = float("inf")
    limit: float = 20.0
    again: bool = False
    jobs: int = 0
    plans: Path | None = None
    grid: tuple[int, ...] = GRID


def candidates_of(product: LinearProblem, maps: Sequence[Policy], options: Options) -> list[Candidate]:
    """What is tried for a product: built-in choices first, then what won nearby, then the most promising."""
    if product.k % 16:
        return []  # rows are padded on the way, by the built-in choice
    hints: list[Candidate] = []
    for policy in maps:
        for count, (_, _, _, point) in enumerate(policy.near(product, 2.0)):
            if count >= 2:
                break
            for measured in (*point.strategies.values(), *point.also):
                with contextlib.suppress(KernelError):
                    hints.append(measured.candidate(product))
    return promising(product, options.each, hints, options.allow, options.grid)


@dataclass(frozen=True)
class Plan:
    """What is tried for a product.

    own: the places of built-in choices, of any layout; default: the one that runs where nothing is measured.
    refused: places of what does not compile, and why.
    """

    candidates: list[Candidate]
    own: tuple[int, ...] = ()
    default: Candidate | None = None
    refused: dict[int, str] = field(default_factory=dict)


def plan_of(product: LinearProblem, candidates: list[Candidate]) -> Plan:
    """The plan that tries these, nothing compiled yet."""
    default = None
    with contextlib.suppress(KernelError):
        default = builtin(product)
    return Plan(candidates, tuple(_builtin_places(product, candidates)), default)


Choose = Callable[[LinearProblem, Sequence[Policy], Options], list[Candidate]]
_inherited: tuple[Choose, Sequence[Policy], Options] = (candidates_of, (), Options())


def _inherit(choose: Choose, maps: Sequence[Policy], options: Options) -> None:
    global _inherited
    die_with_parent()
    _inherited = choose, maps, options


def plan(product: LinearProblem) -> Plan:
    """Choose candidates; runs in a process of its own, since there are many configs to look at."""
    choose, maps, options = _inherited
    return plan_of(product, choose(product, maps, options))


def plans_in(path: Path) -> dict[tuple[object, ...], Plan]:
    """The plans of a file that ``compile_all`` wrote, by ``plan_key``. Raises KernelError for another file."""
    try:
        found = pickle.loads(path.read_bytes())
    except (OSError, EOFError, AttributeError, ImportError, IndexError, pickle.UnpicklingError) as error:
        raise KernelError(f"{path} is not a file of plans: {error}; remove it, and it is rebuilt") from None
    if not isinstance(found, dict):
        raise KernelError(f"{path} is not a file of plans: it holds a {type(found).__name__}")
    return found


class Planner:
    """Processes that plan and compile some products ahead of the measurement; they touch no GPU.

    ``Options.plans``: a file of plans that were made before, with the same maps and options.
    """

    def __init__(self, maps: Sequence[Policy], options: Options, choose: Choose = candidates_of) -> None:
        self._maps, self._options, self._choose = maps, options, choose
        self._jobs = options.jobs or os.cpu_count() or 1
        self._pool = ProcessPoolExecutor(
            self._jobs, mp_context=_cheap_processes(), initializer=_inherit, initargs=(choose, maps, options)
        )
        self._kernels: dict[tuple[jit.Kernel, str], Future[str | None]] = {}
        self._known: dict[tuple[object, ...], Plan] = {}
        if options.plans is not None and options.plans.exists():
            self._known = plans_in(options.plans)

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def plans(self, products: Sequence[LinearProblem]) -> Iterator[tuple[LinearProblem, Plan]]:
        """Each product with its plan, in order; products with nothing to try are left out."""
        planning: deque[tuple[LinearProblem, Future[Plan] | Plan]] = deque()
        compiling: deque[tuple[LinearProblem, Plan, list[list[Future[str | None]]]]] = deque()
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
                    compiling.append((product, future, []))
                else:
                    made = self._planned(product, future)
                    compiling.append((product, made, [self._compile(product, c) for c in made.candidates]))
            if not compiling:
                return
            product, made, futures = compiling.popleft()
            for i, waiting in enumerate(futures):
                reasons = [reason for reason in map(_reason, waiting) if reason is not None]
                if reasons:
                    made.refused[i] = reasons[0]
            if made.candidates:
                yield product, made

    def _begin(self, product: LinearProblem) -> "Future[Plan] | Plan":
        known = self._known.get(plan_key(product))
        if known is not None:
            return known
        try:
            return self._pool.submit(plan, product)
        except (BrokenProcessPool, RuntimeError):
            future: Future[Plan] = Future()
            future.set_result(self._by_hand(product))
            return future

    def _planned(self, product: LinearProblem, future: "Future[Plan]") -> Plan:
        try:
            return future.result()
        except BrokenProcessPool:  # the compiler took its process with it: the child compiles, one by one
            return self._by_hand(product)

    def _by_hand(self, product: LinearProblem) -> Plan:
        return plan_of(product, self._choose(product, self._maps, self._options))

    def _compile(self, product: LinearProblem, candidate: Candidate) -> "list[Future[str | None]]":
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


def plan_key(product: LinearProblem) -> tuple[object, ...]:
    """What a plan depends on: of the device, what kernels are planned with."""
    device = product.device
    return replace(product, device=Device.named(device.arch)), device.sms, device.shared_bytes


def compile_candidates(pairs: Sequence[tuple[LinearProblem, Candidate]], jobs: int = 0) -> list[str]:
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


def compile_all(
    products: Sequence[LinearProblem], options: Options, hints: Sequence[Policy] = (), choose: Choose = candidates_of
) -> int:
    """Plan and compile everything that a search over ``products`` would, and measure nothing; how many candidates.

    The plans join those in the file ``options.plans``, for a search later.
    """
    path, count, saved, pause = options.plans, 0, time.perf_counter(), _SAVE_SECONDS
    plans = plans_in(path) if path and path.exists() else {}

    def keep() -> None:
        if path is not None:
            new = path.with_suffix(".new")
            new.write_bytes(pickle.dumps(plans))
            new.replace(path)

    with Planner(hints, replace(options, plans=None), choose) as planner:
        for product, found in planner.plans(products):
            plans[plan_key(product)] = found
            count += len(found.candidates)
            now = time.perf_counter()
            if now - saved > pause:
                keep()
                saved = time.perf_counter()
                pause = max(_SAVE_SECONDS, _SAVE_SHARE * (saved - now))
    keep()
    return count


def _builtin_places(product: LinearProblem, candidates: Sequence[Candidate]) -> list[int]:
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
