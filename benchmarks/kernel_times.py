"""Which kernels a replayed CUDA graph spends its time in, and the gaps between them: a table, no profiler tools.

With programmatic dependent launch a kernel starts before the one ahead has ended, so times overlap: "alone" is the
time from the end of the latest kernel before it to its own end, and these sum to the whole.
"""

import collections
from collections.abc import Callable

import torch


def kernel_table(replay: Callable[[], object], most: int = 30) -> str:
    """One line a kernel: how often, the sum of its times, the sum of its times alone, and the gaps before it, in us."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = sorted(
        (
            (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
            for event in profile.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns()
        ),
    )
    if not events:
        return "the profiler saw no kernels"
    rows: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    latest = events[0][0]
    for start, end, name in events:
        row = rows[name]
        row[0] += 1
        row[1] += end - start
        row[2] += max(0.0, end - max(start, latest))
        row[3] += max(0.0, start - latest)
        latest = max(latest, end)
    whole, gaps = latest - events[0][0], sum(row[3] for row in rows.values())
    lines = [
        f"{len(events)} kernels in {whole:.1f} us, {gaps:.1f} us of it between kernels",
        "count    sum  alone   gaps  kernel",
    ]
    for name, (count, total, alone, gap) in sorted(rows.items(), key=lambda item: -item[1][2] - item[1][3])[:most]:
        lines.append(f"{count:5d} {total:6.0f} {alone:6.0f} {gap:6.0f}  {name[:110]}")
    middle = len(events) // 2
    lines.append("one stretch: start and end in us, kernel")
    first = events[middle][0]
    for start, end, name in events[middle : middle + 20]:
        lines.append(f"{start - first:8.2f} {end - first:8.2f}  {name[:60]}")
    return "\n".join(lines)
