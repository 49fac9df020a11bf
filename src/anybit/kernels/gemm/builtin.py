"""Built-in choices: the layout, family and config of a problem of which nothing was measured."""

import functools
from dataclasses import replace

from anybit.errors import KernelError
from anybit.kernels.gemm import bitplane, heuristics
from anybit.kernels.gemm.families import FAMILIES, Candidate, Layout, tiles_of
from anybit.kernels.gemm.linear_problem import LinearProblem

# Plane by plane a product costs bits * bits / 8 of the same product in int8. At a tie planes win at nearly every number
# of tokens (w2a4 on an H200: docs/tuning.md); above it dequantized bytes do, where compute is the limit.
_TIE = 8
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
    few = None if product.activations.quantized and product.act_order else heuristics.kernel(product)
    return [few.__name__.rpartition(".")[2]] if few else []


# -------- how many tokens count as the same

MOST_TOKENS = 8192
INTERPOLATE_FROM = 64
"""To so many tokens the next measured count decides, since a tile holds all tokens; above it the two around do."""


@functools.cache
def bucket(tokens: int) -> int:
    """The token count of a map that stands for ``tokens``: the next power of two or what lies half way between two.

    Above 64, where tiles of tokens fill waves of multiprocessors or do not, the quarters, too; beyond 8192 none.
    """
    return _rounded(tokens, 8 if tokens > INTERPOLATE_FROM else 4)


@functools.cache
def step(tokens: int) -> int:
    """The token count that kernels are chosen for: to 16 that of ``bucket``, to 24 the next eighth of the way between
    two powers of two, to 64 the next quarter, above it the next 32nd. Tiles of tokens that are not there take their
    time: at 24 tokens a tile of 32 is nearly as fast as one of 24, and at 20 it takes 1.17 times as long.
    """
    return _rounded(tokens, next(parts for most, parts in ((16, 4), (24, 16), (64, 8), (tokens, 64)) if tokens <= most))


def _rounded(tokens: int, parts: int) -> int:
    """The next multiple of a part of the next power of two, or that itself beyond ``MOST_TOKENS``."""
    power = power_of_two(tokens)
    unit = max(1, power // parts) if tokens <= MOST_TOKENS else power
    return -(-tokens // unit) * unit


def power_of_two(tokens: int) -> int:
    """The next power of two: what built-in choices are made for, so that they are few."""
    return 1 << (tokens - 1).bit_length()
