"""Which kernel and config runs a linear problem: what its layer's own point says, else the nearest points, by waves.

A config that was measured for another layer, or at another token count, is expected to take its time there times the
ratio of the work of the busiest multiprocessor here and there, and more the less alike the two are. The least expected
time wins. docs/design/choosing.md has the figures.
"""

import bisect
import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import torch

from anybit.choose.builtin import FEW_TOKENS, MOST_TOKENS, builtin, builtin_layout
from anybit.choose.families import FAMILIES, Candidate, Layout, layouts
from anybit.choose.policy import Measured, Policy
from anybit.device import Device
from anybit.kernels.bitplane import bitplane_problem
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_COLUMNS, TILE_ROWS
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import TOKENS
from anybit.scheme import Scheme

_LAYERS = 12  # nearest layers that are asked
_SHAPE, _TOKENS = 0.5, 0.1
"""Share by which a time counts as longer for each power of two between two layers, and between token counts."""
_FORMAT = 0.1  # distance, in powers of two, between formats whose codes or groups differ
_TABLES = ("nf4", "iq4")
_AROUND, _TILE = 12, 100
"""Steps of 128 inputs, and tokens, in whose time a tile begins and ends, whatever its size."""


@dataclass(frozen=True)
class Choice:
    """The candidate that runs a problem, its measured or expected microseconds, and the measured problem that decided.

    Without such a problem (``builtin``) source is None and us 0.
    """

    candidate: Candidate
    us: float = 0.0
    source: LinearProblem | None = None


@dataclass(frozen=True)
class _Layer:
    """The measured configs of a layer that read one weight layout, by token count; ``made``: rebuilt, as asked for."""

    problem: LinearProblem
    by_tokens: dict[int, list[Measured]] = field(default_factory=dict)
    made: dict[int, list[tuple[float, Candidate]]] = field(default_factory=dict)

    def at(self, tokens: int) -> list[tuple[float, Candidate]]:
        """(microseconds, candidate) of a measured count, fastest first."""
        if tokens not in self.made:
            there = replace(self.problem, m=tokens)
            found = [(one.us, one.rebuilt(there)) for one in self.by_tokens[tokens]]
            self.made[tokens] = sorted((one for one in found if one[1].why_not(there) is None), key=lambda one: one[0])
        return self.made[tokens]

    def around(self, tokens: int) -> list[int]:
        """The measured counts below and at or above, at most a factor of two away; of few only the one above."""
        counts, few = sorted(self.by_tokens), tokens <= FEW_TOKENS
        place = bisect.bisect_left(counts, tokens)
        above = [m for m in counts[place : place + 1] if m <= 2 * tokens]
        if above == [tokens] or few:
            return above
        return [m for m in counts[max(place - 1, 0) : place] if tokens <= 2 * m] + above


class Map:
    """The points of several policy maps; the first that knows a layer decides."""

    def __init__(self, policies: Collection[Policy]) -> None:
        self._layers: dict[Hashable, list[_Layer]] = {}
        self._near: dict[Hashable, list[tuple[float, _Layer]]] = {}
        last_first = reversed([(Device.named(policy.origin.arch), policy.layers) for policy in policies])
        merged = {key: (device, points) for device, layers in last_first for key, points in layers.items()}
        for (text, dtype, n, k), (device, points) in merged.items():
            scheme, layers = Scheme.parse(text), dict[Hashable, _Layer]()
            for m, point in points.items():
                problem = LinearProblem(m, n, k, scheme.weights, scheme.activations, getattr(torch, dtype), device)
                for one in point.strategies.values():
                    kind = _kind(problem, FAMILIES[one.kernel].layout(scheme.activations))
                    layers.setdefault(kind, _Layer(problem)).by_tokens.setdefault(m, []).append(one)
            for kind, layer in layers.items():
                self._layers.setdefault(kind, []).append(layer)

    def near(self, product: LinearProblem, layout: Layout) -> list[tuple[float, _Layer]]:
        """(distance in powers of two, layer), nearest first; of equals one of the same types."""
        kind, own = _kind(product, layout), (product.activations, product.dtype)
        key = kind, own, product.n, product.k, product.weights
        if key not in self._near:
            some = [(_distance(product, one.problem, layout), one) for one in self._layers.get(kind, ())]
            some.sort(key=lambda one: (one[0], (one[1].problem.activations, one[1].problem.dtype) != own))
            self._near[key] = some
        return self._near[key]

    def expected(
        self, product: LinearProblem, layout: Layout | None = None, everything: bool = False
    ) -> list[tuple[float, Candidate, LinearProblem]]:
        """(expected microseconds, candidate where it was measured, that problem), least time first; see ``choose``."""
        each = [self.near(product, one) for one in layouts(product.activations, layout)]
        near = [list(islice((one for one in some if one[1].around(product.m)), _LAYERS)) for some in each]
        nearest = [one for some in near for one in some[:1]]
        own = [
            (apart, one) for apart, one in nearest if not apart and any(m <= product.m for m in one.around(product.m))
        ]
        found: list[tuple[float, Candidate, LinearProblem]] = []
        for apart, layer in own if own and not everything else chain(*near):
            for m in layer.around(product.m):
                there, unlike = replace(layer.problem, m=m), 1 + _TOKENS * abs(math.log2(m / product.m))
                for us, candidate in layer.at(m):
                    ratio = work(candidate, product) / work(candidate, there)
                    found.append((us * ratio * (unlike + _SHAPE * apart), candidate, there))
        return sorted(found, key=lambda one: one[0])

    def choose(self, product: LinearProblem, layout: Layout | None = None, kernel: str = "") -> Choice:
        """The choice for a problem, of a layout, and of a kernel if a point has it. Raises KernelError for none."""
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
            kinds = [self.near(replace(product, m=m), layout)[:1] for m in (FEW_TOKENS, MOST_TOKENS)]
            for layer in [layer for nearest in kinds for apart, layer in nearest if not apart]:
                for m in sorted(layer.by_tokens):
                    for us, candidate in layer.at(m)[:1]:
                        if FAMILIES[candidate.kernel].why_not(replace(product, m=m)) is None:
                            times.setdefault(layout, {})[m] = us
        counts = {m for by in times.values() for m in by}
        least = {m: min(by[m] for by in times.values() if m in by) for m in counts}
        loss = {layout: max(by.get(m, math.inf) / least[m] for m in counts) for layout, by in times.items()}
        return min(loss, key=loss.__getitem__, default=usual)


def _kind(product: LinearProblem, layout: Layout) -> Hashable:
    """What two problems must share for one's configs to run the other: kernels for many tokens may promote sums."""
    x, w, few = product.activations, product.weights, product.m <= FEW_TOKENS
    promoted = x.quantized and not few and (not x.integer or w.group is not None)
    table = few and w.code in _TABLES  # kernels over 16-bit floats look these codes up
    return layout if layout is Layout.planes else (layout, few, promoted, w.sparse, few and x.integer, table)


def _distance(one: LinearProblem, other: LinearProblem, layout: Layout) -> float:
    """How unlike two layers are, in powers of two; tiles multiply bytes, whatever the width of activations."""
    (w, x), (v, y) = (one.weights, one.activations), (other.weights, other.activations)
    pairs = [(one.n, other.n), (one.k, other.k), (w.bits, v.bits)]
    if layout is Layout.planes:
        pairs.append((x.bits, y.bits))
    sizes = sum(abs(math.log2(mine / its)) for mine, its in pairs)
    return sizes + _FORMAT * ((w.code, w.group) != (v.code, v.group))


def forms(candidate: Candidate, here: LinearProblem, there: LinearProblem) -> Iterator[tuple[Candidate, float]]:
    """A measured candidate as it can run here, and in the smallest tile for all tokens, each with a factor of time."""
    family, config = FAMILIES[candidate.kernel], candidate.config
    factors = {config: 1.0}
    if isinstance(config, sm90_packed_gemm.Config) and here.m <= max(TOKENS) and here.m != there.m:
        tile = min(tile for tile in TOKENS if tile >= here.m)
        alone = replace(config, tile_m=tile)
        fewer = work(replace(candidate, config=alone), here) / work(candidate, here)
        factors.setdefault(alone, fewer * (_TILE + tile) / (_TILE + config.tile_m))
    for tried, factor in factors.items():
        if (one := family.fit(here, tried, there)) is not None:
            yield Candidate(candidate.kernel, one, here.activations), factor


def work(candidate: Candidate, product: LinearProblem) -> float:
    """The work of the busiest multiprocessor; comparable between problems for one config.

    Blocks that share a multiprocessor slow each other down by half of what they would take one after the other.
    """
    p, c, blocks, sms = product, candidate.config, -(-product.k // TILE_COLUMNS), product.device.sms
    if isinstance(c, sm90_packed_gemm.Config):
        each = -(-p.n // c.rows) * -(-p.m // c.tile_m) / max(1, sms // c.cluster)
        together, blocks = c.min_blocks_per_sm, blocks // (c.cluster_k * c.split_k_warpgroups)
    elif isinstance(c, bitplane_problem.Facts):
        cluster, tile_m = getattr(c, "cluster_k", 1), getattr(c, "tile_m", 1)
        each = -(-p.n // getattr(c, "tile_n", bitplane_problem.ROWS)) * -(-p.m // tile_m) * cluster / sms
        together, blocks = max(1, p.device.shared_bytes // candidate.shared_bytes), blocks // cluster
    else:  # for few tokens: bytes
        return max(1.0, p.n / TILE_ROWS * max(1, p.m / 16) / sms) * (blocks + _AROUND)
    return (math.ceil(each / together) + math.ceil(each) / together) * (blocks + _AROUND)
