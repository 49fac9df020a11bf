"""Tables of a run's time by kernel and of GPU idle time, without profiler tools.

Begin and end a recorder in the process that does the work.
"""

from collections.abc import Callable

import torch


class KernelRecorder:
    """Records the GPU's kernels between ``begin`` and ``end``."""

    def begin(self) -> None:
        """Start recording."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._trace.__enter__()

    def end(self, count: int = 1) -> str:
        """Time of ``count`` runs by kernel, and idle gaps. Products are told apart by the preceding kernel, since they
        share a name. A kernel that starts early (PDL) waits for its predecessor: its time counts from when that one
        ended.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._trace.__exit__(None, None, None)
        events = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in self._trace.events() if e.device_time_total
        )
        if not events:
            return "no kernel ran"
        spent: dict[str, list[float]] = {}
        gaps: dict[str, list[float]] = {}
        busy, until, before = 0.0, events[0][0], ""
        for start, end, name in events:
            short = name.replace("void ", "").partition("<")[0].partition("(")[0][:44]
            key = f"{short} after {before[:34]}" if "packed" in short else short
            spent.setdefault(key, []).append(max(0.0, end - max(start, until)))
            if start > until:
                gaps.setdefault(f"{before[:34]} to {short[:34]}", []).append(start - until)
            busy += max(0.0, end - max(start, until))
            until, before = max(until, end), short
        span = until - events[0][0]
        said = [
            f"{span / count:.0f} us per step under the profiler, the GPU is busy {busy / count:.0f} us, "
            f"{1 - busy / span:.1%} idle"
        ]
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:26]:
            middle = sorted(times)[len(times) // 2]
            said.append(f"{sum(times) / count:9.1f} us {len(times) / count:6.1f} x {middle:7.2f}  {name}")
        for name, times in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:8]:
            middle = sorted(times)[len(times) // 2]
            said.append(f"  idle {sum(times) / count:8.1f} us {len(times) / count:6.1f} x {middle:7.2f}  {name}")
        return "\n".join(said)


def print_kernels(run: Callable[[], object], count: int = 1) -> None:
    """Print the time of ``count`` runs by kernel, after one warm-up."""
    run()
    recorder = KernelRecorder()
    recorder.begin()
    for _ in range(count):
        run()
    print(recorder.end(count))
