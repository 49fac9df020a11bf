"""The space of a product: every strategy, every family's legal configs, and what is excluded and why, in sentences.

Legality comes from the families' ``why_not`` alone. The paper's relation among block widths, warps and tiles
(APT-LLM, section V-B: B_w B_x / (W_M W_N) = W_B T_R T_C) is part of it: a tile is what its warps cover in whole
products, so a config states the tile and its warps, and the products a warp does follow.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybit import dpr
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Target
from anybit.kernels.gemm import (
    heuristics,
    repack,
    sm90_bitplane_stacked,
    sm90_packed_gemm,
)
from anybit.kernels.gemm.sm90_bitplane_rules import half_bytes
from anybit.scheme import ActivationFormat
from anybit.tune.registry import (
    BETWEEN_FROM,
    FAMILIES,
    GRID,
    MOST_TOKENS,
    FieldValue,
    KernelFamily,
    Layout,
    LinearProblem,
    bucket,
    few_tokens,
    power_of_two,
    quantizer,
    steps_to,
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
# of tokens (w2a4 on an H200: docs/tuning.md); above it widened bytes do, where compute is the limit.
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

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """How many candidates each strategy has in each family."""
        counts: dict[tuple[str, str], int] = {}
        for candidate in self.candidates:
            key = candidate.strategy, candidate.kernel
            counts[key] = counts.get(key, 0) + 1
        return counts

    def text(self) -> str:
        """The size of the space and what is excluded, for people."""
        lines = [f"{self.product}: {len(self.candidates)} legal candidates"]
        lines += [f"  {strategy} ({kernel}): {count}" for (strategy, kernel), count in self.sizes.items()]
        lines += [f"  not {e.strategy}{f' ({e.kernel})' if e.kernel else ''}: {e.reason}" for e in self.excluded]
        return "\n".join(lines)


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
    # w4a16, layers like down: 10.5 us at 5 tokens by the choice for 6, and 11.2 by that for 8 (docs/notes).
    fine = product.m > _FEW or (not x.quantized and product.weights.bits == 4 and product.m in (5, 6))
    rounded = replace(product, m=(bucket if fine else power_of_two)(product.m))
    if layout is Layout.planes:
        family = _planes_family(rounded)
        if family is None:
            raise KernelError(f"no bit-plane kernel runs {product}: {FAMILIES['sm90_bitplane'].why_not(product)}")
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
    shown = (*names, "sm90_bitplane") if anywhere else names
    reasons = "; ".join(f"{name}: {FAMILIES[name].why_not(rounded)}" for name in shown)
    if anywhere:
        reference = "the reference does, slowly, after anybit.ops.allow_fallback()"
        raise KernelError(f"no kernel runs {product}: {reasons}; {reference}")
    raise KernelError(f"no kernel over tiles runs {product}: {reasons}")


FEW_TOKENS = 8
"""To so many tokens a product is over before the next one's blocks could all have started beside its own."""


def leaves_room(product: LinearProblem, candidate: Candidate) -> bool:
    """Whether, of few tokens, it takes no more shared memory than its kernel's built-in config, and no more blocks.

    More of it keeps the kernels that follow in a model from starting early, which no product timed by itself shows: on
    an H200 a ring of 10 stages for 7 (w4a8 gate_up, one token) was 1 % faster among the layers of a model, and made
    each layer of the model's step 5 us slower, where small kernels stand between them. Blocks that leave room for a
    second one are placed two on the multiprocessors that are free first, and none on others (o in w4a8 at 5 to 8
    tokens: 5.5 to 5.8 us for 4.8). Bit planes, several blocks of which share a multiprocessor, may take half of it
    each in any case. Another kernel than the layout's built-in one may take as much as that, or three quarters of a
    multiprocessor: in 9 of 10 steps ``sm90_packed_gemm`` with 208 KB and more, 4 to 10 % faster by itself, was 0.2 to
    1.5 us slower a layer than the built-in ``sm90_packed_skinny`` with 123 to 137 KB (gate_up, int8, 2 and 4 tokens).
    """
    if product.m > FEW_TOKENS or candidate.kernel not in FAMILIES:
        return True
    module = FAMILIES[candidate.kernel].module
    most, resident = _most_shared(replace(product, activations=candidate.activations), candidate.kernel)
    if module is sm90_packed_gemm and candidate.config.resident > resident:
        return False
    return bool(module.shared_bytes(candidate.config) <= most)


_ANOTHER = 0.75
"""How much of a multiprocessor's shared memory another kernel than the built-in one may take."""


@functools.lru_cache(maxsize=4096)
def _most_shared(product: LinearProblem, kernel: str) -> tuple[float, int]:
    """How much shared memory a block of a kernel may take for ``leaves_room``, and how many blocks may share a
    multiprocessor where the config says that.
    """
    family = FAMILIES[kernel]
    try:
        own = family.default(replace(product, m=power_of_two(product.m)))
        chosen = builtin(product, family.layout(product.activations))
    except KernelError:
        return float("inf"), product.device.sms
    most: float = family.module.shared_bytes(own)
    if family.name == "sm90_bitplane":
        most = max(most, half_bytes(product.device))
    if chosen.kernel != kernel:
        others: int = FAMILIES[chosen.kernel].module.shared_bytes(chosen.config)
        most = min(most, max(others, _ANOTHER * product.device.shared_bytes))
    return most, getattr(own, "resident", 1)


def builtins(product: LinearProblem) -> list[Candidate]:
    """The built-in choice for a product, if there is one."""
    try:
        return [builtin(product)]
    except KernelError:
        return []


def _planes_family(product: LinearProblem) -> KernelFamily | None:
    """Wgmma where it is, its tiles of planes side by side where those were faster, else mma.sync."""
    for name in ("sm90_bitplane_stacked", "sm90_bitplane", "sm80_bitplane_gemm"):
        family = FAMILIES[name]
        if name == "sm90_bitplane_stacked" and not (
            family.why_not(product) is None and sm90_bitplane_stacked.preferred(family.problem(product))
        ):
            continue
        if family.runs(product):
            return family
    return None


def _tiles_run(product: LinearProblem) -> bool:
    return any(FAMILIES[name].why_not(product) is None for name in ("sm90_packed_gemm", "sm80_packed_gemm"))


# -------- fewer candidates: what a search looks at first

_EVERYTHING = 1000
"""A search for so many candidates of each family leaves nothing out."""
_EVERY_KIND = 4
"""A search for so many candidates of each family tries every kind of tile of a family that has no estimate, too."""
_EVERY_RING = 12
"""And one for so many several rings of each."""
_MANY_TOKENS = 256
"""Above so many, planes that are not the built-in choice take several times its time: too long to time them for all."""


def _hopeless(product: LinearProblem, candidate: Candidate) -> bool:
    """Whether only the built-in choice is worth timing: mma.sync where wgmma is, or many planes of many tokens."""
    if product.device.arch == "sm_90a" and candidate.kernel in ("sm80_bitplane_gemm", "sm80_packed_gemm"):
        return True
    return candidate.strategy == "bitwise" and product.m > 32 and product.weights.bits * product.activations.bits > 16


def targets_of(product: LinearProblem, allow: Collection[str] = ()) -> list[ActivationFormat]:
    """The product's own activations, and what they may be quantized to."""
    own = product.activations
    return [own, _INT8, _FP8] if not own.quantized and "a8" in allow else [own]


def builtins_of(product: LinearProblem, allow: Collection[str] = ()) -> list[Candidate]:
    """The built-in choices of every layout that a product may have; the one that would run comes first."""
    chosen = builtins(product)
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
    product: LinearProblem,
    each: int,
    hints: Collection[Candidate] = (),
    allow: Collection[str] = (),
    grid: Sequence[int] = GRID,
) -> list[Candidate]:
    """The built-in choices, then hints that are allowed, then the ``each`` most promising of every family.

    The product's built-in choice comes first and is always there, so that a search never ends with something worse.
    grid: the token counts that are measured; what is promising at those between the last one and the product's is
    tried, too.
    """
    targets = targets_of(product, allow)
    chosen = builtins_of(product, allow)
    if power_of_two(product.m) <= MOST_TOKENS:  # whose kernels are compiled anyway
        chosen += builtins_of(replace(product, m=power_of_two(product.m)), allow)
    if each < _EVERY_KIND and product.m > _MANY_TOKENS:
        chosen = [one for one in chosen if one == chosen[0] or not _hopeless(product, one)]
    chosen += [hint for hint in hints if hint.activations in targets and (hint.kernel != VENDOR or "copy" in allow)]
    if each >= _EVERY_KIND:
        for activations in targets:
            effective = replace(product, activations=activations)
            for family in FAMILIES.values():
                of_kind = family.kinds(effective, each >= _EVERY_RING)
                kinds = [Candidate("bitwise", family.name, config, activations) for config in of_kind]
                chosen += [one for one in kinds if each >= _EVERYTHING or not _hopeless(product, one)]
    if each >= _EVERYTHING:
        chosen += space(product, allow).candidates
    elif each:
        chosen += _first(product, each, targets, grid)
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]


def _first(
    product: LinearProblem, each: int, targets: Collection[ActivationFormat], grid: Sequence[int]
) -> Iterator[Candidate]:
    """The ``each`` most promising of every family and strategy, hopeless ones left out."""
    for activations in targets:
        effective = replace(product, activations=activations)
        for family in FAMILIES.values():
            if _hopeless(product, Candidate(strategy_of(activations, family.name), family.name, None, activations)):
                continue
            splits = family.name == "sm80_packed_gemm"  # whose configs belong to two strategies
            counts: dict[str, int] = {}
            if hasattr(family.module, "estimate"):  # which follows how tiles of tokens fill multiprocessors
                # Of many tokens the best config was the 26th by estimate at worst, 6 % faster than the first 24.
                count = each if product.m <= BETWEEN_FROM or each < _EVERY_RING else each + each // 2
                for tokens in steps_to(product.m, grid):
                    for config in family.first(replace(effective, m=tokens), count):
                        yield Candidate(strategy_of(activations, family.name, config), family.name, config, activations)
                continue
            # To 8 tokens these families have few configs that leave room to others, and likeness ranks them badly.
            every = each >= _EVERY_RING and product.m <= FEW_TOKENS and family.target is Target.bytes
            for config in family.ranked(effective) if splits or every else family.first(effective, each):
                found = Candidate(strategy_of(activations, family.name, config), family.name, config, activations)
                counts[found.strategy] = counts.get(found.strategy, 0) + 1
                if (every and not splits and leaves_room(product, found)) or counts[found.strategy] <= each:
                    yield found
