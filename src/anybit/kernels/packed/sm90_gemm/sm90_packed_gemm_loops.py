"""Main-loop variants of sm90_packed_gemm, chosen for a config: direct loads of weights in batches, unrolled stages."""

from dataclasses import replace

from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import Config, may_batch, may_unroll, most_registers


def batch(problem: LinearProblem, config: Config) -> int:
    """Config.direct: steps of weights per direct load to registers; 0: through shared memory.

    Measured at 64 and 48 tokens, K over two warpgroups (us: qkv 8.67 instead of 9.29, down 15.65 instead of 15.95; at
    48 tokens 7.79 instead of 8.23 and 13.6 instead of 14.1). At 16 and 32 tokens, and with int8, it is 3 to 9 % slower.
    """
    single = config.row_warpgroups == config.cluster_n == 1 and config.split_k_warpgroups == 2 and config.cluster_k <= 2
    if (
        not single
        or not may_batch(replace(config, prologue_stages=0))
        or config.bits > 4
        or config.tile_m not in (48, 64)
    ):
        return 0
    if problem.m > config.tile_m:
        return 0
    if problem.column_blocks >= 32 * config.cluster_k:
        return 3
    return 2 if config.bits < 4 or config.tile_m == 48 else 0  # o: 5.52 us instead of 5.87 at 48 tokens


def unrolls(config: Config) -> bool:
    """Whether to unroll the loop over stages, which saves an eighth of a step's instructions.

    16-bit activations in tiles of up to 96 tokens: 1.5 to 6.5 % (us: qkv at 32 and 128 tokens 6.50 instead of 6.95 and
    12.25 instead of 12.72, o at 64 and 128 6.11 instead of 6.31 and 9.40 instead of 9.67). No gain in tiles of 128,
    nor, with one block per SM, in two-step stages or tiles of 16.
    """
    if config.sparse and config.x_bytes == 1:  # 1 to 4 %
        return config.cluster_k < 4 and may_unroll(config)
    if config.sparse and not _unrolls_sparse(config):
        return False
    few = config.min_blocks_per_sm == 2 or (24 <= config.tile_m < 128 and config.span == 1)
    return few and config.cluster_k < 4 and config.x_bytes == 2 and may_unroll(config)


def _unrolls_sparse(config: Config) -> bool:
    """Whether nothing spills: for 2:4 sparse weights ptxas hoists the loads of many stages above the products."""
    slots, room = config.stages // config.split_k_warpgroups, most_registers(config)
    if config.min_blocks_per_sm == 2 and config.split_k_warpgroups == 2:
        return slots <= 3 and config.code.name == "sym"
    return slots <= (6 if room >= 160 else 4 if room >= 128 and config.cluster_k < 3 else 0)
