"""Y = X W^T for packed weights and many tokens, with wgmma: the host side of sm90_packed_gemm.cuh.

It computes Y^T = W X^T: weights, dequantized in registers, are wgmma's A operand (M = 64 rows), tokens its N dimension.
docs/notes/2026-11-24-packed.md has the measurements behind the choices here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from anybit.errors import KernelError
from anybit.jit import Int32, Kernel, Pointer
from anybit.jit.tensor_map import Matrix, TensorMap
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.common.types import Code, Operand
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.packed_layout import TILE_ROWS, tile_bytes
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_estimate import estimate, spans
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_loops import batch, unrolls
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import (
    MOST_BESIDE,
    TOKENS,
    Config,
    grid,
    most_registers,
    passes_codes_through,
    registers,
    shared_bytes,
    tile_counts,
    why_not,
)

__all__ = [
    "Code",
    "Config",
    "Operand",
    "Params",
    "arguments",
    "config_for",
    "configs",
    "default",
    "estimate",
    "grid",
    "kernel",
    "shared_bytes",
    "traits",
    "why_not",
]

_EARLY_BYTES = 32 << 10
_RESIDENT = ((2, 2), (2, 1), (1, 2))
"""(split_k_warpgroups, cluster_k) that ``configs`` offers for two blocks per SM."""
_MOST_STAGES = 24
_SPARSE_STAGES = 4
"""Two-step stages per split-K warpgroup, for 2:4 sparse weights and int8: down at 16 tokens 7.3 us, with seven 7.6."""
_STAGES_OF_THREE, _SHORT = 5, 32
"""With three row tiles by 64 tokens, 5 two-step stages are too few for up to 32 steps of K: qkv at 128 tokens 7.2 us
(10.3 with quantization), with eleven one-step stages 7.0 (8.7). But 10240 x 8192 at 64 tokens: 10.8, and 11.5."""
_MANY = 64
"""Token count above which legal configs do not depend on it, except those with ``halves``."""
_STAGGER = 250
"""Cycles between the warpgroups' starts in large token tiles; saves 1 to 2 %."""
_MOST_WAVES = 4
"""Waves up to which giving each block one even range of row tiles is worth trying."""
_SHARINGS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2))


@dataclass(frozen=True)
class Params:
    """The arguments of one launch; see the struct of the same name."""

    x: TensorMap
    x_tail: TensorMap
    tiles: Pointer
    row_scale: Pointer
    row_zero: Pointer
    x_scale: Pointer
    x_sum: Pointer
    bias: Pointer
    y: Pointer
    unused: Pointer
    unused_too: Pointer
    tokens: Int32
    rows: Int32
    units: Int32
    weight_tiles: Int32
    row_tiles: Int32
    token_tiles: Int32
    raster: Int32


@dataclass(frozen=True)
class StoreParams(Params):
    """The arguments of a launch that stores y by TMA."""

    y_map: TensorMap


def config_for(
    problem: LinearProblem,
    tile_m: int,
    row_warpgroups: int,
    split_k_warpgroups: int = 1,
    cluster_k: int = 1,
    cluster_n: int = 1,
    stages: int | None = None,
    halves: bool = False,
    min_blocks_per_sm: int = 1,
    direct: int | None = None,
    unrolled: bool | None = None,
    block_tiles: int = 0,
    tensor_store: bool = False,
) -> Config:
    """A config with these tiles. stages: None for as many as fit, at most 24.  direct: None for ``batch``."""
    weights = problem.weights
    config = Config(
        problem.operand, weights.bits, weights.group or packed_layout.tile_group(weights), Code[weights.code],
        problem.dtype == torch.bfloat16,
        tile_bytes(weights), tile_m, row_warpgroups, split_k_warpgroups, cluster_k, cluster_n,
        stages or 2 * split_k_warpgroups, halves=halves, min_blocks_per_sm=min_blocks_per_sm, sparse=weights.sparse,
        block_tiles=block_tiles, tensor_store=tensor_store, stagger=_STAGGER if tensor_store else 0,
    )  # fmt: skip
    shared = problem.device.shared_bytes if min_blocks_per_sm == 1 else MOST_BESIDE
    most = 0 if stages else min(_MOST_STAGES, -(-problem.column_blocks // cluster_k))
    if count := direct if direct is not None else 0 if stages else batch(problem, config):
        found = _fitted(replace(config, direct=count, prologue_stages=0), most, shared)
        if direct or found.register_sets == 2:
            return found
    fitted = _fitted(config, most, shared)
    if not stages and spans(problem, config):
        most = min(_MOST_STAGES, -(-problem.column_blocks // 2 // cluster_k))
        if config.sparse and config.x_bytes == 1 and split_k_warpgroups > 1:
            most = min(most, _SPARSE_STAGES * split_k_warpgroups)
        found = _fitted(replace(config, span=2), most, shared)
        three = config.sparse and config.x_bytes == 1 and (tile_m, row_warpgroups, cluster_k) == (64, 3, 2)
        three = three and problem.column_blocks <= _SHORT
        fitted = found if found.stages > max(_STAGES_OF_THREE if three else 2, split_k_warpgroups) else fitted
    return replace(fitted, unrolled=unrolls(fitted) if unrolled is None else unrolled)


@lru_cache(maxsize=1 << 14)
def _fitted(config: Config, most: int, shared: int) -> Config:
    """The config with registers and shared memory allocated; stages: as many as fit, up to ``most`` unless that is 0.

    Memoized, since searches and built-in choices ask for the same few hundred tiles for every layer.
    """
    # Registers: first reallocate the producer's, then make do with one set of dequantized weights.
    ways = ((1, False), (1, True)) if passes_codes_through(config) else ((2, False), (2, True), (1, True))
    for sets, reallocates in ways:
        if (sets, reallocates) != (2, False):
            config = replace(
                config,
                register_sets=sets,
                reallocates=reallocates and config.warpgroups > 1 and config.min_blocks_per_sm == 1,
            )
        if registers(config) <= most_registers(config):
            break
    if most:
        stages, staged, places = _staging(config, most, shared)
        whole = 2 * config.direct * config.split_k_warpgroups  # whole rounds of batches: stages are unrolled
        stages = min(stages, 12) // whole * whole or stages if whole else stages
        config = replace(config, stages=stages, epilogue_tile=staged, epilogue_stages=places)
    if config.direct:
        return config
    # X queues behind the weights requested before it: prefetch only enough to keep memory busy until x is available.
    early = max(2, _EARLY_BYTES // (config.row_warpgroups * config.tile_bytes))
    if config.tensor_store and config.tile_m >= 128:
        early = 0  # saves 1 to 2 % in w4a8, and in w4a16 at 256 and 4,096 tokens
    if config.span > 1:
        if config.x_bytes == 1 and config.sparse:
            early = _early_sparse(config)
        elif config.x_bytes == 1:
            early = 2 if config.tile_m * config.row_warpgroups >= 256 else 4
        elif config.sparse and config.row_warpgroups == 4 and not config.halves:
            early = 2 if config.tile_m == 16 else 1
        elif config.tile_m > 16:
            early = 1 if config.halves and config.tile_m > 32 else 3 if config.split_k_warpgroups == 4 else 2
        else:
            early = 2 if config.halves else config.stages // 2 if config.min_blocks_per_sm > 1 else 4
    elif config.x_bytes == 1 and config.sparse and (config.tile_m, config.row_warpgroups) == (64, 3):
        early = 5
    elif config.x_bytes == 2 and 48 <= config.tile_m <= 64:
        early = min(early, 3)
    elif config.halves:
        early = 3
    elif config.min_blocks_per_sm > 1:
        early = max(2, config.stages // 2)
    return replace(config, prologue_stages=min(config.stages, early))


def _early_sparse(c: Config) -> int:
    """prologue_stages for 2:4 sparse weights and int8, in two-step stages (comments: us, and with other values)."""
    if c.min_blocks_per_sm > 1:
        return c.stages  # o at 16 tokens 3.42, with half of them 3.63
    if c.tile_m <= 32 and c.cluster_k == 1 and c.split_k_warpgroups > 2:
        return max(4, c.stages // 2)  # qkv at 16 and 32 tokens 4.24 and 4.52, with four 4.42 and 4.64
    if c.tile_m == 64 and c.row_warpgroups in (2, 3):  # o at 256 7.24, with two 7.55; 10240 x 8192 at 64 10.8, 11.2
        return 4 if c.split_k_warpgroups > 1 else 3
    return 2 if c.tile_m >= 64 and c.row_warpgroups > 1 else 4


def _staging(config: Config, most: int, shared: int) -> tuple[int, int, int]:
    """(stages, epilogue_tile, epilogue_stages): as many stages as fit shared memory, then as much epilogue staging."""
    rooms = ((32, 2), (16, 2), (16, 1))
    least = 2 * config.split_k_warpgroups
    # Where the pipeline dominates, bytes are linear in stages, so two sizes tell how many fit.
    tight = replace(config, stages=64, epilogue_tile=rooms[-1][0], epilogue_stages=rooms[-1][1])
    size = shared_bytes(tight)
    step = size - shared_bytes(replace(tight, stages=63))
    stages = min(max(least, most), max(least, 64 - -(-max(0, size - shared) // step)))
    stages = max(stages // config.split_k_warpgroups, 2) * config.split_k_warpgroups
    for staged, places in rooms[:-1]:
        if shared_bytes(replace(config, stages=stages, epilogue_tile=staged, epilogue_stages=places)) <= shared:
            return stages, staged, places
    return stages, *rooms[-1]


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
    """Legal configs of these tiles, over all ways to share K or x. Memoized: servers ask for every token count."""
    found = [
        config_for(problem, tile_m, row_warpgroups, split_k_warpgroups, cluster_k, cluster_n)
        for split_k_warpgroups in (1, 2, 3, 4)
        if row_warpgroups * split_k_warpgroups <= 4
        for cluster_k, cluster_n in _SHARINGS
    ]
    return tuple([config for config in found if why_not(problem, config) is None])


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
def default(problem: LinearProblem, most_blocks_per_sm: int = 2) -> Config:
    """The legal config with the lowest ``estimate``. Raises KernelError if there is none."""
    found = (config for config in configs(problem) if config.min_blocks_per_sm <= most_blocks_per_sm)
    best = min(found, key=lambda config: estimate(problem, config), default=None)
    if best is None:
        raise KernelError(f"sm90_packed_gemm cannot take {problem}: {why_not(problem) or 'no config is legal'}")
    return best


def kernel(config: Config, silu: bool = False) -> Kernel:
    """The kernel of a config, for jit.

    silu: with a SiLU epilogue (``Traits``), bitwise equal to ``ops.elementwise.silu_mul``; n must be a multiple of 16,
    tensor_store False.
    """
    return Kernel(
        header="packed/sm90_gemm/sm90_packed_gemm.cuh",
        entry="packed::sm90_packed_gemm" + "_store" * config.tensor_store + "_silu" * silu,
        config=config,
        params=StoreParams if config.tensor_store else Params,
        threads=config.threads,
        shared_bytes=shared_bytes(config),
        cluster=config.cluster,
    )


def _silu(config: Config) -> Kernel | None:
    return None if config.tensor_store else kernel(config, silu=True)


def arguments(operands: Operands, problem: LinearProblem, config: Config) -> Params:
    """The Params of a launch, unchecked: x [m, k] in the tiles' column order, on 16 bytes -> y [m, n], dense.

    x_sum: the sums of integer codes, needed for whole-row weights.
    """
    o, p, size = operands, problem, 1 if problem.activations.quantized else 2
    row_tiles, token_tiles = tile_counts(problem, config)
    # Boxes of x: for whole token tiles, and for a partial one.
    whole, tail = (
        Matrix(o.x, size, p.m, p.k, o.x_stride * size, 128 // size, rows)
        for rows in (config.tile_m // config.cluster_n, config.tail_rows or 8)
    )
    stored = {}
    if config.tensor_store:
        stored["y_map"] = Matrix(o.y, 2, p.m, p.n, 2 * o.y_stride, TILE_ROWS, config.tile_m)
    return (StoreParams if config.tensor_store else Params)(
        x=whole,
        x_tail=tail,
        tiles=o.weight[0],
        row_scale=o.weight[1],
        row_zero=o.weight[2],
        x_scale=o.x_scale,
        x_sum=o.x_sum,
        bias=o.bias,
        y=o.y,
        unused=None,
        unused_too=None,
        tokens=p.m,
        rows=p.n,
        units=p.column_blocks,
        weight_tiles=p.weight_tiles,
        row_tiles=row_tiles,
        token_tiles=token_tiles,
        raster=max(1, 4096 // config.rows),
        **stored,
    )


traits = Traits("sm90_packed_gemm", Target.bytes, arguments, silu=_silu)
