"""What a search tries for each problem, planned and compiled in parallel processes that touch no GPU."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

from anybit import jit
from anybit.errors import KernelError
from anybit.tune.policy import Policy
from anybit.tune.registry import LinearProblem
from anybit.tune.space import Candidate, builtin, promising
from anybit.tune.worker import TimingBudget

_DISTANCE, _NEIGHBORS = 2.0, 2
"""What won at so many points of a map, at most so many powers of two away, is tried, too."""


@dataclass(frozen=True)
class Options:
    """How a search goes.

    each: candidates of each family, beside the built-in choices and hints.  allow: see ``space.ALLOWANCES``.
    seconds: no new problem is begun after this long.  limit: seconds that one candidate may take, compiled.
    again: measure anew what the file has.  jobs: processes that compile.
    """

    each: int = 6
    allow: tuple[str, ...] = ()
    effort: TimingBudget = field(default_factory=TimingBudget)
    seconds: float = float("inf")
    limit: float = 20.0
    again: bool = False
    jobs: int = 0


@dataclass(frozen=True)
class Plan:
    """What is tried for a problem.

    own: the places of built-in choices, of any layout; default: the one that runs where nothing is measured.
    refused: places of what does not compile, and why.
    """

    candidates: list[Candidate]
    own: tuple[int, ...] = ()
    default: Candidate | None = None
    refused: dict[int, str] = field(default_factory=dict)


def neighbor_hints(maps: Sequence[Policy], product: LinearProblem, distance: float, count: int) -> list[Candidate]:
    """What won at the ``count`` nearest points of each map, legal here or not."""
    hints: list[Candidate] = []
    for policy in maps:
        for (_, _, _, point), _ in zip(policy.near(product, distance), range(count), strict=False):
            for _, measured in point.ordered():
                with contextlib.suppress(KernelError):
                    hints.append(measured.candidate(product))
    return hints


def candidates_of(product: LinearProblem, maps: Sequence[Policy], options: Options) -> list[Candidate]:
    """What is tried for a problem: built-in choices first, then what won nearby, then the most promising."""
    if product.k % 16:
        return []  # rows are padded on the way, by the built-in choice
    return promising(product, options.each, neighbor_hints(maps, product, _DISTANCE, _NEIGHBORS), options.allow)


def plan_of(product: LinearProblem, candidates: list[Candidate]) -> Plan:
    """The plan that tries these, nothing compiled yet."""
    default, own = None, []
    with contextlib.suppress(KernelError):
        default = builtin(product)
    for i, candidate in enumerate(candidates):
        with contextlib.suppress(KernelError):
            if builtin(replace(product, activations=candidate.activations), candidate.layout) == candidate:
                own.append(i)
    return Plan(candidates, tuple(own), default)


_maps: Sequence[Policy] = ()
_options = Options()


def _begin(maps: Sequence[Policy], options: Options) -> None:
    global _maps, _options
    die_with_parent()
    _maps, _options = maps, options


def plan(product: LinearProblem) -> Plan:
    """Choose candidates and bring their kernels into the cache on disk; runs in a process of its own."""
    found = plan_of(product, candidates_of(product, _maps, _options))
    for i, candidate in enumerate(found.candidates):
        reasons = [compile_one(kernel, product.device.arch) for kernel in candidate.kernels(product)]
        if refused := [reason for reason in reasons if reason is not None]:
            found.refused[i] = refused[0]
    return found


class Planner:
    """Processes that plan and compile some problems ahead of the measurement."""

    def __init__(self, maps: Sequence[Policy], options: Options) -> None:
        self._maps, self._options = maps, options
        self._jobs = options.jobs or os.cpu_count() or 1
        self._pool = ProcessPoolExecutor(self._jobs, _processes(), _begin, (maps, options))

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def plans(self, products: Sequence[LinearProblem]) -> Iterator[tuple[LinearProblem, Plan]]:
        """Each problem with its plan, in order; problems with nothing to try are left out."""
        ahead: deque[tuple[LinearProblem, Future[Plan] | None]] = deque()
        rest = iter(products)
        while True:
            while len(ahead) < 4 * self._jobs and (product := next(rest, None)) is not None:
                future = None
                with contextlib.suppress(BrokenProcessPool, RuntimeError):
                    future = self._pool.submit(plan, product)
                ahead.append((product, future))
            if not ahead:
                return
            product, future = ahead.popleft()
            made = None
            with contextlib.suppress(BrokenProcessPool):
                made = future.result() if future else None
            if made is None:  # the compiler took its process with it: the worker compiles, one by one
                made = plan_of(product, candidates_of(product, self._maps, self._options))
            if made.candidates:
                yield product, made


def _processes() -> Any:
    """How processes that only compile begin: forked, which they may be even where CUDA is in use."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else "spawn")


def compile_kernels(kernels: Collection[tuple[jit.Kernel, str]], jobs: int = 0) -> list[str]:
    """Compile kernels for architectures in parallel, into the cache on disk; why some do not compile."""
    if not kernels:
        return []
    with ProcessPoolExecutor(min(jobs or os.cpu_count() or 1, len(kernels)), _processes()) as pool:
        return [reason for reason in pool.map(compile_one, *zip(*kernels, strict=True)) if reason is not None]


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
