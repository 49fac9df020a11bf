"""Which kernel and config runs a linear problem: what its layer's own point says, else the nearest points, by waves.

A config that was measured for another layer, or at another token count, is expected to take its time there times the
ratio of the work of the busiest multiprocessor here and there, and more the less alike the two are. The least expected
time wins. docs/design/choosing.md has the figures.
"""

import bisect
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from anybit.choose.builtin import FEW_TOKENS, MOST_TOKENS, builtin, builtin_layout
from anybit.choose.families import FAMILIES, Candidate, Layout, layouts
from anybit.choose.policy import Measured, Policy
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_COLUMNS
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import TOKENS
from anybit.scheme import Scheme

_LAYERS = 12
"""How many of the nearest layers are asked."""
_SHAPE, _TOKENS = 0.5, 0.1
"""Share by which a time counts as longer for each power of two between two layers, and between token counts."""
_CODES, _GROUPS = 0.3, 0.05
"""Distance, in powers of two, between formats whose codes, and whose groups, differ."""
_TABLES = ("nf4", "iq4")
_AROUND, _TILE = 12, 100
"""Steps of 128 inputs, and tokens, in whose time a tile begins and ends, whatever its size."""


@dataclass(frozen=True)
class Choice:
    """The candidate that runs a problem. us: measured or expected microseconds of a call; 0 without ``source``.

    source: the measured problem that decided; None if none was near (``kernels.gemm.builtin``).
    """

    candidate: Candidate
    us: float = 0.0
    source: LinearProblem | None = None


@dataclass(frozen=True)
class _Layer:
    """The measured configs of a layer that read one weight layout, by token count."""

    problem: LinearProblem
    by_tokens: dict[int, list[Measured]] = field(default_factory=dict)
    made: dict[int, list[tuple[Candidate, float]]] = field(default_factory=dict)

    @cached_property
    def counts(self) -> list[int]:
        """Token counts, ascending."""
        return sorted(self.by_tokens)

    def at(self, tokens: int) -> list[tuple[Candidate, float]]:
        """(candidate, microseconds) of a measured count, fastest first."""
        if tokens not in self.made:
            there = replace(self.problem, m=tokens)
            found = [(one.rebuilt(there), one.us) for one in self.by_tokens[tokens]]
            self.made[tokens] = sorted((one for one in found if one[0].why_not(there) is None), key=lambda one: one[1])
        return self.made[tokens]

    def around(self, tokens: int) -> list[int]:
        """The measured counts below and at or above, at most a factor of two away; of few tokens one, the one above."""
        place, few = bisect.bisect_left(self.counts, tokens), tokens <= FEW_TOKENS
        above = [m for m in self.counts[place : place + 1] if m <= 2 * tokens]
        if above == [tokens] or (few and above):
            return above
        return [m for m in self.counts[max(place - 1, 0) : place] if few or tokens <= 2 * m] + above


class Map:
    """The points of several policy maps; the first that knows a layer decides."""

    def __init__(self, policies: Collection[Policy]) -> None:
        self._kinds: dict[Any, list[_Layer]] = {}
        self._near: dict[Any, list[tuple[float, _Layer]]] = {}
        last_first = reversed([(Device.named(policy.origin.arch), policy.layers) for policy in policies])
        merged = {key: (device, points) for device, layers in last_first for key, points in layers.items()}
        for (text, dtype, n, k), (device, points) in merged.items():
            scheme, layers = Scheme.parse(text), dict[Any, _Layer]()
            for m, point in points.items():
                problem = LinearProblem(m, n, k, scheme.weights, scheme.activations, getattr(torch, dtype), device)
                for one in point.strategies.values():
                    kind = _kind(problem, FAMILIES[one.kernel].layout(scheme.activations))
                    layers.setdefault(kind, _Layer(problem)).by_tokens.setdefault(m, []).append(one)
            for kind, layer in layers.items():
                self._kinds.setdefault(kind, []).append(layer)

    def near(self, product: LinearProblem, layout: Layout) -> list[tuple[float, _Layer]]:
        """(distance in powers of two, layer) of the nearest layers, nearest first."""
        kind = _kind(product, layout)
        key = product.n, product.k, product.weights, product.activations, product.dtype, kind
        if key not in self._near:
            layers = self._kinds.get(kind, ())
            some = [(_distance(product, one.problem, layout), one) for one in layers]
            own = product.activations, product.dtype
            some.sort(key=lambda one: (one[0], (one[1].problem.activations, one[1].problem.dtype) != own))
            self._near[key] = some[:_LAYERS]
        return self._near[key]

    def expected(
        self, product: LinearProblem, layout: Layout | None = None, everything: bool = False
    ) -> list[tuple[float, Candidate, LinearProblem]]:
        """(expected microseconds, candidate where it was measured, that problem), least time first.

        everything: of other layers, too, where the layer's own points decide.
        """
        near = [self.near(product, each) for each in layouts(product.activations, layout)]
        own = [one[0] for one in near if one and not one[0][0] and one[0][1].around(product.m)]
        found: list[tuple[float, Candidate, LinearProblem]] = []
        for distance, layer in own if own and not everything else [one for some in near for one in some]:
            for m in layer.around(product.m):
                there, unlike = replace(layer.problem, m=m), 1 + _TOKENS * abs(math.log2(m / product.m))
                for candidate, us in layer.at(m):
                    ratio = work(candidate, product) / work(candidate, there)
                    found.append((us * ratio * (unlike + _SHAPE * distance), candidate, there))
        return sorted(found, key=lambda one: one[0])

    def choose(self, product: LinearProblem, layout: Layout | None = None, kernel: str = "") -> Choice:
        """The choice for a problem. layout: of its weights; None: the best.  kernel: the only one, if a point has it.

        Raises KernelError if nothing can run it.
        """
        here = replace(product, m=min(product.m, MOST_TOKENS))
        best: Choice | None = None
        for us, candidate, there in self.expected(here, layout, bool(kernel)):
            if best is not None and us >= best.us:
                break
            for one, factor in forms(candidate, here, there) if kernel in ("", candidate.kernel) else ():
                if (best is None or us * factor < best.us) and one.why_not(product) is None:
                    best = Choice(one, us * factor, there)
        return best or Choice(builtin(product, layout))

    def layout(self, product: LinearProblem) -> Layout:
        """The layout to store a layer's weights in: the one that loses least, at its worst token count."""
        usual, times = builtin_layout(product), dict[Layout, dict[int, float]]()
        for layout in sorted(layouts(product.activations), key=lambda one: one is not usual):
            for part in (replace(product, m=1), replace(product, m=MOST_TOKENS)):
                for _, layer in [one for one in self.near(part, layout)[:1] if not one[0]]:
                    found = {m: layer.at(m)[0] for m in layer.counts if layer.at(m)}
                    for m, (candidate, us) in found.items():
                        if FAMILIES[candidate.kernel].why_not(replace(product, m=m)) is None:
                            times.setdefault(layout, {})[m] = us
        counts = {m for by in times.values() for m in by}
        least = {m: min(by[m] for by in times.values() if m in by) for m in counts}

        def loss(layout: Layout) -> float:
            return max(times[layout].get(m, math.inf) / least[m] for m in counts)

        return min(times, key=loss, default=usual)


def _kind(product: LinearProblem, layout: Layout) -> tuple[Any, ...]:
    """What two problems must share for one's configs to run the other: kernels for many tokens may promote sums."""
    x, w, few = product.activations, product.weights, product.m <= FEW_TOKENS
    promoted = x.quantized and not few and (not x.integer or w.group is not None)
    table = few and w.code in _TABLES  # kernels over 16-bit floats look these codes up
    return (layout,) if layout is Layout.planes else (layout, few, promoted, w.sparse, few and x.integer, table)


def _distance(one: LinearProblem, other: LinearProblem, layout: Layout) -> float:
    """How unlike two layers are, in powers of two; tiles multiply bytes, whatever the width of activations."""
    (w, x), (v, y) = (one.weights, one.activations), (other.weights, other.activations)
    pairs = [(one.n, other.n), (one.k, other.k), (w.bits, v.bits), *[(x.bits, y.bits)] * (layout is Layout.planes)]
    sizes = sum(abs(math.log2(mine / its)) for mine, its in pairs)
    return sizes + _CODES * (w.code != v.code) + _GROUPS * (w.group != v.group)


def forms(candidate: Candidate, here: LinearProblem, there: LinearProblem) -> Iterator[tuple[Candidate, float]]:
    """A measured candidate as it can run here, and in the smallest tile for all tokens, each with a factor of time."""
    family, tile_m = FAMILIES[candidate.kernel], getattr(candidate.config, "tile_m", 0)
    tiles = [tile_m]
    if candidate.kernel == "sm90_packed_gemm" and here.m <= TOKENS[-1] and here.m != there.m:
        tiles.append(next(tile for tile in TOKENS if tile >= here.m))
    for tile in dict.fromkeys(tiles):
        config = candidate.config if tile == tile_m else replace(candidate.config, tile_m=tile)
        if (one := family.fit(here, config, there)) is not None:
            yield Candidate(candidate.kernel, one, here.activations), (_TILE + tile) / (_TILE + tile_m)


def work(candidate: Candidate, product: LinearProblem) -> float:
    """The work of the busiest multiprocessor; comparable between problems for one config."""
    p, c, blocks, sms = product, candidate.config, -(-product.k // TILE_COLUMNS), product.device.sms
    tiles: float
    if candidate.kernel == "sm90_packed_gemm":
        tiles = -(-p.n // c.rows) * -(-p.m // c.tile_m) / (sms // c.cluster_k * c.min_blocks_per_sm)
        blocks = blocks // (c.cluster_k * c.split_k_warpgroups)
    elif hasattr(c, "tile_n"):
        share = getattr(c, "cluster_k", 4)  # some four skinny blocks share a multiprocessor
        tiles = -(-p.n // c.tile_n) * -(-p.m // c.tile_m) / (sms * 4 / share)
        blocks = blocks // getattr(c, "cluster_k", 1)
    elif hasattr(c, "tail_tile_m") or hasattr(c, "stationary"):
        tiles = -(-p.m // c.tile_m) * -(-p.n // 128) / sms
    else:  # for few tokens: bytes
        return max(1.0, p.n / 64 * max(1, p.m / 16) / sms) * (blocks + 4)
    return float((math.ceil(tiles) if tiles <= 4 else tiles + 0.5) * (blocks + _AROUND))
