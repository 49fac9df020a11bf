"""What runs where no measured point helps, and the token counts that count as the same."""

from anybit.choose.families import FAMILIES, Candidate, Layout, tiles_of
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane
from anybit.kernels.linear_problem import LinearProblem

_TIE = 8  # weight bits * activation bits: bit planes then do the work of the int8 product
FEW_TOKENS = 8
"""Up to this token count a GEMM ends before all blocks of the next kernel could have started beside its own."""
_TILES, _ROWS = ("sm90_packed_gemm", "sm80_packed_gemm"), ("sm90_packed_gemv", "sm90_packed_skinny")
"""The families over tiles: for any number of tokens, for few."""
_PLANES = "sm90_bitplane_gemm"


def builtin_layout(product: LinearProblem) -> Layout:
    """The layout of weights that were not tuned."""
    x, alone = product.activations, all(FAMILIES[name].why_not(product) is not None for name in _TILES)
    better = x.integer and product.weights.bits * x.bits <= _TIE
    return Layout.planes if (better or alone) and bitplane.family(product) else tiles_of(x)


def builtin(product: LinearProblem, layout: Layout | None = None) -> Candidate:
    """What runs where nothing measured can: the first family over the weights' layout. Raises KernelError for none."""
    gathered = product.activations.quantized and product.act_order  # no family for few tokens gathers codes
    names: tuple[str, ...] = _TILES if product.m > FEW_TOKENS or gathered else (*_ROWS, *_TILES)
    if (layout or builtin_layout(product)) is Layout.planes:
        module = bitplane.family(product)
        names = (_PLANES if module is None else module.traits.name,)
    reasons: dict[str, object] = {}
    for name in names:
        try:
            return Candidate(name, FAMILIES[name].default(product), product.activations)
        except KernelError as error:
            reasons[name] = FAMILIES[name].why_not(product) or error
    over, hint = f" over {layout.value}" if layout else "", ""
    if layout is None:
        reasons.setdefault(_PLANES, FAMILIES[_PLANES].why_not(product))
        hint = "; the reference does, slowly, after anybit.ops.allow_fallback()"
    raise KernelError(f"no kernel{over} runs {product}: {'; '.join(f'{n}: {why}' for n, why in reasons.items())}{hint}")


# -------- how many tokens count as the same

MOST_TOKENS = 8192
_STEPS, _MOST_PARTS = ((16, 4), (24, 16), (64, 8)), 64
"""(token count, the parts of a power of two that kernels are chosen for up to it), and the parts above."""


def bucket(tokens: int) -> int:
    """The token count that represents ``tokens`` in a map: a power of two, half-way between, or above 64 a quarter."""
    return _rounded(tokens, 8 if tokens > 64 else 4)


def step(tokens: int) -> int:
    """The token count that kernels are chosen for: that of ``bucket`` up to 16, finer above, as tiles are."""
    return _rounded(tokens, next((parts for most, parts in _STEPS if tokens <= most), _MOST_PARTS))


def _rounded(tokens: int, parts: int) -> int:
    """Round up to a multiple of the next power of two over ``parts``; beyond ``MOST_TOKENS`` to that power."""
    power = 1 << (tokens - 1).bit_length()
    unit = max(1, power // parts) if tokens <= MOST_TOKENS else power
    return -(-tokens // unit) * unit
