"""Fast Hadamard transforms of any width a model has: the rotation that spreads outliers over channels.

A Hadamard matrix has entries 1 and -1 and orthogonal rows. Sylvester's construction gives orders 2^k; Paley's, over
finite fields (Paley, 1933), q + 1 for prime powers q = 3 mod 4 and 2(q + 1) for q = 1 mod 4; Kronecker products give
products of orders. Model widths are a small order times a power of two: 576 = 36 * 16, 1536 = 12 * 128,
14336 = 28 * 512, 11008 = 344 * 32. The power-of-two factor takes only additions (butterflies).
"""

import math
from functools import cache

import torch
from torch import Tensor

from anybit.errors import LayerError

# The largest size whose dense matrix is kept.
MOST_DENSE = 4096


def factor(size: int) -> tuple[int, int]:
    """(m, 2^k) with m * 2^k = size and m the smallest order with a construction.

    Raises LayerError for a size without one.
    """
    if size < 1:
        raise LayerError(f"a Hadamard matrix has at least 1 row, not {size}")
    power = size & -size
    odd = size // power
    if odd == 1:
        return 1, size
    order = 4 * odd
    while order <= size:
        if _paley(order) is not None:
            return order, size // order
        order *= 2
    raise LayerError(
        f"Hadamard matrices of size {size} are not supported: sizes are 2^k, or 2^k times q + 1 or 2 (q + 1) with a "
        "prime power q (3 or 1 more than a multiple of 4)"
    )


def matrix(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The orthogonal matrix of ``transform``, [size, size]: a Hadamard matrix divided by sqrt(size)."""
    return transform(torch.eye(size, dtype=dtype)).T.contiguous()


def transform(x: Tensor) -> Tensor:
    """H x for every vector of x [..., n], in x's dtype, with H orthogonal; arithmetic is float32 (float64 if x is).

    H is the Kronecker product of A, order m by Paley, and S, order 2^k by Sylvester (``factor``).
    Under CUDA autocast, widths up to 4096 take one GEMM in the autocast dtype, which is much faster.
    """
    return _turned(x, back=False)


def inverse(x: Tensor) -> Tensor:
    """H^T x for every vector of x [..., n]: the inverse of ``transform``."""
    return _turned(x, back=True)


def _turned(x: Tensor, back: bool) -> Tensor:
    size, kind = x.shape[-1], x.device.type
    if kind == "cuda" and size <= MOST_DENSE and torch.is_autocast_enabled(kind):
        whole = _dense_signs(size, x.device, torch.get_autocast_dtype(kind))
        product: Tensor = (torch.matmul(x, whole.T if back else whole) * size**-0.5).to(x.dtype)
        return product
    order, power = factor(size)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(work).reshape(-1, order, power)
    stride = 1
    while stride < power:
        pairs = y.reshape(-1, order, power // (2 * stride), 2, stride)
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), dim=-2)
        y = y.reshape(-1, order, power)
        stride *= 2
    if order > 1:  # S is symmetric, and A is not
        own = _signs_on(order, y.device, y.dtype)
        y = torch.matmul(own.T if back else own, y)
    result: Tensor = (y * size**-0.5).reshape(x.shape).to(x.dtype)
    return result


@cache
def _dense_signs(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The transpose of the sign matrix (entries 1 and -1), [size, size]."""
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        whole: Tensor = (transform(torch.eye(size)) * size**0.5).round()
        return whole.to(device, dtype)


@cache
def _signs_on(order: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``signs`` on a device: a host copy in every call would stall a GPU, and cannot be captured in a CUDA graph."""
    with torch.inference_mode(False):  # inference tensors cannot be saved for backward
        return signs(order).to(device, dtype, copy=True)


@cache
def signs(order: int) -> Tensor:
    """Paley's matrix of an order, entries 1 and -1, float32 [order, order]."""
    found = _paley(order)
    assert found is not None
    return found


@cache
def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix of an order (a multiple of 4) by one of Paley's constructions, or None."""
    q = order - 1
    if q % 4 == 3 and (field := _prime_power(q)):
        residues = _residues(*field)
        skew = torch.zeros(order, order)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, residues
        return skew + torch.eye(order)
    q = order // 2 - 1
    if q % 4 == 1 and (field := _prime_power(q)):
        residues = _residues(*field)
        core = torch.zeros(q + 1, q + 1)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, 1, residues
        plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(core, plus) + torch.kron(torch.eye(q + 1), minus)
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with p^k = q and p an odd prime, or None."""
    p = next((d for d in range(3, math.isqrt(q) + 1, 2) if q % d == 0), q)
    k = round(math.log(q, p)) if q > 2 else 0
    return (p, k) if q > 2 and q % 2 and p**k == q else None


def _residues(p: int, k: int) -> Tensor:
    """Jacobsthal's matrix of GF(p^k): the quadratic character of a - b, [q, q]."""
    q = p**k
    elements = [_digits(number, p, k) for number in range(q)]
    number_of = {element: number for number, element in enumerate(elements)}
    modulus = _irreducible(p, k)
    character = torch.full((q,), -1.0)
    for element in elements:
        character[number_of[_multiply(element, element, modulus, p)]] = 1
    character[0] = 0
    digits = torch.tensor(elements)
    difference = (digits[:, None] - digits[None]) % p
    return character[(difference * p ** torch.arange(k)).sum(-1)]


def _digits(number: int, p: int, k: int) -> tuple[int, ...]:
    return tuple(number // p**i % p for i in range(k))


def _multiply(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], p: int) -> tuple[int, ...]:
    """The product of two polynomials modulo x^k + modulus, coefficients from low to high."""
    k = len(a)
    product = [0] * (2 * k - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    for top in range(2 * k - 2, k - 1, -1):
        for i, m in enumerate(modulus):
            product[top - k + i] -= product[top] * m
    return tuple(c % p for c in product[:k])


def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """The low coefficients of a monic irreducible polynomial of degree k <= 3 over GF(p): one without a root."""
    if k > 3:
        raise LayerError(f"finite fields of {p}^{k} elements are not supported; only squares and cubes of primes are")
    for number in range(p**k):
        low = _digits(number, p, k)
        if k == 1 or all((sum(c * x**i for i, c in enumerate(low)) + x**k) % p for x in range(p)):
            return low
    raise AssertionError("every finite field has an irreducible polynomial of every degree")
