"""Which config runs a linear problem: looked up in the maps of its GPU, decided once, and kept by whoever asked.

Maps are found in this order: those given to ``use``, the user's own for this GPU (``policy.own_file``), the shipped
one. The rules, one by one: docs/tuning.md.
"""

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from anybit.errors import KernelError, dtype_name
from anybit.scheme import ActivationFormat, WeightFormat
from anybit.tune.interpolate import around, between, expected_gain
from anybit.tune.policy import SHIPPED, Measured, Point, Policy, file_name, key_of, own_file, usable
from anybit.tune.registry import INTERPOLATE_FROM, MOST_TOKENS, Layout, LinearProblem, bucket
from anybit.tune.space import (
    FEW_TOKENS,
    VENDOR,
    Candidate,
    builtin,
    builtin_layout,
    preserves_pdl_overlap,
    refuse_unknown,
)

_NEAR = 1.0
"""How far, in powers of two, a point may be to stand for a layer that was not measured."""
_CLEARLY = 0.97
"""What a config must take of the built-in choice's time to run where only something alike was measured."""
_BETWEEN = 0.98
"""What it must be expected to take to run between two measured token counts of its own layer."""
OTHER_LAYOUT = 0.94
"""Of few tokens: what the best of another layout must take of the best of the built-in one."""
_WORTH_TWO = 1.03
"""Two layouts are kept where one of them alone would cost more than this at some token count."""
_PLANES_FROM = 5
"""Tokens of w4a4 from which planes are as fast as tiles in the steps of fused models, or faster."""
_SIXTEEN = (torch.float16, torch.bfloat16)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What runs a problem, and where that was found.

    us: of a call where it was measured, else 0.  gain: the share of the built-in choice's time that it takes.
    """

    candidate: Candidate
    origin: Literal["map", "between", "alike", "built in"]
    us: float = 0.0
    source: str = ""
    gain: float = 1.0


class Dispatcher:
    """The maps of one GPU."""

    def __init__(self, gpu: str, policies: Collection[Policy]) -> None:
        self.gpu = gpu
        mine = [policy.current() for policy in policies if policy.origin.foreign(gpu) is None]
        self.policies = [policy for policy in mine if policy.points]
        self.hints = [policy for policy in policies if policy.why_hint(gpu) is not None]

    def points(self, product: LinearProblem) -> tuple[Mapping[int, Point], Policy] | None:
        """What the first map that knows a layer measured of it, by token count."""
        for policy in self.policies:
            for dtype in (product.dtype, *_SIXTEEN):
                found = policy.layers.get(key_of(replace(product, dtype=dtype)))
                if found and (dtype == product.dtype or product.activations.integer):
                    return found, policy
        return None

    def point(self, product: LinearProblem) -> tuple[int, Point, Policy] | None:
        """The point that decides for a problem, and its token count: its own or the next one up."""
        found = self.points(product)
        m = around(found[0], min(product.m, MOST_TOKENS))[1] if found else 0
        return (m, found[0][m], found[1]) if found and m else None

    def choose(
        self, product: LinearProblem, layouts: Collection[Layout] | None = None, allow: Collection[str] = ()
    ) -> Choice:
        """What runs a problem whose weights lie in ``layouts`` (by default in any). Raises KernelError if nothing can.

        Never a config that is illegal, and never one that was measured to be slower than the built-in choice.
        """
        own = Choice(_builtin(product, layouts), "built in")
        if product.act_order or not (product.aligned or product.activations.quantized):
            return own
        measured = self._measured(product, own, layouts, allow)
        if measured is not None:
            return measured
        for there in _alike(product, own.candidate):
            found = self._measured(there, own, (own.candidate.layout,), ())
            if found is not None:
                return _moved(product, own, there, found)
        return self._nearby(product, own) or own

    def _measured(
        self, product: LinearProblem, own: Choice, layouts: Collection[Layout] | None, allow: Collection[str]
    ) -> Choice | None:
        """What times of this very layer decide, at the problem's token count or at those around it."""
        known = self.points(product)
        if known is None:
            return None
        points, policy = known
        tokens, name = min(product.m, MOST_TOKENS), str(policy.path or "a map")
        lower, upper = around(points, tokens)
        if not upper:
            return None
        if tokens <= INTERPOLATE_FROM or upper == tokens:
            return _at(product, points[upper], own, layouts, allow, name)
        share, best = between(product, points, own.candidate, lambda one: _legal(one, product, layouts, allow))
        source = f"times at {f'{lower} and {upper}' if lower else upper} tokens ({name})"
        if best is None or share > _BETWEEN:
            return replace(own, source=source)
        return Choice(best, "between", 0.0, source, share)

    def _nearby(self, product: LinearProblem, own: Choice) -> Choice | None:
        """A config that won clearly in a layer of nearly the same size, and is expected to here."""
        if product.m <= FEW_TOKENS and not product.activations.quantized:
            return None
        for policy in self.policies:
            for _, key, m, point in policy.near(product, _NEAR):
                if product.m <= INTERPOLATE_FROM and m != bucket(product.m):
                    continue  # tiles are about as wide as all tokens
                there = replace(product, m=m, n=key[2], k=key[3], columns=0)
                found = _at(
                    there, point, Choice(own.candidate, "built in"), (own.candidate.layout,), (), str(policy.path)
                )
                moved = _moved(product, own, there, found)
                if moved is not own:
                    return moved
        return None

    def in_fused(self, product: LinearProblem, layouts: Collection[Layout]) -> Collection[Layout]:
        """Which of its layouts a layer of a fused block runs: of few tokens with coded inputs one for all of a block.

        That is the built-in layout, or bit planes in w4a4 where these are as fast. Times of single products do not
        show it: where one layer ran in another layout than its neighbours, steps took up to 3.5 % longer.
        """
        w, x = product.weights, product.activations
        if product.m > FEW_TOKENS or not x.quantized:
            return layouts
        planes = x.integer and (w.bits, x.bits) == (4, 4) and product.m >= _PLANES_FROM and Layout.planes in layouts
        usual = Layout.planes if planes else builtin_layout(product)
        return (usual,) if usual in layouts else layouts

    def layouts(self, product: LinearProblem, allow: Collection[str] = (), most: int = 2) -> tuple[Layout, ...]:
        """How a layer's weights are to lie: in the layout that costs least where it loses most, or in two.

        Two where each wins by more than 3 % at some token count.  most: of how many layouts.
        """
        usual = builtin_layout(product)
        known = self.points(product)
        losses: dict[Layout, dict[int, float]] = {}
        for m, point in known[0].items() if known else ():
            best = min((one.us for one in point.strategies.values()), default=point.default_us)
            losses.setdefault(usual, {})[m] = point.default_us / best
            for measured in point.strategies.values():
                candidate = _legal(measured, replace(product, m=m), None, allow)
                if candidate is not None:
                    losses.setdefault(candidate.layout, {})[m] = measured.us / best
        if not losses:
            return (usual,)

        def cost(kept: tuple[Layout, ...]) -> float:
            return max(min(losses[layout].get(m, float("inf")) for layout in kept) for m in known[0])  # type: ignore[index]

        alone = min(((layout,) for layout in losses), key=cost)
        if most < 2 or cost(alone) <= _WORTH_TWO:
            return alone
        pairs = [(one, two) for one in losses for two in losses if one.value < two.value]
        return min(pairs, key=cost) if pairs else alone


def _at(
    product: LinearProblem,
    point: Point,
    own: Choice,
    layouts: Collection[Layout] | None,
    allow: Collection[str],
    name: str,
) -> Choice:
    """What a point decides: its fastest config in these layouts; of few tokens another layout must win clearly."""
    found: list[Choice] = []
    for _, measured in point.ordered():
        candidate = _legal(measured, product, layouts, allow)
        if candidate is not None:
            found.append(Choice(candidate, "map", measured.us, name, measured.us / point.default_us))
    usual = builtin_layout(product)
    if not found:
        return replace(own, us=point.default_us if own.candidate.layout is usual else 0.0, source=name)
    if product.m > FEW_TOKENS or found[0].candidate.layout is usual:
        return found[0]
    near = next((one for one in found if one.candidate.layout is usual), replace(own, us=point.default_us, source=name))
    kept = near.candidate.layout is usual and found[0].us >= OTHER_LAYOUT * near.us
    return near if kept and (layouts is None or usual in layouts) else found[0]


def _moved(product: LinearProblem, own: Choice, there: LinearProblem, found: Choice) -> Choice:
    """What was found for a problem like this one, if its kernel is built in here, too, and it is expected to win."""
    if found.origin == "built in" or found.candidate.kernel != own.candidate.kernel:
        return own
    candidate = _legal(Measured.of(found.candidate, there, 0.0), product, (own.candidate.layout,), ())
    if candidate is None or candidate == own.candidate or not preserves_pdl_overlap(product, candidate):
        return own
    gain = expected_gain(candidate, own.candidate, there, product, found.gain)
    if gain is None or gain > _CLEARLY:
        return own
    return Choice(candidate, "alike", 0.0, f"times of {there} {dtype_name(there.dtype)} ({found.source})", gain)


def _alike(product: LinearProblem, own: Candidate) -> Iterator[LinearProblem]:
    """Problems that the same kernels run in about the same time, the likest first.

    Tiles multiply bytes, whatever activations were rounded to; 16-bit types differ in how codes become values alone;
    and narrower weights, other groups and zero points take about as long as the maps' 4 symmetric bits.
    """
    w, x = product.weights, product.activations
    tiles = own.layout in (Layout.tiles_a8, Layout.tiles_a16)
    if own.layout is Layout.tiles_a8 and x.integer and x.code == "sym" and x.bits < 8:
        product = replace(product, activations=ActivationFormat(8, "sym"))
        yield product
    dtypes = (product.dtype,) if x.quantized else (product.dtype, *(one for one in _SIXTEEN if one != product.dtype))
    if not x.quantized:
        yield replace(product, dtype=dtypes[1])
    few = product.m <= FEW_TOKENS and not x.quantized  # where built-in kernels follow the weights' own bits
    if few or not tiles or w.bits > 4 or w.sparse or w.code not in ("sym", "asym") or (w.group is None) != x.quantized:
        return
    mapped = WeightFormat(4, "sym", None if x.quantized else 128)
    if mapped != w:
        yield from (replace(product, weights=mapped, dtype=dtype) for dtype in dtypes)


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


def _legal(
    measured: Measured, product: LinearProblem, layouts: Collection[Layout] | None, allow: Collection[str]
) -> Candidate | None:
    """The candidate that a point names, if it is allowed, in one of the layouts, and legal for this problem."""
    if (measured.activations and "a8" not in allow) or measured.kernel == VENDOR:  # which is compared, not run
        return None
    try:
        found = measured.candidate(product)
    except KernelError as error:
        _logger.info("a policy map names a config that is passed over: %s", error)
        return None
    return found if layouts is None or found.layout in layouts else None


# -------- the process's dispatchers

_given: list[Policy] = []
_dispatchers: dict[str, Dispatcher] = {}
_allowed: set[str] = set()
_told: set[str] = set()
_generation = 0
_decisions: list[dict[Any, Any]] = []


def dispatcher(gpu: str) -> Dispatcher:
    """The dispatcher of a GPU by its name; its maps are read at the first call."""
    found = _dispatchers.get(gpu)
    if found is None:
        found = _dispatchers[gpu] = Dispatcher(gpu, [*_given, *_files(gpu)])
        for policy in found.hints:
            if policy.origin.gpu == gpu or policy in _given:
                whole = policy.origin.foreign(gpu) is not None or not policy.current().points
                part = "is" if whole else "is in part"
                tell(
                    f"{policy.path} {part} only a hint for searches: {policy.why_hint(gpu)}; "
                    "built-in choices run there until `anybit tune` has measured"
                )
    return found


def _files(gpu: str) -> Iterator[Policy]:
    for path in (own_file(gpu), SHIPPED / file_name(gpu)):
        with contextlib.suppress(FileNotFoundError):
            try:
                path.lstat()  # a link that leads nowhere is there, and is named
            except NotADirectoryError:
                continue
            except PermissionError:
                pass  # what is in the way is named, too
            policy = usable(path)
            if policy is not None:
                yield policy


def use(*paths: str | Path) -> None:
    """Use these maps before all others; without arguments, forget those given, and read files again at the next call.

    Layers that are prepared already keep their layout, and CUDA graphs what they were captured with; every other choice
    is made anew. Files that are not maps are named in a warning and ignored.
    """
    global _generation
    _generation += 1
    for decided in _decisions:
        decided.clear()
    _dispatchers.clear()
    _given.clear()
    for path in paths:
        policy = usable(Path(path))
        if policy is not None:
            _given.append(policy)


def forget_with_maps(decided: dict[Any, Any]) -> None:
    """Clear a memory of what dispatchers decided whenever other maps are to be obeyed (``use``)."""
    _decisions.append(decided)


def generation() -> int:
    """A number that changes whenever maps are read again."""
    return _generation


def allow(*words: str) -> None:
    """Allow what changes results or memory (``space.ALLOWANCES``); none: nothing.

    Layers that are prepared from now on may be kept for it; those that are kept for it already do as it says from
    their next call on, but for CUDA graphs.
    """
    refuse_unknown(words)
    _allowed.clear()
    _allowed.update(words)
    for decided in _decisions:
        decided.clear()


def allowed() -> frozenset[str]:
    """What is allowed."""
    return frozenset(_allowed)


def tell(message: str) -> None:
    """Warn, once a process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, stacklevel=3)
