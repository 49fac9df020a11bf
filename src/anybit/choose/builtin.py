"""What runs where no measured point helps, and the token counts that count as the same."""

from anybit.choose.families import FAMILIES, Candidate, Layout, tiles_of
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane
from anybit.kernels.linear_problem import LinearProblem

# With bit planes a product costs weight bits * activation bits / 8 of the int8 product. At a tie planes win at nearly
# every token count (w2a4 on an H200); above it int8 wins, where compute is the limit.
_TIE = 8
FEW_TOKENS = 8
"""Up to this token count a GEMM ends before all blocks of the next kernel could have started beside its own."""
_TILES, _ROWS = ("sm90_packed_gemm", "sm80_packed_gemm"), ("sm90_packed_gemv", "sm90_packed_skinny")
"""The families over tiles: for any number of tokens, for few."""


def builtin_layout(product: LinearProblem) -> Layout:
    """The layout of weights that were not tuned."""
    x, planes = product.activations, bitplane.family(product) is not None
    if planes and x.integer and product.weights.bits * x.bits <= _TIE:
        return Layout.planes
    tiles = not planes or any(FAMILIES[name].why_not(product) is None for name in _TILES)
    return tiles_of(x) if tiles else Layout.planes


def builtin(product: LinearProblem, layout: Layout | None = None) -> Candidate:
    """What runs where nothing that was measured can: the first family over the weights' layout that takes the product.

    Raises KernelError if none does.
    """
    gathered = product.activations.quantized and product.act_order  # no family for few tokens gathers codes
    names: tuple[str, ...] = _TILES if product.m > FEW_TOKENS or gathered else (*_ROWS, *_TILES)
    if (layout or builtin_layout(product)) is Layout.planes:
        module = bitplane.family(product)
        names = ("sm90_bitplane_gemm" if module is None else module.traits.name,)
    reasons = dict[str, None]()
    for name in names:
        try:
            return Candidate(name, FAMILIES[name].default(product), product.activations)
        except KernelError as error:
            reasons[f"{name}: {FAMILIES[name].why_not(product) or error}"] = None
    if layout is not None:
        raise KernelError(f"no kernel over {layout.value} runs {product}: {'; '.join(reasons)}")
    reasons[f"sm90_bitplane_gemm: {FAMILIES['sm90_bitplane_gemm'].why_not(product)}"] = None
    reference = "the reference does, slowly, after anybit.ops.allow_fallback()"
    raise KernelError(f"no kernel runs {product}: {'; '.join(reasons)}; {reference}")


# -------- how many tokens count as the same

MOST_TOKENS = 8192
_STEPS, _MOST_PARTS = ((16, 4), (24, 16), (64, 8)), 64
"""(token count, the parts of a power of two that kernels are chosen for up to it), and the parts above."""


def bucket(tokens: int) -> int:
    """The token count that represents ``tokens`` in a map: the next power of two or midpoint between two.

    Above 64, where token tiles quantize into waves, also the quarters; beyond 8192 only powers of two.
    """
    return _rounded(tokens, 8 if tokens > 64 else 4)


def step(tokens: int) -> int:
    """The token count that kernels are chosen for: that of ``bucket`` up to 16, finer above.

    Absent tokens of a tile cost time: at 24 tokens a tile of 32 is nearly as fast as one of 24, but at 20 it takes 1.17
    times as long.
    """
    return _rounded(tokens, next((parts for most, parts in _STEPS if tokens <= most), _MOST_PARTS))


def _rounded(tokens: int, parts: int) -> int:
    """Round up to a multiple of the next power of two over ``parts``; beyond ``MOST_TOKENS`` to that power."""
    power = 1 << (tokens - 1).bit_length()
    unit = max(1, power // parts) if tokens <= MOST_TOKENS else power
    return -(-tokens // unit) * unit
