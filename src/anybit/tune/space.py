"""The space of a problem: every strategy, every family's legal configs, and what is excluded and why, in sentences.

Legality comes from the families' ``why_not`` alone. APT-LLM's relation among block widths, warps and tiles (section
V-B) is part of it: a config states the tile and its warps, and what a warp does follows.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from anybit import dpr
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Target
from anybit.kernels.gemm import bitplane, heuristics, repack
from anybit.kernels.gemm.bitplane_problem import half_bytes
from anybit.scheme import ActivationFormat
from anybit.tune.registry import (
    FAMILIES,
    FieldValue,
    Layout,
    LinearProblem,
    bucket,
    power_of_two,
    quantizer,
    tiles_of,
)

STRATEGIES = ("bitwise", "padding to int8", "padding to fp8", "dequantize", "split", "sparse")
"""Ways of carrying a product out (ADAngel, section 4.3)."""

ALLOWANCES = {"a8": "16-bit activations may be quantized to 8 bits where that is faster: results change"}
"""What a user may allow, since it changes results."""

_INT8, _FP8 = ActivationFormat(8, "sym"), ActivationFormat(8, "float")
# Plane by plane a product costs bits * bits / 8 of the same product in int8. At a tie planes win at nearly every number
# of tokens (w2a4 on an H200: docs/tuning.md); above it dequantized bytes do, where compute is the limit.
_TIE = 8


@dataclass(frozen=True)
class Candidate:
    """One way to run a product: the kernel family, its config, and what activations are quantized to."""

    kernel: str
    config: Any
    activations: ActivationFormat

    @property
    def strategy(self) -> str:
        """Of ``STRATEGIES``."""
        return strategy_of(self.kernel, self.activations, self.config)

    @property
    def layout(self) -> Layout:
        """Where the weights must lie."""
        return FAMILIES[self.kernel].layout(self.activations)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return int(FAMILIES[self.kernel].module.shared_bytes(self.config))

    @property
    def fields(self) -> dict[str, FieldValue]:
        """What is chosen of the config, by name."""
        return FAMILIES[self.kernel].fields(self.config)

    @property
    def name(self) -> str:
        """What it is called in maps, reports and exclusions."""
        return f"{self.kernel}({', '.join(f'{key}={value}' for key, value in self.fields.items())})"

    def why_not(self, product: LinearProblem) -> str | None:
        """Why it cannot run a product; None if it can."""
        return FAMILIES[self.kernel].why_not(replace(product, activations=self.activations), self.config)

    def kernels(self, product: LinearProblem) -> Iterator[Kernel]:
        """What is to be compiled before it can run."""
        family = FAMILIES[self.kernel]
        if family.target is Target.bytes and not product.weights.sparse:
            yield repack.kernel(repack.config_of(product.weights, "a8" if self.activations.quantized else "a16"))
        if self.activations.quantized:
            yield quantize_activations.kernel(quantizer(replace(product, activations=self.activations), family.target))
        yield family.module.kernel(self.config)


def strategy_of(kernel: str, activations: ActivationFormat, config: Any = None) -> str:
    """The name of what a family does with activations."""
    if FAMILIES[kernel].target is Target.planes:
        return "bitwise"
    if getattr(config, "nibbles", False):
        return "split"
    if getattr(config, "sparse", False):
        return "sparse"
    if not activations.quantized:
        return "dequantize"
    return "padding to int8" if activations.integer else "padding to fp8"


@dataclass(frozen=True)
class Excluded:
    """What is not in a space, and why: a strategy, or a family of one."""

    strategy: str
    kernel: str
    reason: str


class Space(NamedTuple):
    """Every legal candidate of a product, family by family."""

    candidates: list[Candidate]
    excluded: list[Excluded]


def space(product: LinearProblem, allow: Collection[str] = ()) -> Space:
    """The whole space of a product; ``allow``: of ``ALLOWANCES``."""
    refuse_unknown(allow)
    found: list[Candidate] = []
    excluded: list[Excluded] = []
    for activations in targets_of(product, allow):
        effective = replace(product, activations=activations)
        for name, family in FAMILIES.items():
            configs = family.configs(effective)
            found += [Candidate(name, config, activations) for config in configs]
            if not configs:
                reason = family.why_not(effective) or "none of its configs fits this product and device"
                excluded.append(Excluded(strategy_of(name, activations), name, reason))
    return Space(found, [*excluded, *_excluded_strategies(product, allow)])


def _excluded_strategies(product: LinearProblem, allow: Collection[str]) -> Iterator[Excluded]:
    """Strategies that are out as a whole, beside what the families say."""
    w, x, arch = product.weights, product.activations, product.device.arch
    for strategy in ("split", "dequantize") if x.quantized else ("split",):
        if reason := dpr.why_not(w, x, arch, strategy):
            yield Excluded(strategy, "", reason)
    if x.integer:
        yield Excluded("padding to fp8", "", "sums of e4m3 products are rounded, and integer activations are exact")
    elif x.quantized:
        yield Excluded("padding to int8", "", "the activations are 8-bit floats")
    elif "a8" not in allow:
        for name in ("padding to int8", "padding to fp8"):
            yield Excluded(name, "", "it would quantize the activations, which has not been allowed (allow a8)")


def targets_of(product: LinearProblem, allow: Collection[str] = ()) -> list[ActivationFormat]:
    """The product's own activations, and what they may be quantized to."""
    own = product.activations
    return [own, _INT8, _FP8] if not own.quantized and "a8" in allow else [own]


def refuse_unknown(allow: Collection[str]) -> None:
    """Raise KernelError for an allowance that does not exist."""
    for word in allow:
        if word not in ALLOWANCES:
            raise KernelError(f"allowance {word!r} is unknown; there are {', '.join(ALLOWANCES)}")


# -------- built-in choices: what runs where nothing was measured


_FEW = 16
_TILES = ("sm90_packed_gemm", "sm80_packed_gemm")
"""The families over tiles for any number of tokens."""


def builtin_layout(product: LinearProblem) -> Layout:
    """The layout that weights get where nothing was measured."""
    x, planes = product.activations, _planes_family(product)
    if planes and x.integer and product.weights.bits * x.bits <= _TIE:
        return Layout.planes
    tiles = not planes or any(FAMILIES[name].why_not(product) is None for name in _TILES)
    return tiles_of(x) if tiles else Layout.planes


def builtin(product: LinearProblem, layout: Layout | None = None) -> Candidate:
    """The built-in choice for a product with its weights in ``layout`` (by default: in the built-in one).

    Made for the token count that stands for the product's: with few tokens the next power of two, which needs fewer
    kernels; with many the next of the grid, since tiles of tokens that do not fit cost up to a quarter of the time.
    Raises KernelError, in a sentence, where nothing can run it.
    """
    x = product.activations
    # Five and six tokens of w4a16 have a choice of their own: that for eight takes 7 % longer in layers like down.
    fine = product.m > _FEW or (not x.quantized and product.weights.bits == 4 and product.m in (5, 6))
    rounded = replace(product, m=(bucket if fine else power_of_two)(product.m))
    if (layout or builtin_layout(product)) is Layout.planes:
        names = [name] if (name := _planes_family(rounded)) else ["sm90_bitplane_gemm"]
    else:
        names = [*_few_family(rounded), *_TILES]
    reasons = []
    for name in names:
        reason = FAMILIES[name].why_not(rounded)
        if reason is None:
            return Candidate(name, FAMILIES[name].default(rounded), x)
        reasons.append(f"{name}: {reason}")
    if layout is not None:
        raise KernelError(f"no kernel over {layout.value} runs {product}: {'; '.join(reasons)}")
    reasons.append(f"sm90_bitplane_gemm: {FAMILIES['sm90_bitplane_gemm'].why_not(rounded)}")
    reference = "the reference does, slowly, after anybit.ops.allow_fallback()"
    raise KernelError(f"no kernel runs {product}: {'; '.join(reasons)}; {reference}")


def _planes_family(product: LinearProblem) -> str | None:
    """The built-in family over bit planes; None where none runs."""
    if FAMILIES["sm80_bitplane_gemm"].why_not(product) is not None:  # which begins with the oldest architecture
        return None
    module = bitplane.family(product)
    return None if module is None else module.__name__.rpartition(".")[2]


def _few_family(product: LinearProblem) -> list[str]:
    """The family for few tokens, if one is faster; none gathers activations as it quantizes them."""
    if product.dtype not in (torch.float16, torch.bfloat16) or (product.activations.quantized and product.act_order):
        return []
    few = heuristics.kernel(product)
    return [few.__name__.rpartition(".")[2]] if few else []


FEW_TOKENS = 8
"""To so many tokens a product is over before the next one's blocks could all have started beside its own."""
_ANOTHER = 0.75
"""How much of a multiprocessor's shared memory another kernel than the built-in one may take."""


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
    if product.m > FEW_TOKENS:
        return True
    most, blocks = _room(replace(product, activations=candidate.activations), candidate.kernel)
    if candidate.kernel == "sm90_packed_gemm" and candidate.config.min_blocks_per_sm > blocks:
        return False
    return candidate.shared_bytes <= most


@functools.lru_cache(maxsize=4096)
def _room(product: LinearProblem, kernel: str) -> tuple[float, int]:
    """How much shared memory a block of a kernel may take, and how many may share a multiprocessor."""
    family, device = FAMILIES[kernel], product.device
    try:
        chosen = builtin(product, family.layout(product.activations))
        if family.target is Target.planes and device.arch == "sm_90a":
            return max(chosen.shared_bytes, half_bytes(device)), 1
        own = family.default(replace(product, m=power_of_two(product.m)))
    except KernelError:
        return float("inf"), device.sms
    most: float = family.module.shared_bytes(own)
    if chosen.kernel != kernel:
        most = min(most, max(chosen.shared_bytes, _ANOTHER * device.shared_bytes))
    return most, getattr(own, "min_blocks_per_sm", 1)


# -------- fewer candidates: what a search looks at first

_EVERYTHING = 1000
"""A search for so many candidates of each family leaves nothing out."""
_MANY_TOKENS = 256
"""Above so many, planes that are not the built-in choice take several times its time: too long to time them for all."""


def _hopeless(product: LinearProblem, kernel: str) -> bool:
    """Whether only the built-in choice is worth timing: mma.sync where wgmma is, or planes of many tokens."""
    if product.device.arch == "sm_90a" and kernel in ("sm80_bitplane_gemm", "sm80_packed_gemm"):
        return True
    if kernel in ("sm90_bitplane_skinny", "sm90_bitplane_resident") and product.m > _MANY_TOKENS:
        return True  # which load the weights once for 64 tokens
    planes = FAMILIES[kernel].target is Target.planes
    return planes and product.m > 32 and product.weights.bits * product.activations.bits > 16


def builtins_of(product: LinearProblem, allow: Collection[str] = ()) -> list[Candidate]:
    """The built-in choices of every layout that a product may have; the one that would run comes first."""
    chosen = []
    with contextlib.suppress(KernelError):
        chosen.append(builtin(product))
    for activations in targets_of(product, allow):
        for layout in (Layout.planes, tiles_of(activations)):
            with contextlib.suppress(KernelError):
                chosen.append(builtin(replace(product, activations=activations), layout))
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]


def promising(
    product: LinearProblem, each: int, hints: Collection[Candidate] = (), allow: Collection[str] = ()
) -> list[Candidate]:
    """The built-in choices, then hints that are allowed, then the ``each`` most promising of every family.

    The product's built-in choice comes first and is always there, so that a search never ends with something worse.
    """
    targets = targets_of(product, allow)
    chosen = [*builtins_of(product, allow), *(hint for hint in hints if hint.activations in targets)]
    for activations in targets if each else ():
        effective = replace(product, activations=activations)
        for name, family in FAMILIES.items():
            if each >= _EVERYTHING or not _hopeless(effective, name):
                chosen += [Candidate(name, config, activations) for config in family.promising(effective, each)]
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]
