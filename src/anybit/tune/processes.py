"""Processes of a search: compilers, which do not use the GPU, and one that measures and is restarted if it dies."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, TypeVarTuple

import torch

from anybit import jit
from anybit.choose.families import Candidate
from anybit.errors import KernelError
from anybit.kernels.linear_problem import LinearProblem
from anybit.tune.worker import Facts, Runner, Time, TimingBudget, WrongResultError

_REFUSED = (WrongResultError, KernelError, ValueError, torch.OutOfMemoryError)
"""Errors of a candidate after which the CUDA context is still usable; any other restarts the process."""
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
_QUICK_START = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


class CrashError(Exception):
    """The measuring process died, or timed out."""


class Worker:
    """The process that uses the GPU. facts: the device, as ``Runner.describe`` returns it."""

    def __init__(self, factory: Callable[[], Runner] = Runner) -> None:
        self._factory = factory
        self._pool: ProcessPoolExecutor | None = None
        self.facts: Facts

    def __enter__(self) -> "Worker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, limit: float = 120.0) -> None:
        """Start the process and wait for its description of the GPU. Raises KernelError if it fails."""
        self.stop()
        # Forking is fast, but children forked after CUDA is initialized cannot use it.
        how = "spawn" if _cuda_has_begun() else _QUICK_START
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context(how), die_with_parent)
        try:
            self.facts = self._run(limit, _begin, self._factory)
        except CrashError as error:
            raise KernelError(f"the measuring process could not start: {error}") from error

    def stop(self) -> None:
        """Kill the process."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            for process in processes:
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            for process in processes:
                process.join()
            self._pool = None

    def measure(
        self, product: LinearProblem, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget,
        guess_us: float, limit: float,
    ) -> list[Time | str]:  # fmt: skip
        """The time of a call of each candidate, or what is wrong with it ("": out of GPU memory).

        keep: indices always timed carefully.  limit: seconds.  Raises CrashError, after a restart, for a crash or hang.
        """
        try:
            return self._run(limit, _measure, product, candidates, keep, effort, guess_us)
        except CrashError:
            self.start()
            raise

    def _run(self, limit: float, job: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        assert self._pool is not None
        try:
            try:
                future = self._pool.submit(job, *arguments)
            except BrokenProcessPool:  # it has died since the last job
                self.start()
                future = self._pool.submit(job, *arguments)
            return future.result(limit)
        except Exception as error:
            self.stop()
            said = {BrokenProcessPool: "it crashed", TimeoutError: f"it hung for {limit:g} s"}.get(type(error))
            raise CrashError(said or f"{error}".partition("\n")[0] or type(error).__name__) from error


_runner: Runner


def _begin(factory: Callable[[], Runner]) -> Facts:
    global _runner
    _runner = factory()
    return _runner.describe()


def _measure(
    product: LinearProblem, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget, guess: float
) -> list[Time | str]:
    found: list[Time | str] = [""] * len(candidates)
    with contextlib.suppress(torch.OutOfMemoryError):
        bench, good = _runner.prepare(product), []
        for i, candidate in enumerate(candidates):
            try:
                bench.check(candidate)
                good.append(i)
            except _REFUSED as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    found[i] = f"{error}".partition("\n")[0]
        kept = [place for place, i in enumerate(good) if i in keep]
        times = bench.times([candidates[i] for i in good], kept, effort, guess) if good else []
        for i, time in zip(good, times, strict=True):
            found[i] = time
    return found


def _cuda_has_begun() -> bool:
    """Whether this process has initialized the CUDA driver; the query itself does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialized = 3
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != not_initialized)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


# -------- compiling


def compilers(jobs: int, begin: Callable[..., None], *arguments: object) -> ProcessPoolExecutor:
    """Processes that only compile; they can be forked even after CUDA is initialized."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context(_QUICK_START), begin, arguments)


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process (a rank of vLLM) have children, which Python forbids as they might outlive it."""
    process = multiprocessing.current_process()
    daemonic, process.daemon = process.daemon, False
    try:
        yield
    finally:
        process.daemon = daemonic


def compile_kernels(kernels: Collection[tuple[jit.Kernel, str]], jobs: int = 0) -> list[str]:
    """Compile (kernel, architecture) pairs in parallel into the disk cache. Returns the errors."""
    if not kernels:
        return []
    jobs = min(jobs or os.cpu_count() or 1, len(kernels))
    with _children_allowed(), compilers(jobs, die_with_parent) as pool:
        return [reason for reason in pool.map(compile_one, *zip(*kernels, strict=True)) if reason is not None]


def compile_one(kernel: jit.Kernel, arch: str) -> str | None:
    """Compile a kernel into the disk cache. Returns the error, or None."""
    try:
        jit.cached(kernel, arch)
    except KernelError as error:
        said = str(error).partition("the compiler said")[2].split("\n") + str(error).split("\n")
        return f"it does not compile: {next(line for line in said if line.strip()).strip()}"
    return None
