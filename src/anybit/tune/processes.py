"""Processes of a search: those that compile and touch no GPU, and the one that measures, restarted when it has died."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from anybit import jit
from anybit.errors import KernelError
from anybit.kernels.gemm.families import Candidate
from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.tune.worker import Runner, Time, TimingBudget, WrongResultError

_REFUSED = (WrongResultError, KernelError, ValueError, torch.OutOfMemoryError)
"""What a candidate may do that leaves the CUDA context of use; after any other fault a new process begins."""
_QUICK_START = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


class CrashError(Exception):
    """The measuring process died, or did not answer in time."""


class Worker:
    """The process that uses the GPU. facts: what it says of the device."""

    def __init__(self, factory: Callable[[], Any] = Runner) -> None:
        self._factory = factory
        self._pool: ProcessPoolExecutor | None = None
        self.facts: dict[str, Any] = {}

    def start(self, limit: float = 120.0) -> None:
        """Begin, and wait until the GPU has answered. Raises KernelError if it does not."""
        self.stop()
        self._pool = apart(1)
        try:
            self.facts = self._run(limit, _begin, self._factory)
        except CrashError as error:
            raise KernelError(f"the measuring process could not start: {error}") from error

    def stop(self) -> None:
        """End the process, whatever it is at."""
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
        """The time of a call of each candidate, or what is wrong with it ("": it found no memory on the GPU).

        keep: places timed carefully. Raises CrashError, and begins anew, where the process ends or takes longer.
        """
        try:
            found: list[Time | str] = self._run(limit, _measure, product, candidates, keep, effort, guess_us)
        except CrashError:
            self.start()
            raise
        return found

    def _run(self, limit: float, job: Callable[..., Any], *arguments: Any) -> Any:
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


def apart(count: int) -> ProcessPoolExecutor:
    """Processes that may use CUDA, and that end with this one."""
    # Forking takes no time, but the child of a process that has begun to use CUDA cannot use it.
    how = "spawn" if _cuda_has_begun() else _QUICK_START
    return ProcessPoolExecutor(count, multiprocessing.get_context(how), die_with_parent)


_runner: Any = None


def _begin(factory: Callable[[], Any]) -> Any:
    global _runner
    _runner = factory()
    return _runner.describe()


def _measure(
    product: LinearProblem, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget, guess: float
) -> list[Time | str]:
    found: list[Any] = [""] * len(candidates)
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
    """Whether anything in this process has initialized the CUDA driver; asking does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialized = 3
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != not_initialized)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


# -------- compiling


def compilers(jobs: int, begin: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Processes that only compile: forked, which they may be even where CUDA is in use."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context(_QUICK_START), begin, arguments)


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process, such as a rank of vLLM's, have children, which Python refuses: they may outlive it."""
    process = multiprocessing.current_process()
    daemonic, process.daemon = process.daemon, False
    try:
        yield
    finally:
        process.daemon = daemonic


def compile_kernels(kernels: Collection[tuple[jit.Kernel, str]], jobs: int = 0) -> list[str]:
    """Compile kernels for architectures in parallel, into the cache on disk; why some do not compile."""
    if not kernels:
        return []
    jobs = min(jobs or os.cpu_count() or 1, len(kernels))
    with _children_allowed(), compilers(jobs, die_with_parent) as pool:
        return [reason for reason in pool.map(compile_one, *zip(*kernels, strict=True)) if reason is not None]


def compile_one(kernel: jit.Kernel, arch: str) -> str | None:
    """Bring a kernel into the cache on disk; why it does not compile, or None."""
    try:
        jit.cached(kernel, arch)
    except KernelError as error:
        said = str(error).partition("the compiler said")[2].split("\n") + str(error).split("\n")
        return f"it does not compile: {next(line for line in said if line.strip()).strip()}"
    return None
