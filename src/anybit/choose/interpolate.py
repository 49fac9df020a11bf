"""Estimate a config's time for an unmeasured problem from measured ones.

Time depends on how full the last wave of tiles is. A family's estimate models that, but is 10 % off in the time per
tile, so measured times are scaled by the ratio of its estimates.
"""

from collections.abc import Iterable
from dataclasses import replace

from anybit.choose.builtin import builtin, power_of_two
from anybit.choose.families import FAMILIES, Candidate
from anybit.errors import KernelError
from anybit.kernels.linear_problem import LinearProblem


def around(counts: Iterable[int], tokens: int) -> tuple[int, int]:
    """The nearest measured counts (below, at or above), at most a factor of two away; 0 if there is none."""
    near = [m for m in counts if tokens <= 2 * m and m <= power_of_two(tokens)]
    return max((m for m in near if m < tokens), default=0), min((m for m in near if m >= tokens), default=0)


def expected_gain(one: Candidate, own: Candidate, there: LinearProblem, here: LinearProblem, gain: float) -> float:
    """Expected time of a config as a share of the built-in choice's ``here``, given that share ``gain`` at ``there``.

    Unchanged for families without an estimate.
    """
    base = builtin(there, own.layout)
    pairs = (_estimate(one, here), _estimate(one, there)), (_estimate(own, here), _estimate(base, there))
    (now, before), (own_now, own_before) = pairs
    if base.kernel != own.kernel or not (now and before and own_now and own_before):
        return gain
    return gain * (now / before) / (own_now / own_before)


def _estimate(candidate: Candidate, product: LinearProblem) -> float | None:
    """The family's estimate in microseconds; None if it has none, or the config is illegal there."""
    try:
        product = replace(product, activations=candidate.activations)
        return FAMILIES[candidate.kernel].estimate(product, candidate.config)
    except (KernelError, ZeroDivisionError):
        return None
