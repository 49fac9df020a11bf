"""How a block of sm90_packed_gemm goes through its ring, chosen for a config: weights in batches, unrolled stages."""

from dataclasses import replace

from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.kernels.gemm.sm90_packed_gemm_rules import Config, may_batch, may_unroll, most_registers


def batch(problem: LinearProblem, config: Config) -> int:
    """How many steps of weights a warpgroup asks for at a time, past shared memory; 0: they come through the ring.

    Measured at 48 and 64 tokens, K over two warpgroups (us: qkv 8.67 for 9.29, down 15.65 for 15.95; at 48 tokens
    7.79 for 8.23 and 13.6 for 14.1). At 16 and 32 tokens it loses 3 to 9 %, and with int8.
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
    return 2 if config.bits < 4 or config.tile_m == 48 else 0  # o: 5.52 us for 5.87 at 48 tokens


def unrolls(config: Config) -> bool:
    """Whether each stage has code of its own, which takes an eighth of the instructions of a step away.

    16-bit activations in tiles of up to 96 tokens: 1.5 to 6.5 % (us: qkv at 32 and 128 tokens 6.50 for 6.95 and 12.25
    for 12.72, o at 64 and 128 6.11 for 6.31 and 9.40 for 9.67). Nothing in tiles of 128, nor, of blocks that have a
    multiprocessor each, in stages of two steps or tiles of 16.
    """
    if config.sparse and config.x_bytes == 1:  # 1 to 4 %
        return config.cluster_k < 4 and may_unroll(config)
    if config.sparse and not _unrolls_sparse(config):
        return False
    few = config.min_blocks_per_sm == 2 or (24 <= config.tile_m < 128 and config.span == 1)
    return few and config.cluster_k < 4 and config.x_bytes == 2 and may_unroll(config)


def _unrolls_sparse(config: Config) -> bool:
    """Whether nothing is spilled: the assembler moves loads of many stages ahead of products of 2:4 sparse weights."""
    slots, room = config.stages // config.split_k_warpgroups, most_registers(config)
    if config.min_blocks_per_sm == 2 and config.split_k_warpgroups == 2:
        return slots <= 3 and config.code.name == "sym"
    return slots <= (6 if room >= 160 else 4 if room >= 128 and config.cluster_k < 3 else 0)
