"""What a config takes where it was not measured, from what it took where it was.

Tiles of tokens fill the last round of multiprocessors or leave it nearly empty. A family's estimate follows that, and
is 10 % off in what a tile takes: so measured times are scaled by its estimates in both places.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from anybit.errors import KernelError
from anybit.tune.policy import Measured, Point
from anybit.tune.registry import FAMILIES, LinearProblem, power_of_two
from anybit.tune.space import VENDOR, Candidate, builtin, builtin_layout


def around(points: Mapping[int, Point], tokens: int) -> tuple[int, int]:
    """The measured counts next below and next at or above, at most a factor of two away; 0 where there is none."""
    upper = min((m for m in points if tokens <= m <= power_of_two(tokens)), default=0)
    return max((m for m in points if 2 * m >= tokens > m), default=0), upper


def between(
    here: LinearProblem,
    points: Mapping[int, Point],
    own: Candidate,
    legal: Callable[[Measured], Candidate | None],
) -> tuple[float, Candidate | None]:
    """The config that is expected to be fastest between two measured counts, and its share of ``own``'s time.

    own: the built-in choice here. It was measured at both counts, as other configs of its kernel, perhaps. Where a
    family has no estimate, times follow the line through those of the built-in choices.
    """
    lower, upper = around(points, here.m)
    ends = (lower, upper) if lower else (upper,)
    line = {m: points[m].default_us for m in ends}
    slope = (line[upper] - line[ends[0]]) / max(upper - ends[0], 1)
    own_line = line[upper] - slope * (upper - here.m)

    def scaled(one: Candidate, us: float, there: LinearProblem, then: Candidate) -> float:
        now, before = _estimate(one, here), _estimate(then, there)
        return us * (own_line / line[there.m] if now is None or before is None else now / before)

    own_us: list[float] = []
    found: dict[Candidate, list[float]] = {}
    for m in ends:
        there, point = replace(here, m=m), points[m]
        base = builtin(there, own.layout)
        own_us.append(scaled(own, point.default_us, there, base) if base.kernel == own.kernel else own_line)
        for measured in point.strategies.values():
            one = legal(measured)
            if one is not None and one != own:
                found.setdefault(one, []).append(scaled(one, measured.us, there, one))
    mean = {one: sum(some) / len(some) for one, some in found.items()}
    best = min(mean, key=mean.__getitem__, default=None)
    if own.layout is not builtin_layout(here):
        return 0.0, best  # a map knows the times of the built-in layout's choice alone
    return (mean[best] / (sum(own_us) / len(own_us)) if best else 1.0), best


def expected_gain(
    candidate: Candidate, own: Candidate, there: LinearProblem, here: LinearProblem, gain: float
) -> float | None:
    """What share of the built-in choice's time a config is expected to take ``here``, which took ``gain`` of it there.

    None where nothing is known.
    """
    try:
        base = builtin(there, own.layout)
    except KernelError:
        return None
    if base.kernel != own.kernel:
        return gain
    known = [_estimate(candidate, here), _estimate(candidate, there), _estimate(own, here), _estimate(base, there)]
    if None in known:
        return gain if here.m <= there.m else None
    c_here, c_there, own_here, base_there = (us or 1.0 for us in known)
    return gain * (c_here / c_there) / (own_here / base_there)


def _estimate(candidate: Candidate, product: LinearProblem) -> float | None:
    """The family's estimate in microseconds; None where it has none, or the config is illegal there."""
    if candidate.kernel == VENDOR:
        return None
    try:
        return FAMILIES[candidate.kernel].estimate(
            replace(product, activations=candidate.activations), candidate.config
        )
    except KernelError:
        return None
