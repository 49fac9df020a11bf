"""How every figure is taken: a CUDA graph of many calls, operands that rotate through more than L2, medians of replays.

A result is checked before it is timed, so a row without a check cannot be written.
"""

import datetime
import functools
import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROTATE_BYTES = 256 << 20
"""Operands rotate through at least this much: four times the L2 of an H200, so that none is found there again."""

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the graph's replays, and the fastest and the slowest of them."""

    us: float
    fastest: float
    slowest: float


def rotations(bytes_per_call: int, most: int = 256) -> int:
    """How many copies of an operand of ``bytes_per_call`` bytes make the caches useless (at least 2)."""
    return max(2, min(most, -(-ROTATE_BYTES // max(bytes_per_call, 1))))


def copies(tensor: torch.Tensor, most: int = 256) -> list[torch.Tensor]:
    """``tensor`` and as many clones of it as a cold measurement wants."""
    count = rotations(tensor.numel() * tensor.element_size(), most)
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def time_graph(call: Callable[[int], object], calls: int, replays: int = 11) -> Timing:
    """Time ``call(i)``, i = 0 .. calls-1, captured into one CUDA graph on one stream.

    ``call`` picks its operands by ``i`` (rotating them) and may launch several kernels; launches that ask for
    programmatic dependent launch keep it inside the graph, so a chain of calls overlaps as it would in a model.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(2):  # lazy set-up (module loading, workspaces) must not be captured
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    with torch.cuda.stream(stream):
        for _ in range(replays + 1):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    times = times[1:]
    return Timing(statistics.median(times), min(times), max(times))


def calls_for(expected_us: float, copies_at_hand: int = 1, graph_us: float = 1200.0, most: int = 256) -> int:
    """Calls in one graph: about ``graph_us`` of work, and every copy of the operands at least once if that is short."""
    wanted = min(most, max(8, int(graph_us / max(expected_us, 0.5))))
    return max(wanted, min(copies_at_hand, most))


def measure(
    call: Callable[[int], object], check: Callable[[], None], *, copies_at_hand: int = 1, replays: int = 11
) -> Timing:
    """Check, then time. ``check`` runs the call itself and raises where its result is wrong.

    A first, short graph tells how many calls the second one should hold.
    """
    check()
    torch.cuda.synchronize()
    guess = time_graph(call, max(4, min(copies_at_hand, 8)), replays=1)
    return time_graph(call, calls_for(guess.us, copies_at_hand), replays)


# -------- floors: what the box can do at best, measured (docs/limits)

# Bytes read once -> microseconds a kernel in a chain with programmatic dependent launch (plain loads).
_READ_US = ((0, 0.30), (4.2e6, 1.02), (8.6e6, 1.87), (13.0e6, 2.79), (30.3e6, 6.50), (60.6e6, 12.98), (121e6, 25.83))

RATES = {"b1": 15360.0, "s8": 1918.0, "e4m3": 1920.0, "f16": 931.0}
"""Measured issue rates of wgmma on an H200 in TOPS."""


def read_floor_us(size: float) -> float:
    """Microseconds to read ``size`` bytes once on an H200, between measured points."""
    for (s0, t0), (s1, t1) in itertools.pairwise(_READ_US):
        if size <= s1:
            return t0 + (t1 - t0) * (size - s0) / (s1 - s0)
    return size / 4.68e6


def floor_us(size: float, operations: float, kind: str) -> float:
    """The longer of reading (and writing) ``size`` bytes and of issuing ``operations`` at the rate of ``kind``."""
    return max(read_floor_us(size), operations / RATES[kind] * 1e-6)


# -------- baselines


@functools.cache
def baselines(m: int, n: int, k: int, names: Sequence[str] = ("cublas fp16", "int8", "fp8")) -> dict[str, float]:
    """Microseconds of the vendor's products of this shape with rotating weights; a name it refuses is left out."""
    found = {}
    for name in names:
        try:
            found[name] = round(_baseline(name, m, n, k).us, 3)
        except RuntimeError:  # e.g. torch._int_mm wants M > 16
            torch.cuda.synchronize()
    return found


def _baseline(name: str, m: int, n: int, k: int) -> Timing:
    count = rotations(n * k * (2 if name == "cublas fp16" else 1), 64)
    cuda = torch.device("cuda")
    if name == "cublas fp16":
        x = torch.randn(m, k, device=cuda, dtype=torch.float16)
        weights = [torch.randn(n, k, device=cuda, dtype=torch.float16) * 0.02 for _ in range(count)]
        y = torch.empty(m, n, device=cuda, dtype=torch.float16)

        def call(i: int) -> object:
            return torch.mm(x, weights[i % count].t(), out=y)

    elif name == "int8":
        x = torch.randint(-127, 128, (m, k), device=cuda, dtype=torch.int8)
        weights = [torch.randint(-127, 128, (n, k), device=cuda, dtype=torch.int8) for _ in range(count)]

        def call(i: int) -> object:
            return torch._int_mm(x, weights[i % count].t())

    elif name == "fp8":
        x = torch.randn(m, k, device=cuda).to(torch.float8_e4m3fn)
        weights = [torch.randn(n, k, device=cuda).to(torch.float8_e4m3fn) for _ in range(count)]
        one = torch.ones((), device=cuda)

        def call(i: int) -> object:
            return torch._scaled_mm(x, weights[i % count].t(), one, one, out_dtype=torch.float16)

    else:
        raise ValueError(f"baseline {name!r} is not one of 'cublas fp16', 'int8', 'fp8'")
    guess = time_graph(call, 4, replays=1)
    return time_graph(call, calls_for(guess.us, min(count, 32)), replays=7)


# -------- rows


def stamp() -> dict[str, str]:
    """What a row says of where it comes from: GPU, torch, commit (``ANYBIT_COMMIT`` where there is no git), date."""
    commit = os.environ.get("ANYBIT_COMMIT", "")
    if not commit:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def merge_rows(path: Path, rows: Sequence[dict[str, object]], key: Sequence[str] = ("case", "scheme", "m", "n", "k")):
    """Write ``rows`` into the JSON list at ``path``: a row replaces an older one with the same ``key``."""
    old = json.loads(path.read_text()) if path.exists() else []
    merged = {tuple(row.get(name) for name in key): row for row in [*old, *rows]}
    for row in rows:
        if not row.get("checked"):
            raise ValueError(f"{row.get('case')}, {row.get('scheme')}: only a checked result is written down")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")
