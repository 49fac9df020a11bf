"""The space of a problem: every strategy, every family's legal configs, and what is excluded and why, in sentences.

Legality comes from the families' ``why_not`` alone. APT-LLM's relation among block widths, warps and tiles (section
V-B) is part of it: a config states the tile and its warps, and what a warp does follows.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybit import dpr
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Target
from anybit.kernels.gemm import bitplane, heuristics, repack, sm90_packed_gemm
from anybit.kernels.gemm.bitplane_problem import half_bytes
from anybit.scheme import ActivationFormat
from anybit.tune.registry import (
    FAMILIES,
    INTERPOLATE_FROM,
    MOST_TOKENS,
    FieldValue,
    KernelFamily,
    Layout,
    LinearProblem,
    bit_planes,
    bucket,
    few_tokens,
    power_of_two,
    quantizer,
    tiles_of,
)

VENDOR = "cuBLAS"
"""The strategy, and the kernel, that is compared and never run."""
STRATEGIES = ("bitwise", "padding to int8", "padding to fp8", "dequantize", "split", VENDOR)
"""Ways of carrying a product out (ADAngel, section 4.3), and the vendor's product over weights dequantized for good."""

ALLOWANCES = {
    "a8": "16-bit activations may be quantized to 8 bits where that is faster: results change",
    "copy": "searches also time the vendor's product over weights dequantized for good, to compare; it is never run",
}
"""What a user may allow, since it changes results or memory."""

_HALVES = (torch.float16, torch.bfloat16)
_INT8, _FP8 = ActivationFormat(8, "sym"), ActivationFormat(8, "float")
# Plane by plane a product costs bits * bits / 8 of the same product in int8. At a tie planes win at nearly every number
# of tokens (w2a4 on an H200: docs/tuning.md); above it dequantized bytes do, where compute is the limit.
_TIE = 8


@dataclass(frozen=True)
class Candidate:
    """One way to run a product: a strategy, the family and its config, and what activations are quantized to."""

    strategy: str
    kernel: str
    config: Any
    activations: ActivationFormat

    @property
    def layout(self) -> Layout:
        """Where the weights must lie."""
        return Layout.dense if self.kernel == VENDOR else FAMILIES[self.kernel].layout(self.activations)

    @property
    def fields(self) -> dict[str, FieldValue]:
        """What is chosen of the config, by name."""
        return {} if self.kernel == VENDOR else FAMILIES[self.kernel].fields(self.config)

    @property
    def name(self) -> str:
        """What it is called in maps, reports and exclusions."""
        inner = ", ".join(f"{key}={value}" for key, value in self.fields.items())
        return f"{self.kernel}({inner})" if inner else self.kernel

    def why_not(self, product: LinearProblem) -> str | None:
        """Why it cannot run a product; None if it can."""
        if self.kernel == VENDOR:
            return _why_not_vendor(product)
        return FAMILIES[self.kernel].why_not(replace(product, activations=self.activations), self.config)

    def kernels(self, product: LinearProblem) -> Iterator[Kernel]:
        """What is to be compiled before it can run."""
        if self.kernel == VENDOR:
            return
        family = FAMILIES[self.kernel]
        if family.target is Target.bytes:
            order = repack.Config(product.weights.bits, self.activations.quantized)
            yield repack.kernel(order)
        if self.activations.quantized:
            yield quantize_activations.kernel(quantizer(replace(product, activations=self.activations), family.target))
        yield family.module.kernel(self.config)


@dataclass(frozen=True)
class Excluded:
    """What is not in a space, and why: a strategy, or a family of one."""

    strategy: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Space:
    """Every legal candidate of a product, the most promising first within each family."""

    product: LinearProblem
    candidates: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...]


def strategy_of(activations: ActivationFormat, kernel: str, config: Any = None) -> str:
    """The name of what a family does with activations."""
    if kernel == VENDOR:
        return VENDOR
    if FAMILIES[kernel].target is Target.planes:
        return "bitwise"
    if getattr(config, "nibbles", False):
        return "split"
    if not activations.quantized:
        return "dequantize"
    return "padding to int8" if activations.integer else "padding to fp8"


def space(product: LinearProblem, allow: Collection[str] = ()) -> Space:
    """The whole space of a product; ``allow``: of ``ALLOWANCES``."""
    refuse_unknown(allow)
    found: list[Candidate] = []
    excluded: list[Excluded] = []
    for activations in targets_of(product, allow):
        effective = replace(product, activations=activations)
        for family in FAMILIES.values():
            configs = family.ranked(effective)
            for config in configs:
                found.append(Candidate(strategy_of(activations, family.name, config), family.name, config, activations))
            if not configs:
                reason = family.why_not(effective) or "none of its configs fits this product and device"
                excluded.append(Excluded(strategy_of(activations, family.name), family.name, reason))
    if "copy" in allow and _why_not_vendor(product) is None:
        found.append(Candidate(VENDOR, VENDOR, None, product.activations))
    excluded += _excluded_strategies(product, allow)
    return Space(product, tuple(found), tuple(excluded))


def _excluded_strategies(product: LinearProblem, allow: Collection[str]) -> Iterator[Excluded]:
    """Strategies that are out as a whole, beside what the families say."""
    w, x, arch = product.weights, product.activations, product.device.arch
    split = dpr.why_not(w, x, arch, "split")
    if split is not None:
        yield Excluded("split", "", split)
    if x.quantized:
        yield Excluded("dequantize", "", dpr.why_not(w, x, arch, "dequantize") or "activations are quantized")
        if x.integer:
            yield Excluded("padding to fp8", "", "sums of e4m3 products are rounded, and integer activations are exact")
        else:
            yield Excluded("padding to int8", "", "the activations are 8-bit floats")
    elif "a8" not in allow:
        for name in ("padding to int8", "padding to fp8"):
            yield Excluded(name, "", "it would quantize the activations, which has not been allowed (allow a8)")
    reason = _why_not_vendor(product) or (None if "copy" in allow else "a dequantized copy of the weights has not been "
                                          "allowed (allow copy)")  # fmt: skip
    if reason is not None:
        yield Excluded(VENDOR, "", reason)


def _why_not_vendor(product: LinearProblem) -> str | None:
    if product.activations.quantized:
        return "activations are quantized, and cuBLAS would not follow the scheme's arithmetic"
    if product.dtype not in (torch.float16, torch.bfloat16):
        return f"kernels take float16 and bfloat16, not {product.dtype}"
    return None


def refuse_unknown(allow: Collection[str]) -> None:
    """Raise KernelError for an allowance that does not exist."""
    for word in allow:
        if word not in ALLOWANCES:
            raise KernelError(f"allowance {word!r} is unknown; there are {', '.join(ALLOWANCES)}")


# -------- built-in choices: what runs where nothing was measured


_FEW = 16


def builtin_layout(product: LinearProblem) -> Layout:
    """The layout that weights get where nothing was measured."""
    x = product.activations
    if x.integer and product.weights.bits * x.bits <= _TIE and _planes_family(product) is not None:
        return Layout.planes
    return tiles_of(x) if _tiles_run(product) or _planes_family(product) is None else Layout.planes


def builtin(product: LinearProblem, layout: Layout | None = None) -> Candidate:
    """The built-in choice for a product with its weights in ``layout`` (by default: in the built-in one).

    Made for the token count that stands for the product's: with few tokens the next power of two, which needs fewer
    kernels; with many the next of the grid, since tiles of tokens that do not fit cost up to a quarter of the time.
    Raises KernelError, in a sentence, where nothing can run it.
    """
    anywhere = layout is None
    layout = layout or builtin_layout(product)
    x = product.activations
    if layout is Layout.dense:
        return Candidate(VENDOR, VENDOR, None, x)
    # Five and six tokens of w4a16 have a choice of their own: that for eight takes 7 % longer in layers like down.
    fine = product.m > _FEW or (not x.quantized and product.weights.bits == 4 and product.m in (5, 6))
    rounded = replace(product, m=(bucket if fine else power_of_two)(product.m))
    if layout is Layout.planes:
        family = _planes_family(rounded)
        if family is None:
            raise KernelError(f"no bit-plane kernel runs {product}: {FAMILIES['sm90_bitplane_gemm'].why_not(product)}")
        return Candidate("bitwise", family.name, family.default(rounded), x)
    gathered = x.quantized and product.act_order  # by sm90_packed_skinny alone, while it reads
    few = heuristics.kernel(few_tokens(rounded)) if product.dtype in _HALVES and not gathered else None
    if few is not None:
        family = FAMILIES[few.__name__.rpartition(".")[2]]
        if family.why_not(rounded) is None:
            return Candidate(strategy_of(x, family.name), family.name, family.default(rounded), x)
    names = ("sm90_packed_gemm", "sm80_packed_gemm")
    for family in (FAMILIES[name] for name in names):
        if family.why_not(rounded) is None:
            config = family.default(rounded)
            return Candidate(strategy_of(x, family.name, config), family.name, config, x)
    shown = (*names, "sm90_bitplane_gemm") if anywhere else names
    reasons = "; ".join(f"{name}: {FAMILIES[name].why_not(rounded)}" for name in shown)
    if anywhere:
        reference = "the reference does, slowly, after anybit.ops.allow_fallback()"
        raise KernelError(f"no kernel runs {product}: {reasons}; {reference}")
    raise KernelError(f"no kernel over tiles runs {product}: {reasons}")


FEW_TOKENS = 8
"""To so many tokens a product is over before the next one's blocks could all have started beside its own."""


def clearly_faster(us: float, built_in_us: float) -> bool:
    """Whether a config of few tokens is so much faster than the built-in choice that a whole step gains by it.

    A product timed in a chain of itself is off by up to a microsecond from what it takes between others.
    """
    return us < max(0.95 * built_in_us, built_in_us - 1.0)


def preserves_pdl_overlap(product: LinearProblem, candidate: Candidate) -> bool:
    """Whether the kernels after it can start as early as after the built-in config of its kernel; of few tokens alone.

    More shared memory, or a second block on a multiprocessor, keeps the next kernel's blocks from starting beside this
    one's. No product timed by itself shows that, and steps of models do: a ring of 10 stages for 7 was 1 % faster alone
    and cost 5 us a layer (w4a8, one token). Bit planes may always take half of a multiprocessor, and another kernel
    than the built-in one as much as that one or three quarters.
    """
    if product.m > FEW_TOKENS or candidate.kernel not in FAMILIES:
        return True
    module = FAMILIES[candidate.kernel].module
    most, blocks = _most_shared(replace(product, activations=candidate.activations), candidate.kernel)
    if module is sm90_packed_gemm and candidate.config.min_blocks_per_sm > blocks:
        return False
    return bool(module.shared_bytes(candidate.config) <= most)


_ANOTHER = 0.75
"""How much of a multiprocessor's shared memory another kernel than the built-in one may take."""


@functools.lru_cache(maxsize=4096)
def _most_shared(product: LinearProblem, kernel: str) -> tuple[float, int]:
    """How much shared memory a block of a kernel may take for ``preserves_pdl_overlap``, and how many may share a
    multiprocessor where the config says that.
    """
    family = FAMILIES[kernel]
    planes = family.target is Target.planes and product.device.arch == "sm_90a"
    try:
        chosen = builtin(product, family.layout(product.activations))
        own = chosen.config if planes else family.default(replace(product, m=power_of_two(product.m)))
    except KernelError:
        return float("inf"), product.device.sms
    most: float = FAMILIES[chosen.kernel if planes else kernel].module.shared_bytes(own)
    if planes:
        return max(most, half_bytes(product.device)), 1
    if chosen.kernel != kernel:
        others: int = FAMILIES[chosen.kernel].module.shared_bytes(chosen.config)
        most = min(most, max(others, _ANOTHER * product.device.shared_bytes))
    return most, getattr(own, "min_blocks_per_sm", 1)


def _planes_family(product: LinearProblem) -> KernelFamily | None:
    """The built-in family over bit planes; None where none runs."""
    if FAMILIES["sm80_bitplane_gemm"].why_not(product) is not None:  # which begins with the oldest architecture
        return None
    module = bitplane.family(bit_planes(product))
    return None if module is None else FAMILIES[module.__name__.rpartition(".")[2]]


def _tiles_run(product: LinearProblem) -> bool:
    return any(FAMILIES[name].why_not(product) is None for name in ("sm90_packed_gemm", "sm80_packed_gemm"))


# -------- fewer candidates: what a search looks at first

_EVERYTHING = 1000
"""A search for so many candidates of each family leaves nothing out."""
_EVERY_KIND, _EVERY_RING = 4, 12
"""A search for so many of each family tries every kind of bit-plane tile, and for more several rings of each."""
_MANY_TOKENS = 256
"""Above so many, planes that are not the built-in choice take several times its time: too long to time them for all."""


def _hopeless(product: LinearProblem, candidate: Candidate) -> bool:
    """Whether only the built-in choice is worth timing: mma.sync where wgmma is, or planes of many tokens."""
    if product.device.arch == "sm_90a" and candidate.kernel in ("sm80_bitplane_gemm", "sm80_packed_gemm"):
        return True
    if candidate.kernel in ("sm90_bitplane_skinny", "sm90_bitplane_resident") and product.m > _MANY_TOKENS:
        return True  # which load the weights once for 64 tokens
    return candidate.strategy == "bitwise" and product.m > 32 and product.weights.bits * product.activations.bits > 16


def targets_of(product: LinearProblem, allow: Collection[str] = ()) -> list[ActivationFormat]:
    """The product's own activations, and what they may be quantized to."""
    own = product.activations
    return [own, _INT8, _FP8] if not own.quantized and "a8" in allow else [own]


def builtins_of(product: LinearProblem, allow: Collection[str] = ()) -> list[Candidate]:
    """The built-in choices of every layout that a product may have; the one that would run comes first."""
    chosen = []
    with contextlib.suppress(KernelError):
        chosen.append(builtin(product))
    for activations in targets_of(product, allow):
        effective = replace(product, activations=activations)
        layouts = [family.layout(activations) for family in FAMILIES.values() if family.why_not(effective) is None]
        for layout in dict.fromkeys(layouts):
            try:
                chosen.append(builtin(effective, layout))
            except KernelError:
                continue
    if "copy" in allow and _why_not_vendor(product) is None:
        chosen.append(Candidate(VENDOR, VENDOR, None, product.activations))
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]


def promising(
    product: LinearProblem, each: int, hints: Collection[Candidate] = (), allow: Collection[str] = ()
) -> list[Candidate]:
    """The built-in choices, then hints that are allowed, then the ``each`` most promising of every family.

    The product's built-in choice comes first and is always there, so that a search never ends with something worse.
    """
    targets = targets_of(product, allow)
    chosen = builtins_of(product, allow)
    if power_of_two(product.m) <= MOST_TOKENS:  # whose kernels are compiled anyway
        chosen += builtins_of(replace(product, m=power_of_two(product.m)), allow)
    if each < _EVERY_KIND and product.m > _MANY_TOKENS:
        chosen = [one for one in chosen if one == chosen[0] or not _hopeless(product, one)]
    chosen += [hint for hint in hints if hint.activations in targets and (hint.kernel != VENDOR or "copy" in allow)]
    if each >= _EVERYTHING:
        chosen += space(product, allow).candidates
    elif each:
        chosen += _first(product, each, targets)
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]


def _first(product: LinearProblem, each: int, targets: Collection[ActivationFormat]) -> Iterator[Candidate]:
    """The ``each`` most promising of every family and strategy, hopeless ones left out."""
    for activations in targets:
        effective = replace(product, activations=activations)
        for family in FAMILIES.values():
            if _hopeless(product, Candidate(strategy_of(activations, family.name), family.name, None, activations)):
                continue
            # Kernels for few tokens have few configs that leave room to others, and likeness ranks them badly.
            estimated, splits = hasattr(family.module, "estimate"), family.name == "sm80_packed_gemm"
            every = not estimated and each >= _EVERY_RING and product.m <= FEW_TOKENS and family.target is Target.bytes
            count = each * 3 // 2 if estimated and each >= _EVERY_RING and product.m > INTERPOLATE_FROM else each
            configs = family.ranked(effective) if splits or every else family.first(effective, count)
            if each >= _EVERY_KIND:
                configs = [*configs, *family.kinds(effective, each >= _EVERY_RING)]
            limit = each if splits or every else len(configs)
            counts: dict[str, int] = {}
            for config in configs:
                found = Candidate(strategy_of(activations, family.name, config), family.name, config, activations)
                counts[found.strategy] = counts.get(found.strategy, 0) + 1
                if counts[found.strategy] <= limit or (every and preserves_pdl_overlap(product, found)):
                    yield found
