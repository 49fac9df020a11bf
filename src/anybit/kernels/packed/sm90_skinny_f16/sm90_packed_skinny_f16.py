"""y = x W^T for about 3 to 32 tokens of 16-bit activations. Host side of sm90_packed_skinny_f16.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from anybit import jit
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.gemm_kernel import Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed import packed_problem as few
from anybit.kernels.packed.packed_layout import UNIT_ROWS, round_up
from anybit.kernels.packed.packed_problem import FewFacts, Params, arguments

MOST_TOKENS = 32
"""Most tokens: above, sums take too many registers, and sm90_packed_gemm is faster."""


@dataclass(frozen=True)
class Config(FewFacts):
    """A kernel config. wide_store (from the problem): four results per store.

    tile_m: MMA columns, a multiple of 8. row_warps x split_k_warps: warps of a block, along N and K. block_units: most
    units of 16 rows per block; stage_units: per copy, of which a warp takes ``chunks``. stages: depth of a warp's
    pipeline; prologue_stages: copies issued at once, the others as these land.
    x_stages: blocks of 128 columns of activations in shared memory per split-K warp. cluster_k: blocks that split K.
    min_blocks_per_sm: bounds registers. min_shared_bytes: see ``heuristics.limit_occupancy``.
    """

    wide_store: bool
    tile_m: int
    row_warps: int
    split_k_warps: int
    block_units: int
    stage_units: int
    chunks: int
    stages: int
    x_stages: int
    prologue_stages: int
    cluster_k: int = 1
    min_blocks_per_sm: int = 1
    min_shared_bytes: int = 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.split_k_warps


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = few.why_not_few(problem, MOST_TOKENS, "sm90_packed_gemm.py")
    if reason is not None or config is None:
        return reason
    return _why_not_tile(config) or few.why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(c: Config) -> str | None:
    if c.tile_m % 8 or c.tile_m % c.cluster_k:
        return f"tile_m must be a multiple of 8 that {c.cluster_k} blocks can share evenly, not {c.tile_m}"
    if c.split_k_warps > 15:
        return f"split_k_warps must be at most 15, not {c.split_k_warps}"
    if c.cluster_k not in (1, 2, 4):
        return f"a cluster has 1, 2 or 4 blocks, not {c.cluster_k}"
    if -(-c.block_units // c.row_warps) > c.stage_units * c.chunks:
        return f"{c.chunks} chunks of {c.stage_units} units are less than {c.block_units} over {c.row_warps} warps"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: weight and activation pipelines (reused for sums); factors; received sums; barriers."""
    c = config
    rows = c.block_units * UNIT_ROWS
    body = (
        c.warps * round_up(c.stages * c.stage_units * c.unit_bytes, 128) + c.split_k_warps * c.x_stages * c.tile_m * 272
    )
    sums = c.split_k_warps * c.tile_m * (rows + 4) * 4
    received = (c.cluster_k - 1) * (c.tile_m // c.cluster_k) * rows * 4
    barriers = (c.warps * c.stages + c.split_k_warps * c.x_stages + 1) * 8
    return max(round_up(max(body, sums), 128) + rows * 8 + received + barriers, c.min_shared_bytes)


traits = Traits("sm90_packed_skinny_f16", Target.bytes, arguments, gathers=True)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    c, name = config, traits.name
    return jit.Kernel(f"packed/sm90_skinny_f16/{name}.cuh", name, c, Params, c.warps * 32, shared_bytes(c), c.cluster_k)


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """At most a block (or a cluster's share) per SM, if that covers the rows."""
    units = problem.units
    owners = max(min(problem.device.clusters(config.cluster_k), units), -(-units // config.block_units))
    return owners * config.cluster_k, 1, 1


def fitted(
    p: LinearProblem, row_warps: int, k_warps: int, stage_units: int, kibibytes: int, x_stages: int, cluster: int = 1,
    prefetch: int = 0, min_blocks_per_sm: int = 1,
) -> Config:  # fmt: skip
    """A config with these warps, and pipelines of about ``kibibytes``. prefetch: prologue_stages; 0: automatic."""
    units = -(-p.units // p.device.clusters(cluster))
    row_warps = min(row_warps, units)
    mine = -(-units // row_warps)
    if mine > _MOST_UNITS:
        mine, units = _MOST_UNITS, _MOST_UNITS * row_warps
    stage_units = min(stage_units, mine)
    chunks, rounds = -(-mine // stage_units), -(-p.k_blocks // (k_warps * cluster))
    stage = row_warps * k_warps * stage_units * packed_layout.unit_bytes(p.weights)
    stages, prologue = few.ring(kibibytes << 10, stage, rounds * chunks, prefetch)
    return Config(
        **few.facts(p, Config), tile_m=round_up(p.m, 8), row_warps=row_warps, split_k_warps=k_warps, block_units=units,
        stage_units=stage_units, chunks=chunks, stages=stages, x_stages=max(1, min(x_stages, rounds)),
        prologue_stages=prologue, cluster_k=cluster, min_blocks_per_sm=min_blocks_per_sm,
    )  # fmt: skip


_MOST_UNITS = 8
"""Of a warp: its sums stay in registers."""
_WARPS = ((1, 8), (2, 4), (4, 2), (2, 8), (4, 4), (7, 2), (7, 1), (1, 4))
"""(row_warps, split_k_warps)."""


def refit(p: LinearProblem, c: Config) -> Iterator[Config]:
    """A config of another problem for this one: the same warps and copies, with less and less shared memory."""
    for size in few.sizes(c, c.stage_units):
        warps = c.row_warps, c.split_k_warps, c.stage_units
        yield fitted(p, *warps, size, c.x_stages, c.cluster_k, c.prologue_stages, c.min_blocks_per_sm)


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    shapes = itertools.product(_WARPS, (1, 2), (1, 2), (48, 72, 96), (1, 2, 4))
    candidates = (fitted(problem, *warps, units, size, x, cluster) for warps, units, cluster, size, x in shapes)
    return few.legal(problem, default(problem), why_not, candidates)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Pipelines of as much shared memory as fits, where nothing was measured. Raises KernelError if there is none."""
    return packed_layout.first_legal(problem, (fitted(problem, 4, 2, 2, size, 2) for size in few.SIZES), why_not)
