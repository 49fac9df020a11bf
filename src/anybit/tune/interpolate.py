"""What a config takes at a token count that was not measured, from what it took at one that was.

Tiles of tokens fill the last round of multiprocessors or leave it nearly empty: of w4a8 at 4096 x 16384 the best config
of 1280 tokens takes 1.22 times the best of 1038. That part is arithmetic, and a family's estimate (or what its tiles
take at least, where it has none) follows it, though it is 10 % off in what a tile takes: so the time that was measured
is scaled by what is expected at either count.
"""

from dataclasses import replace

from anybit.errors import KernelError
from anybit.tune.lower_bound import lower_bound_us
from anybit.tune.registry import FAMILIES, LinearProblem
from anybit.tune.space import Candidate

_AROUND_US = 2.0
"""What a launch takes beside its tiles' products, where a family has no estimate."""
_TOKENS = 64
"""Tokens of which a tile of bit planes skips those that are not there: 256 with 128 of them took 10.3 us, and with 140
13.4, which no number of tiles tells (w2a2, 16384 x 2048)."""
_SAVED = 0.8
"""The power of what is expected to be saved that is: a config that needs one round for two saves less than half (9.4 us
with 284 tokens for 11.7 with 320; w4a4, 2048 x 2048)."""
_ROWS, _RAGGED = 16, 1.1
"""Tokens that a tile may lack of the box that its last ones are loaded in (of the tile, where it is loaded whole), and
what it is expected to take where it lacks more: 24 to 31 cost 5 to 28 % in a third of 65 configs, nothing in the
others, and 40 % in one (17.9 us with 161 tokens, 13.1 with 160; w4a16g128, 2048 x 8192)."""


def scaled(candidate: Candidate, us: float, there: LinearProblem, here: LinearProblem) -> float | None:
    """Microseconds of a candidate ``here``, which took ``us`` for its layer ``there``; None: nothing is known, as where
    a family without an estimate would need more rounds of multiprocessors. Of such a family a tile that holds all
    tokens is expected to take longer in proportion to them; tiles of mma.sync have no ``tokens``, and skip none.
    """
    if there.m == here.m:
        return us
    if candidate.why_not(here) is not None:
        return None
    us *= _ragged(candidate, here.m) / _ragged(candidate, there.m)
    one, other = _estimated(candidate, here), _estimated(candidate, there)
    if one is None or other is None:
        one, other = _at_least(candidate, here), _at_least(candidate, there)
        if one > other:
            return None
        if there.m < here.m <= getattr(candidate.config, "tokens", 0):
            one = max(one, other * -(-here.m // _TOKENS) / -(-there.m // _TOKENS))
    return us * _changed(one, other)


def of_its_like(
    candidate: Candidate, us: float, there: LinearProblem, own: Candidate, here: LinearProblem
) -> float | None:
    """Microseconds of ``own`` here, of whose family ``candidate`` took ``us`` there; None for another family's."""
    if own.kernel != candidate.kernel or own.activations != candidate.activations:
        return None
    us *= _ragged(own, here.m) / _ragged(candidate, there.m)
    one, other = _estimated(own, here), _estimated(candidate, there)
    if one is None or other is None:
        one, other = _at_least(own, here), _at_least(candidate, there)
    return us * _changed(one, other)


def _changed(here: float, there: float) -> float:
    """How a measured time changes where what is expected does."""
    return here / there if here >= there else (here / there) ** _SAVED


def _ragged(candidate: Candidate, tokens: int) -> float:
    """What the last tile's missing tokens cost, as a factor."""
    ragged = candidate.kernel == "sm90_packed_gemm" and candidate.config.missing_rows(tokens) > _ROWS
    return _RAGGED if ragged else 1.0


def _estimated(candidate: Candidate, product: LinearProblem) -> float | None:
    try:
        return FAMILIES[candidate.kernel].estimate(
            replace(product, activations=candidate.activations), candidate.config
        )
    except KernelError:
        return None


def _at_least(candidate: Candidate, product: LinearProblem) -> float:
    return _AROUND_US + lower_bound_us(product, candidate)
