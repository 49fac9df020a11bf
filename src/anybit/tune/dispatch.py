"""Choose the config that runs a product: look it up in the GPU's maps, once for each layer and token count.

Maps are found in this order: those given to ``use``, the user's own for this GPU (``policy.own_file``), the shipped
one. A point for exactly this product decides, of few tokens where something won clearly; between two token counts of
its layer what is expected to be fastest by both; else what was measured of kernels alike (other activations, the other
16-bit type, other codes), or nearby, where it won clearly and is legal here; else the built-in choice. The rules one
by one: docs/tuning.md.
"""

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from anybit.errors import KernelError, dtype_name
from anybit.scheme import ActivationFormat, WeightFormat
from anybit.tune.interpolate import of_its_like, scaled
from anybit.tune.policy import SHIPPED, Measured, Point, Policy, file_name, key_of, own_file, usable
from anybit.tune.registry import (
    BETWEEN_FROM,
    FAMILIES,
    MOST_TOKENS,
    STEPS,
    Layout,
    LinearProblem,
    bucket,
    power_of_two,
    step,
)
from anybit.tune.space import (
    FEW_TOKENS,
    VENDOR,
    Candidate,
    builtin,
    builtin_layout,
    leaves_room,
    refuse_unknown,
)

_NEAR = 1.5
"""How far, in powers of two, a point may be to stand for a product that was not measured."""
_NEAR_ALONE = 1.0
"""The same where a family has no estimate: of seven bit-plane configs from farther away six took longer than built-in
choices, up to 1.45 times, and of six from nearer one did, 1.03 times."""
_CLEARLY, _FARTHER = 0.97, 0.1
"""What a config must take of the built-in choice's time to be used where it was not measured: there, and, by what is
expected of both, here, less so much for each power of two that the point is away."""
_LIKELY = 0.98
"""What a config must be expected to take of the built-in choice's time to be used between two measured token counts."""
_CLEARLY_FEW, _CLEARLY_FEW_US, _OTHER_LAYOUT = 0.95, 1.0, 0.94
"""Of few tokens, what a config must take of the built-in one's time to be used instead, or how many microseconds less;
and of the time of the best in the built-in layout to be used in another: there products hide behind their neighbours,
and what one of them takes in a chain of itself is off by 0.8 us of some 10 (docs/notes/2026-11-24-tuning-check.md)."""
_OF_MORE_ROWS, _FEW_ROWS, _BOXES_FROM = 0.88, 8, 48
"""What a config must take of the built-in choice's time where it was timed with more of its tile's rows, more than so
many of which are not there now; wider tiles are loaded in boxes, which leave such rows out."""
_WORTH_TWO = 1.03
"""Two layouts are kept where one of them alone would cost more than this at some token count."""
_EVEN, _EVEN_FROM = (4, 4), 5
"""Bits of weights and activations (w4a4), and tokens, from which planes are as fast as tiles or faster to
``FEW_TOKENS``: steps of seven models with 8 took 0.96 to 1.02 times as long with planes, 0.99 in the mean, and with 4
tokens 0.99 to 1.03."""
_SIXTEEN = (torch.float16, torch.bfloat16)
_BYTE = ActivationFormat(8, "sym")
_MAPPED = WeightFormat(4, "sym", 128)
"""The weights whose points stand for those of other codes."""
_ORIGINS = Literal["map", "between", "nearest", "built in"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Which config runs a product, and which rule chose it.

    us: of a call where it was measured, else 0.  kept: why it was not replaced by the fastest that was measured.
    """

    candidate: Candidate
    origin: _ORIGINS
    us: float = 0.0
    source: str = ""
    kept: str = ""


class Dispatcher:
    """The maps of one GPU."""

    def __init__(self, gpu: str, policies: Collection[Policy]) -> None:
        self.gpu = gpu
        mine = [policy.current() for policy in policies if policy.origin.foreign(gpu) is None]
        self.policies = [policy for policy in mine if policy.points]
        self.hints = [policy for policy in policies if policy.why_hint(gpu) is not None]

    def point(self, product: LinearProblem) -> tuple[int, Point, Policy] | None:
        """What was measured for this product, and at which token count: that of the grid which stands for its own.

        Beyond ``MOST_TOKENS`` the one of these.
        """
        # A point on the way to the next power of two holds where its built-in choice is the product's own.
        least, most = min(step(product.m), MOST_TOKENS), min(power_of_two(product.m), MOST_TOKENS)
        for policy in self.policies:
            for m in (m for m in STEPS if least <= m <= most):
                for dtype in _alike(product):
                    found = policy.exact(replace(product, m=m, dtype=dtype))
                    if found is not None:
                        return m, found, policy
        return None

    def choose(
        self, product: LinearProblem, layouts: Collection[Layout] | None = None, allow: Collection[str] = ()
    ) -> Choice:
        """What runs a product whose weights lie in ``layouts`` (by default in any). Raises KernelError if nothing can.

        Never a config that is not legal, and never one that was measured to be slower than the built-in choice.
        """
        if product.act_order or not (product.aligned or product.activations.quantized):
            return Choice(_builtin(product, layouts), "built in")
        measured = self._measured(product, layouts, allow)
        if measured is not None:
            return measured
        own = _builtin(product, layouts)
        alike = self._as_eight_bits(product, own) or self._in_the_other_type(product, own, layouts)
        if alike is not None:
            return alike
        if product.m <= FEW_TOKENS and not product.activations.quantized:
            return Choice(own, "built in")  # chosen for each layer as its own bits of weights want it (packed_few)
        alike = self._with_other_codes(product, own, layouts)
        if alike is not None:
            return alike
        estimated = own.kernel in FAMILIES and hasattr(FAMILIES[own.kernel].module, "estimate")
        for policy in self.policies:
            for distance, key, m, point in policy.near(product, _NEAR if estimated else _NEAR_ALONE):
                if product.m <= BETWEEN_FROM and m != bucket(product.m):
                    continue  # tiles are about as wide as all tokens: those for 64 took 1.26 times as long for 46
                there = replace(product, m=m, n=key[2], k=key[3], columns=0)
                choice = _nearest(product, own, there, point, layouts, _CLEARLY - _FARTHER * distance)
                if choice is not None and holds(there, point):
                    return replace(choice, source=f"{choice.source} ({m} x {key[2]} x {key[3]}, {policy.path})")
        return Choice(own, "built in")

    def _measured(
        self, product: LinearProblem, layouts: Collection[Layout] | None, allow: Collection[str]
    ) -> Choice | None:
        """What times of this very layer decide, at the product's token count or at those around it."""
        between = self._between(product, layouts, allow)
        if between is not None:
            return between
        found = self.point(product)
        if found is None or not holds(product, found[1]):
            return None
        m, point, policy = found
        choice = _best(product, point, policy, layouts, allow)
        if choice is None:
            return None
        if _lacks_rows(product, choice.candidate, m) and choice.us > _OF_MORE_ROWS * point.default_us:
            own = _builtin(product, layouts)
            return Choice(own, "built in") if _same(own, product, replace(product, m=m)) else choice
        return _beside_others(product, choice, point)

    def _between(
        self, product: LinearProblem, layouts: Collection[Layout] | None, allow: Collection[str]
    ) -> Choice | None:
        """What is expected to be fastest at a token count between two that were measured; None where none decides."""
        if not BETWEEN_FROM < product.m < MOST_TOKENS:
            return None
        for policy in self.policies:
            for dtype in _alike(product):
                points = policy.layers.get(key_of(replace(product, dtype=dtype)), {})
                if step(product.m) in points:
                    return None  # which decides
                lower = max((m for m in points if 2 * m >= product.m > m), default=0)
                upper = min((m for m in points if product.m < m <= power_of_two(product.m)), default=0)
                if not upper:
                    continue
                expected: dict[Candidate, list[float]] = {}
                own = _builtin(product, layouts)
                owns: list[float] = []
                for m in (m for m in (upper, lower) if m):
                    there, point = replace(product, m=m), points[m]
                    if not holds(there, point):
                        continue
                    default = () if point.default is None else (point.default,)
                    for measured in default:
                        candidate = _legal(measured, there, allow)
                        us = of_its_like(candidate, measured.us, there, own, product) if candidate else None
                        owns += [] if us is None else [us]
                    for measured in dict.fromkeys((*point.strategies.values(), *point.also, *default)):
                        candidate = _legal(measured, product, allow)
                        if candidate is None or not (layouts is None or candidate.layout in layouts):
                            continue
                        us = scaled(candidate, measured.us, there, product)
                        if us is not None:
                            expected.setdefault(candidate, []).append(us)
                if expected:
                    mean = {candidate: sum(found) / len(found) for candidate, found in expected.items()}
                    best = min(mean, key=mean.__getitem__)
                    if owns and mean[best] > _LIKELY * sum(owns) / len(owns):
                        return Choice(own, "built in")
                    counts = f"{lower} and {upper}" if lower else f"{upper}"
                    source = f"expected to be fastest, by times at {counts} tokens ({policy.path or 'a map'})"
                    return Choice(best, "between", 0.0, source)
        return None

    def _as_eight_bits(self, product: LinearProblem, own: Candidate) -> Choice | None:
        """What runs the same weights with 8-bit activations where that was measured, and fewer bits run on tiles, too.

        Tiles multiply bytes: the kernels are the same, whatever the bytes were rounded to.
        """
        x = product.activations
        if own.layout is not Layout.tiles_a8 or not x.integer or x.code != "sym" or x.bits >= _BYTE.bits:
            return None
        choice = self.choose(replace(product, activations=_BYTE), (own.layout,))
        if choice.origin not in ("map", "between"):
            return None
        try:
            candidate = Measured.of(choice.candidate, replace(product, activations=_BYTE), 0.0).candidate(product)
        except KernelError:
            return None
        return Choice(
            candidate, "nearest", 0.0, f"measured with 8-bit activations, by the same kernels ({choice.source})"
        )

    def _in_the_other_type(
        self, product: LinearProblem, own: Candidate, layouts: Collection[Layout] | None
    ) -> Choice | None:
        """What runs the same weights with the other of the 16-bit types, where it won clearly with that.

        The kernels differ in how codes are widened alone; where the built-in choices differ, that decides nothing.
        """
        if product.activations.quantized:
            return None
        there = replace(product, dtype=next(dtype for dtype in _SIXTEEN if dtype != product.dtype))
        if not _same(own, product, there):
            return None
        return self._by_its_like(product, own, there, layouts, dtype_name(there.dtype))

    def _with_other_codes(
        self, product: LinearProblem, own: Candidate, layouts: Collection[Layout] | None
    ) -> Choice | None:
        """What runs the layer with the weights that maps hold, 4 symmetric bits (in groups of 128), where it won there
        clearly: narrower codes take as long to widen, and with 16-bit activations groups and zeros hardly longer.
        """
        w, quantized = product.weights, product.activations.quantized
        if own.layout not in (Layout.tiles_a8, Layout.tiles_a16) or w.bits > _MAPPED.bits or w.sparse:
            return None
        if w.code not in ("sym", "asym") or (quantized and w.group is not None) or (not quantized and w.group is None):
            return None
        mapped = replace(_MAPPED, group=None if quantized else _MAPPED.group)
        if w == mapped:
            return None
        for dtype in (product.dtype,) if quantized else (product.dtype, torch.float16):
            there = replace(product, weights=mapped, dtype=dtype)
            choice = self._by_its_like(product, own, there, layouts, str(there.scheme))
            if choice is not None:
                return choice
        return None

    def _by_its_like(
        self,
        product: LinearProblem,
        own: Candidate,
        there: LinearProblem,
        layouts: Collection[Layout] | None,
        name: str,
    ) -> Choice | None:
        """What runs ``there``, a product of the same kernels, where it won clearly and is expected to here."""
        choice = self._measured(there, layouts, ())
        if choice is None or choice.candidate.kernel != own.kernel:
            return None
        if choice.origin == "built in":  # expected to be fastest between two token counts
            return Choice(own, "built in")
        found = self.point(there) if choice.origin == "map" else None  # else it was expected to win
        gain = choice.us / found[1].default_us if found is not None else _CLEARLY
        candidate = _legal(Measured.of(choice.candidate, there, 0.0), product, ())
        if candidate is None or gain * _moved(product, own, there, candidate) > _CLEARLY:
            return None
        return Choice(candidate, "nearest", 0.0, f"measured in {name}, by the same kernels ({choice.source})")

    def in_fused(self, product: LinearProblem, layouts: Collection[Layout]) -> Collection[Layout]:
        """Which of its layouts a product of a fused layer may run: of few tokens and coded inputs the built-in one, or
        bit planes where these are as fast.

        A map's times are of products that quantize for themselves, one after another. In a fused layer the kernel
        before does that, and where one product of a layer ran in another layout than its neighbours, by a gain of 6 to
        21 % in the map, steps took up to 3.5 % longer, and 1.4 % less at most (docs/notes/2026-11-24-tuning-check.md).
        """
        w, x = product.weights, product.activations
        if product.m > FEW_TOKENS or not x.quantized:
            return layouts
        even = x.integer and (w.bits, x.bits) == _EVEN and product.m >= _EVEN_FROM
        usual = Layout.planes if even and Layout.planes in layouts else builtin_layout(product)
        return (usual,) if usual in layouts else layouts

    def layouts(self, product: LinearProblem, allow: Collection[str] = (), most: int = 2) -> tuple[Layout, ...]:
        """How a layer's weights are to lie: in one layout, or in two where each wins by much at some token count.

        most: 1 for the one layout that costs least where it loses most.  ``product``: of any token count.
        Without a map that knows the layer: the built-in layout.
        """
        times: dict[Layout, dict[int, float]] = {}
        for policy in self.policies:
            keys = [key_of(replace(product, dtype=dtype)) for dtype in (product.dtype, *_SIXTEEN)]
            points = next((policy.layers[key] for key in keys if key in policy.layers), {})
            for m, point in points.items():
                for measured in point.strategies.values():
                    candidate = _legal(measured, replace(product, m=m), allow)
                    if candidate is not None:
                        mine = times.setdefault(candidate.layout, {})
                        mine[m] = min(measured.us, mine.get(m, float("inf")))
            if times:
                break
        usual = builtin_layout(product)
        if not times:
            return (usual,)
        tokens = sorted({m for mine in times.values() for m in mine})

        def us(kept: Collection[Layout], m: int) -> float:
            """About what `choose` has run of these: of few tokens what is built in, where it is not far behind."""
            best = min((times[layout][m] for layout in kept if m in times[layout]), default=float("inf"))
            own = times[usual].get(m, best) if m <= FEW_TOKENS and usual in kept and usual in times else best
            return own if best > _OTHER_LAYOUT * own else best

        def cost(kept: tuple[Layout, ...]) -> float:
            """The most that keeping these alone costs at a token count, against keeping all."""
            return max(1.0, *(us(kept, m) / us(times, m) for m in tokens))

        alone = min(((layout,) for layout in times), key=cost)
        if most < 2 or cost(alone) <= _WORTH_TWO:
            return alone
        pairs = [(one, two) for one in times for two in times if one.value < two.value]
        return min(pairs, key=cost) if pairs else alone


def _alike(product: LinearProblem) -> tuple[torch.dtype, ...]:
    """The dtypes whose times are this product's: where integers are multiplied, only the results are written anew."""
    return (product.dtype, *_SIXTEEN) if product.activations.integer else (product.dtype,)


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


def _legal(measured: Measured, product: LinearProblem, allow: Collection[str]) -> Candidate | None:
    """The candidate that a point names, if it is allowed and legal for this product."""
    if (measured.activations and "a8" not in allow) or measured.kernel == VENDOR:  # which is compared, not run
        return None
    try:
        return measured.candidate(product)
    except KernelError as error:
        _logger.info("a policy map names a config that is passed over: %s", error)
        return None


def holds(product: LinearProblem, point: Point) -> bool:
    """Whether the built-in choice is the one that a point was measured beside: another may be faster than all of it."""
    if point.default is None:
        return True
    own = builtin(product)
    return own.kernel == point.default.kernel and own.fields == dict(point.default.fields)


def _same(own: Candidate, product: LinearProblem, there: LinearProblem) -> bool:
    """Whether the built-in choice of another product is the config that one has here."""
    try:
        found = builtin(there, own.layout)
        return Measured.of(found, there, 0.0).candidate(product) == own
    except KernelError:
        return False


def _best(
    product: LinearProblem, point: Point, policy: Policy, layouts: Collection[Layout] | None, allow: Collection[str]
) -> Choice | None:
    found = []
    for _, measured in point.ordered():
        candidate = _legal(measured, product, allow)
        if candidate is not None and (layouts is None or candidate.layout in layouts):
            found.append(Choice(candidate, "map", measured.us, str(policy.path or "a map")))
    if not found:
        return None
    best = found[0]
    if product.m > FEW_TOKENS:
        return best
    usual = builtin_layout(product)
    own = None if point.default is None else _legal(point.default, product, allow)
    near = next((choice for choice in found if choice.candidate.layout is usual), None)
    kept = f"the fastest of the built-in layout ({usual.value}), and no other layout was clearly faster"
    clearly_us = max(_CLEARLY_FEW * point.default_us, point.default_us - _CLEARLY_FEW_US)
    behind = near is None or near.us >= clearly_us
    if behind and own is not None and (layouts is None or own.layout in layouts):
        near = replace(best, candidate=own, us=point.default_us)
        kept = "the built-in choice, and nothing was clearly faster"
    if near is None or (best.candidate.layout is not usual and best.us < _OTHER_LAYOUT * near.us):
        return best
    return near if near.candidate == best.candidate else replace(near, kept=kept)


def _lacks_rows(product: LinearProblem, candidate: Candidate, m: int) -> bool:
    """Whether many rows of a tile are not there for a product, which were for the ``m`` tokens that it was timed with:
    a tile of 32 tokens takes 11.3 us with 24, 13.0 with 20 and 14.2 with 17 (w4a16g128, 4096 x 14336).
    """
    tile = getattr(candidate.config, "tokens", 0)
    few = candidate.kernel == "sm90_packed_gemm" and tile < _BOXES_FROM
    return few and product.m < m and tile - product.m > _FEW_ROWS


def _beside_others(product: LinearProblem, choice: Choice, point: Point) -> Choice:
    """The built-in choice of the layout, where what was chosen leaves less room to others (``leaves_room``)."""
    chosen = choice.candidate
    if leaves_room(product, chosen):
        return choice
    try:
        own = builtin(replace(product, activations=chosen.activations), chosen.layout)
    except KernelError:
        return choice
    if own == chosen:
        return choice
    what = "config of" if own.kernel == chosen.kernel else "choice,"
    kept = f"the built-in {what} {own.kernel}, since the one that won leaves less room to the kernels after it"
    return replace(choice, candidate=own, us=point.default_us if own == builtin(product) else 0.0, kept=kept)


def _nearest(
    product: LinearProblem,
    own: Candidate,
    there: LinearProblem,
    point: Point,
    layouts: Collection[Layout] | None,
    most: float,
) -> Choice | None:
    """A config of the built-in choice's kernel that won clearly at a point nearby, and is expected to win here.

    most: of the built-in choice's time, by what was measured there and what is expected here and there.
    """
    for _, measured in point.ordered():
        gain = measured.us / point.default_us
        if gain > most:
            return None
        candidate = _legal(measured, product, ())
        if candidate is None or candidate.layout is not own.layout or candidate.kernel != own.kernel:
            continue
        if not leaves_room(product, candidate):
            continue
        if (layouts is None or candidate.layout in layouts) and gain * _moved(product, own, there, candidate) <= most:
            return Choice(candidate, "nearest", 0.0, "measured nearby")
    return None


def _moved(product: LinearProblem, own: Candidate, there: LinearProblem, candidate: Candidate) -> float:
    """How much less a config gains over the built-in choice here than there, by its family's estimate: 1, no less.

    Of 26 configs that had won at points up to 1.6 powers of two away, 12 lost in layers that no map held, by up to
    1.9 times; where there was an estimate, it told all of them.
    """
    family = FAMILIES[own.kernel]
    try:
        base = builtin(there, own.layout)
        if base.kernel != own.kernel:
            return 1.0
        here = [family.estimate(product, one.config) for one in (candidate, own)]
        other = [family.estimate(there, one.config) for one in (candidate, base)]
    except KernelError:
        return float("inf")
    if any(us is None for us in (*here, *other)):
        return 1.0
    return (here[0] / here[1]) / (other[0] / other[1])  # type: ignore[operator]


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
