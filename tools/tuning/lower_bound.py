"""A lower bound on a config's time, used to skip configs that provably lose.

Two limits of the busiest SM, both at the highest clock and without prologue or epilogue: its tensor core
operations, including those on padding rows and tokens, and the bytes it reads. Tiles are split
only as the config says, so with 133 tiles one of 132 SMs has two.
"""

from collections.abc import Callable
from dataclasses import replace

from anybit.choose.families import FAMILIES, Candidate
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import SkinnyFacts
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Stationary
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.tune.roofline import floor_us

_CLOCK = 1.98e3
"""Cycles per microsecond: the highest clock of an H200."""
_OPERATIONS = {"b1": 65536, "s8": 8192, "f16": 4096}
"""Multiplications and additions per SM and cycle; e4m3's are those of s8."""
_INTAKE = 64
"""Bytes per cycle that an SM reads from L2."""


def lower_bound_us(product: LinearProblem, candidate: Candidate) -> float:
    """Microseconds that no launch of ``candidate`` can beat, on a GPU like the H200, activations already quantized."""
    bound = _BOUNDS.get(candidate.kernel)
    if bound is None or product.device.arch != "sm_90a":
        return 0.0
    effective = replace(product, activations=candidate.activations)
    return max(floor_us(effective) * _SURELY, bound(effective, candidate.config) / _CLOCK)


_SURELY = 0.7
"""Of the floor, whose rates were measured under load: a margin for clocks."""


def _cycles(pieces: int, sms: int, operations: float, rate: int, taken: float) -> float:
    """Cycles of the SM with most pieces, each of so many operations and bytes read."""
    return -(-pieces // sms) * max(operations / rate, taken / _INTAKE)


def _bitplane_gemm(product: LinearProblem, config: sm90_bitplane_gemm.Config) -> float:
    p, q, k, sms = product.weights.bits, product.activations.bits, product.k, product.device.sms
    cut = config.tile_m // config.tail_tile_m if config.tail_tile_m else 1
    tiles = -(-product.m // config.tile_m) * -(-product.n // 128)
    operations = 2.0 * config.tile_m * 128 * k * p * q
    taken = (128 * p + (0 if config.activation_stationary else config.tile_m * q)) * k / 8
    if cut > 1:  # whole tiles for all SMs, and the rest split
        whole = tiles // sms * max(operations / _OPERATIONS["b1"], taken / _INTAKE)
        return whole + _cycles(tiles % sms * cut, sms, operations / cut, _OPERATIONS["b1"], 0.0)
    return _cycles(tiles, sms, operations, _OPERATIONS["b1"], taken)


def _bitplane_skinny(product: LinearProblem, config: SkinnyFacts) -> float:
    p, q, k = product.weights.bits, product.activations.bits, product.k
    shared = getattr(config, "cluster_k", 1)
    pieces = -(-product.m // config.tile_m) * -(-product.n // config.tile_n) * shared
    taken = (config.tile_n * p + config.tile_m * q) * k / 8 / shared
    operations = 2.0 * config.tile_n * config.tile_m * k * p * q / shared
    return _cycles(pieces, product.device.sms, operations, _OPERATIONS["b1"], taken)


def _bitplane_stacked(product: LinearProblem, config: sm90_bitplane_stacked.Config) -> float:
    p, q, k = product.weights.bits, product.activations.bits, product.k
    tiles = -(-product.m // config.tile_m) * -(-product.n // 128)
    weights = 0 if config.stationary is Stationary.weights else 128 * p
    tokens = 0 if config.stationary is Stationary.activations else config.tile_m * q
    operations = 2.0 * config.tile_m * 128 * k * p * q
    return _cycles(tiles, product.device.sms, operations, _OPERATIONS["b1"], (weights + tokens) * k / 8)


def _large(product: LinearProblem, config: sm90_packed_gemm.Config) -> float:
    w = product.weights
    rows, rate = 64 * config.row_warpgroups, _OPERATIONS["f16" if config.x_bytes == 2 else "s8"]
    pieces = -(-product.m // config.tile_m) * -(-product.n // rows) * config.cluster_k
    k = product.k / config.cluster_k
    share, bits = (0.5, (w.bits + 2) / 2) if w.sparse else (1.0, w.bits)
    taken = (rows * bits / 8 + config.tile_m * config.x_bytes) * k
    return _cycles(pieces, product.device.sms, 2.0 * share * rows * config.tile_m * k, rate, taken)


_BOUNDS: dict[str, Callable[[LinearProblem, object], float]] = {
    "sm90_bitplane_gemm": _bitplane_gemm,  # type: ignore[dict-item]
    "sm90_bitplane_skinny": _bitplane_skinny,  # type: ignore[dict-item]
    "sm90_bitplane_resident": _bitplane_skinny,  # type: ignore[dict-item]
    "sm90_bitplane_stacked": _bitplane_stacked,  # type: ignore[dict-item]
    "sm90_packed_gemm": _large,  # type: ignore[dict-item]
}
assert set(_BOUNDS) <= set(FAMILIES)
