"""Built-in choices: layout, family and config of problems that were not tuned."""

import functools
from dataclasses import replace

from anybit.choose import heuristics
from anybit.choose.families import FAMILIES, Candidate, Layout, tiles_of
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane
from anybit.kernels.linear_problem import LinearProblem

# With bit planes a product costs weight bits * activation bits / 8 of the int8 product. At a tie planes win at nearly
# every token count (w2a4 on an H200: docs/tuning.md); above it int8 wins, where compute is the limit.
_TIE = 8
_FEW = 16
_TILES = ("sm90_packed_gemm", "sm80_packed_gemm")
"""The families over tiles that take any number of tokens."""


def builtin_layout(product: LinearProblem) -> Layout:
    """The layout of weights that were not tuned."""
    x, planes = product.activations, _planes_family(product)
    if planes and x.integer and product.weights.bits * x.bits <= _TIE:
        return Layout.planes
    tiles = not planes or any(FAMILIES[name].why_not(product) is None for name in _TILES)
    return tiles_of(x) if tiles else Layout.planes


def builtin(product: LinearProblem, layout: Layout | None = None) -> Candidate:
    """The built-in choice for a product with its weights in ``layout`` (default: the built-in one).

    The token count is rounded up first: few tokens to a power of two, which needs fewer kernels; many to a bucket,
    since partly filled token tiles cost up to a quarter of the time. Raises KernelError if nothing can run it.
    """
    x = product.activations
    # Five and six tokens of w4a16 are not rounded to eight, which takes 7 % longer in layers like down.
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
    """The built-in family over bit planes; None if none runs."""
    if FAMILIES["sm80_bitplane_gemm"].why_not(product) is not None:  # it has the oldest minimum architecture
        return None
    module = bitplane.family(product)
    return None if module is None else module.traits.name


def _few_family(product: LinearProblem) -> list[str]:
    """The family for few tokens, if one is faster; none gathers quantized activations."""
    few = None if product.activations.quantized and product.act_order else heuristics.kernel(product)
    return [few.traits.name] if few else []


# -------- how many tokens count as the same

MOST_TOKENS = 8192
INTERPOLATE_FROM = 64
"""Token count up to which the next measured count decides, since one tile holds all tokens; above, the two around."""


@functools.cache
def bucket(tokens: int) -> int:
    """The token count that represents ``tokens`` in a map: the next power of two or midpoint between two.

    Above 64, where token tiles quantize into waves, also the quarters; beyond 8192 only powers of two.
    """
    return _rounded(tokens, 8 if tokens > INTERPOLATE_FROM else 4)


@functools.cache
def step(tokens: int) -> int:
    """The token count that kernels are chosen for: up to 16 that of ``bucket``, up to 24 the next eighth between two
    powers of two, up to 64 the next quarter, above the next 32nd. Absent tokens of a tile cost time: at 24 tokens a
    tile of 32 is nearly as fast as one of 24, but at 20 it takes 1.17 times as long.
    """
    return _rounded(tokens, next(parts for most, parts in ((16, 4), (24, 16), (64, 8), (tokens, 64)) if tokens <= most))


def _rounded(tokens: int, parts: int) -> int:
    """Round up to a multiple of the next power of two over ``parts``; beyond ``MOST_TOKENS`` to that power."""
    power = power_of_two(tokens)
    unit = max(1, power // parts) if tokens <= MOST_TOKENS else power
    return -(-tokens // unit) * unit


def power_of_two(tokens: int) -> int:
    """The next power of two."""
    return 1 << (tokens - 1).bit_length()
