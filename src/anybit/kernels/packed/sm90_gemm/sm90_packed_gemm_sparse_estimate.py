"""The cost model of sm90_packed_gemm's built-in choice for 2:4 sparse weights and int8 activations.

Half of the products but all of x: other limits than with dense weights dominate. The constants were fitted to 700
configs timed on an H200 (four layers, 1 to 4,096 tokens): docs/notes/2026-11-24-sparse.md.
"""

import math
from typing import NamedTuple

from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_ROWS
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import CLUSTERS, Config

_CYCLES = 1800
"""Per microsecond."""
_SHARPNESS = 6.2
"""The p of the p-norm that combines a step's overlapping limits: infinity would be their maximum."""

_STAGES_SHARED = 4
"""The fewest stages that neighbours (cluster_n) were timed with: each stage waits for both to have read it."""


class _Costs(NamedTuple):
    """Costs in cycles per step of 128 inputs, then in microseconds, then factors.

    product: per token and row tile.  issue: per row tile; issue_token: its relative growth per token.  intake: bytes
    per cycle.  chain, chain_token: latency of one warpgroup's waits, dequantization and products; unspanned: its factor
    in one-step stages.
    launch: per kernel.  around, around_tokens: per tile, and per 64 tokens of each of its row tiles.  meeting: per
    split-K warpgroup and 64 tokens.  cluster, sending: of split-K clusters, and per 64 tokens.  neighbour: of
    cluster_n = 2.  halving: of ``halves``.  few: saved by TMA stores with four row tiles and up to 64 tokens, per row
    tile.  beside: saved by two blocks per SM, which prefetch weights while the previous kernel runs.
    store: saved by TMA stores with two or three row tiles, per 64 tokens of a row tile beyond four of these; both:
    saved further if neighbours also share x; late: of TMA stores with ``block_tiles``.  alone: of a single warpgroup,
    whose latency nothing hides.  three: of three row tiles by 64 tokens without sharing, in one wave.
    """

    product: float = 1.74
    issue: float = 134.0
    issue_token: float = 0.004
    intake: float = 49.0
    chain: float = 185.0
    chain_token: float = 0.72
    unspanned: float = 1.49
    launch: float = 1.27
    around: float = 0.118
    around_tokens: float = 0.033
    meeting: float = 0.008
    cluster: float = 0.785
    sending: float = 0.224
    neighbour: float = 0.58
    halving: float = 1.67
    store: float = 0.012
    alone: float = 1.05
    both: float = 0.02
    few: float = 0.03
    late: float = 1.05
    beside: float = 0.1
    three: float = 0.9


_S8 = _Costs()


def estimate(problem: LinearProblem, config: Config) -> float:
    """Estimated microseconds of a config on an H200, in a chain of launches."""
    c, costs, tokens = config, _S8, config.tile_m
    rows = c.row_warpgroups - 0.5 * c.halves  # row tiles of a block
    tiles = -(-problem.weight_tiles * TILE_ROWS // c.rows) * -(-problem.m // tokens)
    waves = float(-(-tiles // CLUSTERS.get(c.cluster, 15)))
    if c.block_tiles:  # a range of row tiles, row_warpgroups at a time; the last round may be partial
        waves *= (c.block_tiles / c.row_warpgroups + -(-c.block_tiles // c.row_warpgroups)) / 2
    limits = (
        costs.product * tokens * rows,
        costs.issue * rows * (1 + costs.issue_token * tokens),
        (tokens * 128 + rows * c.tile_bytes) / costs.intake,
        (costs.chain + costs.chain_token * tokens) / c.split_k_warpgroups * (1 if c.span == 2 else costs.unspanned),
    )
    step = math.pow(sum(math.pow(limit, _SHARPNESS) for limit in limits), 1 / _SHARPNESS)
    held = rows * tokens / 64
    tile = problem.column_blocks / c.cluster_k * step / _CYCLES + costs.around + costs.around_tokens * held
    if c.split_k_warpgroups > 1:
        tile += costs.meeting * c.split_k_warpgroups * held
    if c.cluster_k > 1:
        tile += costs.cluster + costs.sending * c.split_k_warpgroups * held
    if c.warpgroups == 1:
        tile *= costs.alone
    if c.warpgroups == c.row_warpgroups == 3 and tokens == 64 and c.cluster == waves == 1 and c.span == 2:
        tile *= costs.three
    if c.tensor_store and c.row_warpgroups < 4:
        tile *= 1 - costs.store * max(0.0, held - 4)
        tile *= 1 - costs.both * (c.cluster_n > 1 and waves > 5 and c.stages >= _STAGES_SHARED)
    elif c.tensor_store and c.tile_m <= 64:
        tile -= costs.few * held
    elif c.tensor_store and c.block_tiles:
        tile *= costs.late
    at_hand = c.stages * c.span * c.cluster_k >= problem.column_blocks and c.prologue_stages == c.stages
    early = c.min_blocks_per_sm > 1 and c.cluster_k == 2 and at_hand and problem.device.sms // 2 < 2 * tiles
    around = costs.neighbour * (c.cluster_n - 1) + costs.halving * c.halves - costs.beside * early
    return costs.launch + waves * tile + around
