"""How everything is timed: a CUDA graph of many calls, operands rotating through more than L2, medians of replays.

A result is checked before it is timed; unchecked rows cannot be written.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anybit.tune.roofline import RATES, read_us
from rows import RESULTS as RESULTS
from rows import Row as Row
from rows import add, origin

ROTATE_BYTES = 256 << 20
"""Operands rotate through at least this much: four times an H200's L2, so that all reads miss."""

FULL_CLOCKS_US = 60_000
"""After a pause, an H200 runs its largest products at full clocks for some 75 ms; then, from one replay to the next,
a power cap slows them by 4 to 7 %."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, minimum and maximum over the graph's replays."""

    us: float
    fastest: float
    slowest: float


def rotations(bytes_per_call: int, most: int = 256) -> int:
    """Copies of an operand of ``bytes_per_call`` bytes that defeat the caches (at least 2)."""
    return max(2, min(most, -(-ROTATE_BYTES // max(bytes_per_call, 1))))


def copies(tensor: torch.Tensor, most: int = 256) -> list[torch.Tensor]:
    """``tensor`` and as many clones as a cold-cache measurement needs."""
    count = rotations(tensor.numel() * tensor.element_size(), most)
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


class Captured:
    """``call(i)``, i = 0 .. calls-1, in one CUDA graph on a stream of its own; ``replay`` times it once.

    ``call`` selects its operands by ``i`` (rotating them) and may launch several kernels; programmatic dependent launch
    is preserved in the graph, so a chain of calls overlaps as it would in a model.
    """

    def __init__(self, call: Callable[[int], object], calls: int) -> None:
        self.calls, self.stream, self.graph = calls, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for i in range(2):  # keep lazy initialization (module loading, workspaces) out of the capture
                call(i)
        self.stream.synchronize()
        # Not `with torch.cuda.graph`: that collects garbage and empties the allocator's cache, 0.2 s each time.
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin()
            try:
                for i in range(calls):
                    call(i)
            finally:
                self.graph.capture_end()

    def replay(self) -> float:
        """Microseconds per call."""
        with torch.cuda.stream(self.stream):
            self._begin.record()
            self.graph.replay()
            self._end.record()
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3 / self.calls


def time_graph(call: Callable[[int], object], calls: int, replays: int = 11) -> Timing:
    """Time ``calls`` calls, captured into one CUDA graph."""
    return time_in_turns([Captured(call, calls)], replays)[0]


def time_in_turns(graphs: Sequence[Captured], replays: int = 11) -> list[Timing]:
    """Replay the graphs interleaved, so that heat and clocks affect all alike."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays + 1):
        for graph, mine in zip(graphs, times, strict=True):
            mine.append(graph.replay())
    return [Timing(statistics.median(mine[1:]), min(mine[1:]), max(mine[1:])) for mine in times]


def time_exactly(graphs: Sequence[Captured], replays: int = 5) -> list[Timing]:
    """Interleaved, without the host's launch overhead: the GPU sleeps until the launch is queued.

    The order alternates.
    """
    stream, times = torch.cuda.Stream(), [[] for _ in graphs]  # type: ignore[var-annotated]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    order = list(range(len(graphs)))
    with torch.cuda.stream(stream):
        for turn in range(replays + 1):
            for i in order:
                torch.cuda._sleep(200_000)  # cycles: 0.1 ms
                begin.record()
                graphs[i].graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    times[i].append(begin.elapsed_time(end) * 1e3 / graphs[i].calls)
            order.reverse()
    return [Timing(statistics.median(mine), min(mine), max(mine)) for mine in times]


def rest(operations: float) -> None:
    """Let the power cap of previous products end before large ``operations``."""
    if operations > 5e11:
        torch.cuda.synchronize()
        time.sleep(0.25)


def replays_at_full_clocks(us: float, most: int) -> int:
    """How many replays of ``us`` microseconds run before a power cap slows them, 3 to ``most``."""
    return max(3, min(most, int(FULL_CLOCKS_US / us) - 1))  # one more warms up


def calls_for(expected_us: float, copies_at_hand: int = 1, graph_us: float = 1200.0, most: int = 256) -> int:
    """Calls per graph: about ``graph_us`` of work; if that is short, at least one per copy of the operands."""
    wanted = min(most, max(8, int(graph_us / max(expected_us, 0.5))))
    return max(wanted, min(copies_at_hand, most))


# -------- floors: the machine's best, measured (docs/limits)

read_floor_us = read_us


def floor_us(size: float, operations: float, kind: str) -> float:
    """The longer of reading (and writing) ``size`` bytes and issuing ``operations`` at the rate of ``kind``."""
    return max(read_floor_us(size), operations / RATES[kind] * 1e-6)


# -------- baselines


VENDORS = ("cublas fp16", "int8", "fp8")
SPARSE_VENDORS = ("cublas fp16", "cusparselt fp16", "cusparselt int8")


def baselines(m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds of vendor GEMMs of this shape with rotating weights; names the vendor refuses are omitted."""
    found = {}
    for name in VENDORS:
        graph = VendorWeights(n, k).captured(name, m)
        if graph is not None:
            us = graph.replay() * graph.calls
            rest(2.0 * m * n * k)
            found[name] = round(time_in_turns([graph], replays_at_full_clocks(us, 7))[0].us, 3)
    return found


class VendorWeights:
    """Rotating weights [n, k] of vendor GEMMs, created lazily and reused for every M."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self._weights: dict[str, list[torch.Tensor]] = {}

    def captured(self, name: str, m: int) -> Captured | None:
        """The captured product of m rows; None if the vendor refuses the shape."""
        try:
            call, count = self._call(name, m)
            guess = time_graph(call, 4, replays=1)
            return Captured(call, calls_for(guess.us, min(count, 32)))
        except RuntimeError:  # e.g. torch._int_mm needs M > 16
            torch.cuda.synchronize()
            return None

    def weights(self, name: str) -> list[torch.Tensor]:
        """Copies that together exceed L2."""
        if name not in self._weights:
            self._weights[name] = [
                self._weight(name) for _ in range(rotations(self.n * self.k * (2 if "16" in name else 1), 64))
            ]
        return self._weights[name]

    def _weight(self, name: str) -> torch.Tensor:
        if "cusparselt" not in name:
            return self._random(name, self.n)
        dense = self._random(name, self.n)
        dense.view(self.n, -1, 4)[..., 2:] = 0
        return torch._cslt_compress(dense)  # the data of torch.sparse.to_sparse_semi_structured

    def _random(self, name: str, rows: int) -> torch.Tensor:
        if "int8" in name:
            return torch.randint(-127, 128, (rows, self.k), device="cuda", dtype=torch.int8)
        values = torch.randn(rows, self.k, device="cuda", dtype=torch.float16)
        return values.to(torch.float8_e4m3fn) if name == "fp8" else values * 0.02

    def _call(self, name: str, m: int) -> tuple[Callable[[int], object], int]:
        weights = self.weights(name)
        if "cusparselt" in name:
            return self._sparse_call(name, m, weights), len(weights)
        count, x = len(weights), self._random(name, m)
        if name == "cublas fp16":
            x = x / 0.02
            y = torch.empty(m, self.n, device="cuda", dtype=torch.float16)
            return lambda i: torch.mm(x, weights[i % count].t(), out=y), count
        if name == "int8":
            return lambda i: torch._int_mm(x, weights[i % count].t()), count
        one = torch.ones((), device="cuda")
        return lambda i: torch._scaled_mm(x, weights[i % count].t(), one, one, out_dtype=torch.float16), count

    def _sparse_call(self, name: str, m: int, weights: list[torch.Tensor]) -> Callable[[int], object]:
        """The fastest algorithm that cuSPARSELt finds; tokens are padded to its minimum.

        Results: [m, n] for int8; [n, m] for fp16, whose search for [m, n] hits an illegal instruction (0.8.0).
        """
        count, x = len(weights), self._random(name, -(-m // 32) * 32)
        how = {"transpose_result": True, "out_dtype": torch.float16} if "int8" in name else {"transpose_result": False}
        best = torch._cslt_sparse_mm_search(weights[0], x.t(), **how)
        return lambda i: torch._cslt_sparse_mm(weights[i % count], x.t(), alg_id=int(best), **how)


def without_crash(
    names: Sequence[str], shapes: Sequence[tuple[int, int, int]], seconds: float = 60.0
) -> dict[str, set[tuple[int, int, int]]]:
    """The shapes (m, n, k) of each vendor product that succeed, each product tried in its own process.

    A crash in cuSPARSELt's search poisons the CUDA context: shapes after it are omitted, too.
    """
    code = f"""import timing
for m, n, k in {list(shapes)}:
    if timing.VendorWeights(n, k).captured(NAME, m) is not None:
        timing.torch.cuda.synchronize()
        print(m, n, k, flush=True)
"""
    place = os.pathsep.join(str(Path(part).resolve()) for part in [str(Path(__file__).parent), *sys.path] if part)
    how = {"env": {**os.environ, "PYTHONPATH": place}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = {
        name: subprocess.Popen([sys.executable, "-c", code.replace("NAME", repr(name))], text=True, **how)
        for name in names
    }
    found, stop = {}, time.monotonic() + seconds
    for name, process in running.items():
        try:
            printed, said = process.communicate(timeout=max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            printed, said = process.communicate()
            said += f"\nended after {seconds} s"
        done = [tuple(map(int, line.split())) for line in printed.splitlines()]
        found[name] = {shape for shape in shapes if shape in done}
        if missing := [shape for shape in shapes if shape not in done]:
            last = (said.strip().splitlines() or [f"status {process.returncode}"])[-1]
            print(f"{name} is omitted for {missing}: its trial process ended: {last[:200]}", flush=True)
    return found


def worst_of(errors: Iterable[float]) -> float:
    """The largest error; NaN counts as largest, which ``max`` would ignore."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


# -------- rows


def stamp(gpu: str = "") -> dict[str, str]:
    """Provenance of a row: GPU, torch, commit, date. Raises SystemExit if the commit is unknown (``rows.commit``).

    gpu: its name, if this process must not use it.
    """
    return {"gpu": gpu or torch.cuda.get_device_name(), **origin()}


def merge_rows(path: Path, rows: Sequence[dict[str, object]], key: Sequence[str] = ("case", "scheme", "m", "n", "k")):
    """Add checked rows to the JSON list at ``path``, by ``rows.add``.

    Raises ValueError for a row whose ``checked`` is not True. A kernel that
    omits a part on purpose, to time the rest, says so in ``ablation`` and has ``checked`` False.
    """
    for row in rows:
        if row.get("checked") is not True and not (row.get("checked") is False and row.get("ablation")):
            named = ", ".join(str(row.get(name)) for name in key)
            raise ValueError(f"{named}: checked is {row.get('checked')!r}, and only a checked result is written down")
    add(path, rows, key)
