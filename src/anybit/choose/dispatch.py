"""Which config runs a linear problem: looked up in the policy maps of its GPU, decided once and cached by the caller.

Maps in order of precedence: those passed to ``use``, the user's own for this GPU (``policy.own_file``), the shipped
one. All rules: docs/tuning.md.
"""

import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from anybit.choose.builtin import INTERPOLATE_FROM, MOST_TOKENS, bucket, builtin, builtin_layout
from anybit.choose.families import Candidate, Layout
from anybit.choose.interpolate import around, expected_gain
from anybit.choose.policy import SHIPPED, Measured, Point, Policy, file_name, key_of, own_file, usable
from anybit.choose.space import FEW_TOKENS, preserves_pdl_overlap
from anybit.errors import KernelError, dtype_name
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, WeightFormat

_NEAR = 1.0
"""Largest distance, in powers of two, of a measured point that may stand in for an unmeasured layer."""
_CLEARLY = 0.97
"""Expected share of the built-in choice's time below which an unmeasured config replaces it."""
OTHER_LAYOUT = 0.94
"""At few tokens: share of the built-in layout's best time below which another layout replaces it."""
_MOST_CHOICES = 1 << 14
_SIXTEEN = (torch.float16, torch.bfloat16)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The candidate that runs a problem, and where it comes from. us: measured time of a call, else 0."""

    candidate: Candidate
    origin: Literal["map", "expected", "built in"]
    us: float = 0.0
    source: str = ""


Choices = dict[tuple[LinearProblem, Layout], Choice]
"""Choices for problems whose weights are in a layout."""


class Dispatcher:
    """The policy maps of one GPU. choices: cache of ``kept``."""

    def __init__(self, gpu: str, policies: Collection[Policy]) -> None:
        self.gpu = gpu
        mine = [policy.current() for policy in policies if policy.origin.gpu == gpu]
        self.policies = [policy for policy in mine if policy.points]
        self.hints = [policy for policy in policies if policy.why_hint(gpu) is not None]
        self.choices: Choices = {}

    def points(self, product: LinearProblem) -> tuple[Mapping[int, Point], Policy] | None:
        """The points of a layer by token count, from the first map that has it."""
        for policy in self.policies:
            for dtype in (product.dtype, *_SIXTEEN):
                found = policy.layers.get(key_of(replace(product, dtype=dtype)))
                if found and (dtype == product.dtype or product.activations.integer):
                    return found, policy
        return None

    def point(self, product: LinearProblem) -> tuple[int, Point, Policy] | None:
        """(token count, point, map) that decides for a problem: its own token count or the next larger one."""
        found = self.points(product)
        m = around(found[0], min(product.m, MOST_TOKENS))[1] if found else 0
        return (m, found[0][m], found[1]) if found and m else None

    def choose(self, product: LinearProblem, layouts: Collection[Layout] | None = None) -> Choice:
        """The choice for a problem with weights in ``layouts`` (default: any). Raises KernelError if none can run it.

        Never returns an illegal config, nor one measured to be slower than the built-in choice.
        """
        own = Choice(_builtin(product, layouts), "built in")
        if product.act_order or not product.aligned:
            return own
        tokens, few, kept = min(product.m, MOST_TOKENS), product.m <= INTERPOLATE_FROM, (own.candidate.layout,)
        for one in (product, *_alike(product, own.candidate.layout)):
            points, policy = self.points(one) or ({}, None)
            lower, upper = around(points, tokens)
            if policy is None or not upper:
                continue
            name = str(policy.path or "a map")
            if one is product and (few or upper == tokens):
                return _at(points[upper], replace(own, source=name), Ask(product, layouts))
            ends = [(replace(one, m=m), points[m]) for m in ((upper,) if few or not lower else (lower, upper))]
            counts = " and ".join(str(there.m) for there, _ in ends)
            here = replace(own, source=f"times of {one.scheme} {dtype_name(one.dtype)} at {counts} tokens ({name})")
            return _expected(ends, here, Ask(product, layouts) if one is product else Ask(product, kept))
        if product.m <= FEW_TOKENS:  # what wins there depends on the layer: borrowed, it cost steps up to 14 %
            return own
        for policy in self.policies:
            for there, point in policy.near(product, _NEAR):
                if not few or there.m == bucket(product.m):  # at few tokens, tiles are about as wide as all tokens
                    here = replace(own, source=f"times of {there} ({policy.path or 'a map'})")
                    found = _expected([(there, point)], here, Ask(product, kept))
                    if found is not here:
                        return found
        return own

    def kept(self, product: LinearProblem, layout: Layout) -> Choice:
        """``choose`` for one layout, cached."""
        like = product, layout
        found = self.choices.get(like)
        if found is None:
            if len(self.choices) >= _MOST_CHOICES:
                self.choices.clear()
            found = self.choices[like] = self.choose(product, (layout,))
        return found

    def layout(self, product: LinearProblem) -> Layout:
        """The layout to store a layer's weights in: the one with the least worst-case loss over measured counts."""
        usual = builtin_layout(product)
        known = self.points(product)
        losses: dict[Layout, dict[int, float]] = {}
        for m, point in known[0].items() if known else ():
            best = min((one.us for one in point.strategies.values()), default=point.default_us)
            losses.setdefault(usual, {})[m] = point.default_us / best
            for measured in point.strategies.values():
                candidate = Ask(replace(product, m=m)).legal(measured)
                if candidate is not None:
                    losses.setdefault(candidate.layout, {})[m] = measured.us / best

        def cost(layout: Layout) -> float:
            return max(losses[layout].get(m, float("inf")) for m in known[0])  # type: ignore[index]

        return min(losses, key=cost, default=usual)


@dataclass(frozen=True)
class Ask:
    """A problem, and the layouts that its config must respect."""

    product: LinearProblem
    layouts: Collection[Layout] | None = None

    def legal(self, measured: Measured) -> Candidate | None:
        """The candidate of a measured config, if it is in one of the layouts and legal here; else None."""
        try:
            found = measured.candidate(self.product)
        except KernelError as error:
            _logger.info("skipping a config of a policy map: %s", error)
            return None
        return found if self.layouts is None or found.layout in self.layouts else None


def _at(point: Point, own: Choice, ask: Ask) -> Choice:
    """A point's fastest config in these layouts; at few tokens, a layout other than the built-in must win clearly."""
    legal = [(ask.legal(measured), measured.us) for _, measured in point.ordered()]
    found = [Choice(one, "map", us, own.source) for one, us in legal if one is not None]
    usual = builtin_layout(ask.product)
    own = replace(own, us=point.default_us if own.candidate.layout is usual else 0.0)
    if not found:
        return own
    if ask.product.m > FEW_TOKENS or found[0].candidate.layout is usual:
        return found[0]
    near = next((one for one in found if one.candidate.layout is usual), own)
    return near if near.candidate.layout is usual and found[0].us >= OTHER_LAYOUT * near.us else found[0]


def _expected(ends: Collection[tuple[LinearProblem, Point]], own: Choice, ask: Ask) -> Choice:
    """The config expected to be fastest here, by its mean gain at similar problems; else the built-in choice."""
    kept, gains = own.candidate, dict[Candidate, list[float]]()
    for there, point in ends:
        for measured in point.strategies.values():
            one = ask.legal(measured)
            if one is not None and one != kept and preserves_pdl_overlap(ask.product, one):
                gain = expected_gain(one, kept, there, ask.product, measured.us / point.default_us)
                gains.setdefault(one, []).append(gain)
    mean = {one: sum(some) / len(some) for one, some in gains.items()}
    best = min(mean, key=mean.__getitem__, default=None)
    # Maps have no time of the built-in choice in other layouts, so there the best config is taken without a threshold.
    known = kept.layout is builtin_layout(ask.product)
    return own if best is None or (known and mean[best] > _CLEARLY) else Choice(best, "expected", 0.0, own.source)


_LIKE_SYM = ("sym", "asym", "min", "e2m1")


def _alike(product: LinearProblem, layout: Layout) -> Iterator[LinearProblem]:
    """Problems that the same kernels run in about the same time, most similar first.

    Tiles multiply bytes at any activation width; the 16-bit dtypes differ only in dequantization; narrower weights,
    other groups and zero points take about as long as the maps' 4 symmetric bits.
    """
    w, x = product.weights, product.activations
    formats = [w]
    if layout is Layout.tiles_a8 and x.integer and x.code == "sym":
        product = replace(product, activations=ActivationFormat(8, "sym"))
    few = product.m <= FEW_TOKENS and not x.quantized  # there built-in kernels depend on the weights' own bits
    plain = w.bits <= 4 and not w.sparse and w.code in _LIKE_SYM and (w.group is None) == x.quantized
    if plain and not few and layout is not Layout.planes:
        formats.append(WeightFormat(4, "sym", None if x.quantized else 128))
    for weights in dict.fromkeys(formats):
        for dtype in (product.dtype,) if x.quantized else dict.fromkeys((product.dtype, *_SIXTEEN)):
            yield replace(product, weights=weights, dtype=dtype)


def _builtin(product: LinearProblem, layouts: Collection[Layout] | None) -> Candidate:
    if layouts is None or builtin_layout(product) in layouts:
        return builtin(product)
    reasons = []
    for layout in layouts:
        try:
            return builtin(product, layout)
        except KernelError as error:
            reasons.append(str(error))
    raise KernelError("; ".join(reasons) or f"no layout was given for {product}")


# -------- the process's dispatchers

_given: list[Policy] = []
_dispatchers: dict[str, Dispatcher] = {}
_told: set[str] = set()
_generation = 0
_decisions: list[dict[Any, Any]] = []


def dispatcher(gpu: str) -> Dispatcher:
    """The dispatcher of a GPU, by name; its maps are read at the first call."""
    found = _dispatchers.get(gpu)
    if found is None:
        found = _dispatchers[gpu] = Dispatcher(gpu, [*_given, *_files(gpu)])
        for policy in found.hints:
            if policy.origin.gpu == gpu or policy in _given:
                part = "is in part" if policy.origin.gpu == gpu and policy.current().points else "is"
                tell(
                    f"{policy.path} {part} only a hint for searches: {policy.why_hint(gpu)}; "
                    "built-in choices run there until `anybit tune` has measured"
                )
    return found


def _files(gpu: str) -> list[Policy]:
    paths = (own_file(gpu), SHIPPED / file_name(gpu))  # lexists: warn about dangling links
    return [found for path in paths if os.path.lexists(path) and (found := usable(path))]


def use(*paths: str | Path) -> None:
    """Use these maps before all others; without arguments, drop those given and reread the files at the next call.

    Prepared layers keep their layout, and CUDA graphs what they captured; all other choices are made again. Files that
    are not policy maps are ignored with a warning.
    """
    global _generation
    _generation += 1
    for decided in _decisions:
        decided.clear()
    _dispatchers.clear()
    _given.clear()
    _given.extend(found for path in paths if (found := usable(Path(path))))


def given() -> bool:
    """Whether maps were given to ``use``."""
    return bool(_given)


def forget_with_maps(decided: dict[Any, Any]) -> None:
    """Register a cache of decisions, to be cleared by ``use``."""
    _decisions.append(decided)


def generation() -> int:
    """A number that changes with every ``use``."""
    return _generation


def tell(message: str) -> None:
    """Warn, once per process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, stacklevel=3)
