"""Products, points and maps for the tuner's tests."""

from typing import Any

from anybit.choose.builtin import builtin
from anybit.choose.families import FAMILIES, Candidate
from anybit.choose.policy import Measured, Origin, Point, Policy
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme


def product(scheme: str = "w4a8", m: int = 16, n: int = 4096, k: int = 4096, **more: Any) -> LinearProblem:
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, **more)


def point(one: LinearProblem, us: dict[str, float], default_us: float = 20.0) -> Point:
    """A point with these kernel times in microseconds, none of a built-in config."""
    found = {}
    for kernel, time in us.items():
        first = (Candidate(kernel, config, one.activations) for config in FAMILIES[kernel].promising(one, 8))
        candidate = next(c for c in first if c != builtin(one))
        found[candidate.strategy] = Measured.of(candidate, time)
    return Point(default_us, found)


def policy(*points: tuple[LinearProblem, Point], gpu: str = "NVIDIA H200") -> Policy:
    found = Policy(Origin.here(gpu, "sm_90a", "1.0", "2.0"))
    for one, what in points:
        found.put(one, what)
    return found
