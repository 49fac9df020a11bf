"""What sm90_packed_gemm's built-in choice goes by for 2:4 sparse weights and int8 activations: an estimate of its own.

Half of the products, and all of x: other limits than those of dense weights decide. Sixteen numbers, fitted to 700
configs that an H200 timed (four layers, 1 to 4,096 tokens): docs/notes/2026-11-24-sparse.md.
"""

import math
from typing import NamedTuple

from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.kernels.gemm.packed_layout import TILE_ROWS
from anybit.kernels.gemm.sm90_packed_gemm_rules import CLUSTERS, Config

_CYCLES = 1800
"""Of a microsecond."""
_SHARPNESS = 6.2
"""How nearly the longest of what a step does at once is all of it."""

_STAGES_SHARED = 4
"""The fewest that neighbours were timed with: each waits for what both have read."""


class _Costs(NamedTuple):
    """Cycles of a step of 128 inputs, and microseconds.

    product: a token and row tile.  issue: a row tile, and its part more a token.  intake: bytes a cycle.  chain, and
    chain_token: of one warpgroup's waits, dequantizing and products; unspanned: of it, where a stage holds one step.
    launch: of a kernel.  around, around_tokens: a tile, and 64 tokens of each of its row tiles.  meeting: of
    warpgroups along K, 64 tokens.  cluster, sending: of blocks along K, and 64 tokens.  neighbour: of one that shares
    x.  halving.  store: the part that a tensor map saves of tiles of two or three row tiles, for 64 tokens beyond four
    times as many; both: where neighbours load x for each other, too; few: of four row tiles and up to 64 tokens, us a
    row tile; late: what it costs where a block has a range of rows.  alone: of one warpgroup, which nobody covers.
    beside: what two blocks a multiprocessor save: a product's weights are read while the one ahead is at work.
    three: of three row tiles by 64 tokens, which nothing shares, in one wave.
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
    """About how many microseconds a config takes on an H200, between others in a chain."""
    c, costs, tokens = config, _S8, config.tile_m
    rows = c.row_warpgroups - 0.5 * c.halves  # row tiles of a block
    tiles = -(-problem.weight_tiles * TILE_ROWS // c.rows) * -(-problem.m // tokens)
    waves = float(-(-tiles // CLUSTERS.get(c.cluster, 15)))
    if c.block_tiles:  # a range of row tiles, some at a time: of the last ones others wait for a part
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
