"""Y = X W^T for packed weights and many tokens, with wgmma: the host side of sm90_packed_gemm.cuh.

It computes Y^T = W X^T: weights, dequantized in registers, are wgmma's A operand (M = 64 rows), tokens its N dimension.
docs/design/packed.md has the measurements behind the choices here.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from anybit import jit
from anybit.errors import KernelError
from anybit.jit.tensor_map import Matrix
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_ROWS
from anybit.kernels.packed.packed_problem import facts
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import (
    MOST_BESIDE,
    TOKENS,
    may_unroll,
    most_registers,
    passes_codes_through,
    registers,
    tile_counts,
)
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import Config as Config
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import grid as grid
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import shared_bytes as shared_bytes
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import why_not as why_not

_EARLY_BYTES = 32 << 10
_RESIDENT = ((2, 2), (2, 1), (1, 2))
"""(split_k_warpgroups, cluster_k) that ``configs`` offers for two blocks per SM."""
_MOST_STAGES = 24
_MANY = 64
"""Token count above which legal configs do not depend on it, except those with ``halves``."""
_EPILOGUES = ((32, 2), (16, 2), (16, 1))
"""(epilogue_tile, epilogue_stages)."""
_NARROW = 64
"""Token tiles up to this width usually take two k blocks per stage."""
_MOST_WAVES = 4
"""Waves up to which giving each block one even range of row tiles is worth trying."""
_LOOPS = ((1, False, 0), (2, False, 0), (1, True, 0), (2, True, 0), (1, False, 2), (1, False, 3))
"""(span, unrolled, direct) of a main loop."""
_SHARINGS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2))


class Params(jit.Params, header="packed/sm90_gemm/sm90_packed_gemm_shape.cuh"):
    """The arguments of one launch."""


class StoreParams(Params, header="packed/sm90_gemm/sm90_packed_gemm_shape.cuh"):
    """The arguments of a launch that stores y by TMA."""


def config_for(
    problem: LinearProblem, tile_m: int, row_warpgroups: int, split_k_warpgroups: int = 1, cluster_k: int = 1,
    cluster_n: int = 1, stages: int | None = None, halves: bool = False, min_blocks_per_sm: int = 1,
    direct: int | None = None, unrolled: bool | None = None, block_tiles: int = 0, tensor_store: bool = False,
    span: int | None = None,
) -> Config:  # fmt: skip
    """A config with these tiles. stages: None for as many as fit, at most 24.  unrolled, span: None: the usual."""
    config = Config(
        **facts(problem, Config), tile_m=tile_m, row_warpgroups=row_warpgroups, split_k_warpgroups=split_k_warpgroups,
        cluster_k=cluster_k, cluster_n=cluster_n, stages=stages or 2 * split_k_warpgroups, halves=halves,
        min_blocks_per_sm=min_blocks_per_sm, block_tiles=block_tiles, tensor_store=tensor_store, direct=direct or 0,
        prologue_stages=0,
    )  # fmt: skip
    shared = problem.device.shared_bytes if min_blocks_per_sm == 1 else MOST_BESIDE

    pairs = problem.k_blocks % 2 == 0 and not (config.promotes or direct or stages)
    for each in (span,) if span else (2, 1) if pairs and cluster_n == 1 and tile_m <= _NARROW else (1,):
        most = 0 if stages else min(_MOST_STAGES, -(-problem.k_blocks // each // cluster_k))
        found = _fitted(replace(config, span=each), most, shared)
        if why_not(problem, found) is None:
            break
    if unrolled is None:
        unrolled = may_unroll(found) and found.x_bytes == 2 and found.span == 1 and not found.sparse
    return replace(found, unrolled=unrolled)


@lru_cache(maxsize=1 << 14)
def _fitted(config: Config, most: int, shared: int) -> Config:
    """The config with registers and shared memory allocated; stages: as many as fit, up to ``most`` unless that is 0.

    Memoized, since searches ask for the same few hundred tiles for every layer.
    """
    # Registers: first reallocate the producer's, then make do with one set of dequantized weights.
    ways = ((1, False), (1, True)) if passes_codes_through(config) else ((2, False), (2, True), (1, True))
    for sets, reallocates in ways:
        spare = reallocates and config.warpgroups > 1 and config.min_blocks_per_sm == 1
        config = replace(config, register_sets=sets, reallocates=spare)
        if registers(config) <= most_registers(config):
            break
    split = config.split_k_warpgroups
    if most:
        depths = range(max(2 * split, most) // split * split, split, -split)
        tried = itertools.product(depths, _EPILOGUES)
        for stages, (tile, buffers) in tried:
            config = replace(config, stages=stages, epilogue_tile=tile, epilogue_stages=buffers)
            if shared_bytes(config) <= shared:
                break
    if whole := 2 * config.direct * split:  # rounds of batches: stages are unrolled
        stages = min(config.stages, 12) // whole * whole if most else config.stages
        return replace(config, stages=stages or config.stages)
    # X queues behind the weights requested before it: prefetch just enough to keep memory busy.
    early = max(2, _EARLY_BYTES // (config.span * config.row_warpgroups * config.tile_bytes))
    return replace(config, prologue_stages=min(config.stages, early))


def refit(problem: LinearProblem, config: Config) -> Iterator[Config]:
    """A config of another problem for this one: other registers, then one step a stage, then fewer and fewer stages."""
    for span in dict.fromkeys((config.span, 1)):
        for sets, reallocates in ((config.register_sets, config.reallocates), (2, True), (1, True), (1, False)):
            spare = reallocates and config.warpgroups > 1 and config.min_blocks_per_sm == 1
            one = replace(config, span=span, register_sets=sets, reallocates=spare)
            for stages in range(config.stages, 1, -1):
                ahead = min(one.prologue_stages, stages)
                yield replace(one, stages=stages, prologue_stages=ahead, unrolled=one.unrolled and sets > 1)


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config with token tiles that suit m, for a search."""
    for tile_m in TOKENS:
        # Several narrow token tiles read the weights more than once (o at 64 tokens: 9.2 us, and 7.0 in one tile).
        if (tile_m > 16 and tile_m >= 2 * problem.m) or (tile_m < 48 and tile_m < problem.m):
            continue
        for row_warpgroups in (1, 2, 3, 4):
            alike = problem if problem.m <= _MANY else replace(problem, m=_MANY + 1)
            yield from _of_tiles(alike, tile_m, row_warpgroups)
            if problem.weights.sparse and row_warpgroups > 1 and tile_m >= 64:
                yield from _many_tokens(problem, tile_m, row_warpgroups)
            if row_warpgroups == 4 and problem.m <= 128:
                found = config_for(problem, tile_m, row_warpgroups, halves=True)
                if why_not(problem, found) is None:
                    yield found
        for split_k_warpgroups, cluster_k in _RESIDENT if problem.m <= 64 else ():
            found = config_for(problem, tile_m, 1, split_k_warpgroups, cluster_k, min_blocks_per_sm=2)
            if why_not(problem, found) is None:
                yield found


@lru_cache(maxsize=1 << 12)
def _of_tiles(problem: LinearProblem, tile_m: int, row_warpgroups: int) -> tuple[Config, ...]:
    """Legal configs of these tiles, over all ways to share K or x, and main loops. Memoized: searches ask again."""
    found = [
        config_for(problem, tile_m, row_warpgroups, split, *shared, unrolled=unrolled, span=span, direct=direct)
        for split in (1, 2, 3, 4)
        if row_warpgroups * split <= 4
        for shared in _SHARINGS
        for span, unrolled, direct in _LOOPS
    ]
    return tuple(dict.fromkeys(config for config in found if why_not(problem, config) is None))


def _many_tokens(problem: LinearProblem, tile_m: int, row_warpgroups: int) -> Iterator[Config]:
    """Configs for 2:4 sparse weights with TMA stores, x shared or not; with four row tiles also ``block_tiles``."""
    tried = [config_for(problem, tile_m, row_warpgroups, cluster_n=n, tensor_store=True) for n in (1, 2)]
    if row_warpgroups == 4:
        token_tiles, sms = -(-problem.m // tile_m), problem.device.sms
        waves = -(-(-(-problem.weight_tiles // 4) * token_tiles) // sms)
        even = -(-problem.weight_tiles // max(1, sms // token_tiles))
        if 1 < waves <= _MOST_WAVES and 4 < even < 4 * waves:
            tried += [config_for(problem, tile_m, 4, block_tiles=even, tensor_store=by_map) for by_map in (True, False)]
    yield from (found for found in tried if why_not(problem, found) is None)


@lru_cache(maxsize=4096)
def default(problem: LinearProblem) -> Config:
    """The legal config with the least ``estimate``. Raises KernelError if there is none."""
    if best := min(configs(problem), key=lambda config: estimate(problem, config), default=None):
        return best
    raise KernelError(f"sm90_packed_gemm cannot take {problem}: {why_not(problem) or 'no config is legal'}")


def estimate(problem: LinearProblem, config: Config) -> float:
    """The relative time of a config, to rank a space by: waves of tiles, each as long as its k blocks and epilogue."""
    blocks = math.prod(tile_counts(problem, config)) * config.cluster
    waves = -(-blocks // (problem.device.sms * config.min_blocks_per_sm))
    step = max(config.row_warpgroups * (64 + config.tile_m), 256 / config.split_k_warpgroups)
    return waves * step * (problem.k_blocks / config.cluster_k + 12) / (1 if config.span == 1 else 1.05)


def kernel(config: Config, silu: bool = False) -> jit.Kernel:
    """The kernel of a config, for jit.

    silu: with a SiLU epilogue (``Traits``), bitwise equal to ``ops.elementwise.silu_mul``; n must be a multiple of 16,
    tensor_store False.
    """
    return jit.Kernel(
        header="packed/sm90_gemm/sm90_packed_gemm.cuh",
        entry="packed::sm90_packed_gemm" + "_store" * config.tensor_store + "<Gate::silu>" * silu,
        config=config,
        params=StoreParams if config.tensor_store else Params,
        threads=config.threads,
        shared_bytes=shared_bytes(config),
        cluster=config.cluster,
    )


def _silu(config: Config) -> jit.Kernel | None:
    return None if config.tensor_store else kernel(config, silu=True)


def arguments(operands: Operands, problem: LinearProblem, config: Config) -> Params:
    """The Params of a launch, unchecked: x [m, k] in the tiles' column order, on 16 bytes -> y [m, n], dense.

    x_sum: the sums of integer codes, needed for whole-row weights.
    """
    o, p, size = operands, problem, 1 if problem.activations.quantized else 2
    sizes = p.m, p.n, p.k_blocks, p.weight_tiles, *tile_counts(problem, config), max(1, 4096 // config.rows)
    shared = *boxes(config, o.x, p.m, p.k, o.x_stride * size), *o.weight[:3], o.x_scale, o.x_sum, o.bias, o.y, *sizes
    if not config.tensor_store:
        return Params(*shared, 0, None, None, 0)
    return StoreParams(*shared, 0, None, None, 0, Matrix(o.y, 2, p.m, p.n, 2 * o.y_stride, TILE_ROWS, config.tile_m))


def boxes(config: Config, x: jit.Pointer, rows: int, k: int, pitch: int) -> tuple[Matrix, Matrix]:
    """Tensor maps of x [rows, k], ``pitch`` bytes a row: for whole token tiles, and for a partial one."""
    size, heights = config.x_bytes, (config.tile_m // config.cluster_n, config.tail_rows or 8)
    whole, tail = (Matrix(x, size, rows, k, pitch, 128 // size, height) for height in heights)
    return whole, tail


traits = Traits("sm90_packed_gemm", Target.bytes, arguments, silu=_silu)
