"""The cost model of sm90_packed_gemm's built-in choice, fitted to an H200 (docs/packed.md)."""

from anybit.kernels.common.types import Code
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_ROWS
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm_sparse_estimate
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import CLUSTERS, Config

_OF_TABLES = {Code.nf4: 200, Code.iq4: 200, Code.e4m3: 40}
"""Extra cycles per 64 rows and 128 inputs, by instruction counts; e2m1 was fastest in sym's tiles."""


def estimate(problem: LinearProblem, config: Config) -> float:
    """Estimated microseconds of a config on an H200, in a chain of launches; see docs/packed.md.

    The constants were fitted to 61 measured configs of w4a16g128 (M = 16 to 256), within 4 % on average; those of small
    tiles to 30 more, after the producer got four warps. Comments give figures in us.
    """
    if config.sparse and config.x_bytes == 1 and not config.promotes:
        return sm90_packed_gemm_sparse_estimate.estimate(problem, config)
    row_tiles, token_tiles = -(-problem.weight_tiles * TILE_ROWS // config.rows), -(-problem.m // config.tile_m)
    tokens, tiles = config.tile_m, row_tiles * token_tiles
    rows = config.row_warpgroups - 0.5 * config.halves  # row tiles of a block
    few = problem.m <= 64
    # int8 products wait less for memory (down at 256 tokens, 64 rows per block: 26.8 us, 128 rows 28.6).
    narrow = config.x_bytes == 1 and not config.promotes and tokens == 128 and 192 < problem.m <= 512
    # For 8-bit operands narrow codes dequantize no faster than 4 bits, and the same tiles are best.
    weight_bytes = max(config.tile_bytes, 4096) if config.x_bytes == 1 else config.tile_bytes
    # Cycles per 64 rows and 128 inputs: tensor cores; dequantization and issue.
    dequantize = 195 + 2.2 * tokens
    if config.bits in (3, 5, 6, 7) or config.operand.name == "bf16":
        dequantize += 40
    dequantize += _OF_TABLES.get(config.code, 0) + 60 * (config.group == 16)
    if config.promotes:
        # Promoting 160 tokens takes little longer than 128 (gate_up at 1,024: 278 us instead of 304).
        product, dequantize = 4.5 * min(tokens, 128) + 200 + 2.2 * max(tokens - 128, 0), max(dequantize, 330.0)
    elif config.x_bytes == 1:
        product = (2.4 if tokens * rows >= 512 else 2.75) * tokens
        dequantize = 140 + 1.3 * tokens
    else:
        # Dequantizing once for all tokens costs less power (gate_up at 256: 85.6 us instead of 86.1).
        product = (4.2 if tokens == 256 and token_tiles == 1 else 4.3) * tokens
    chain = 1.0
    if config.sparse:  # half of the codes, half of the products, all of x
        product, dequantize, chain = max(product * 0.63, 75.0 * config.x_bytes / 2), 0.6 * dequantize, 0.75
    # int8 gains less from two-step stages: only for down at 16 tokens do they change the choice (10.6 us, was 11.1).
    spanned = config.x_bytes == 2 or (tokens == 16 and config.split_k_warpgroups == 3 and problem.column_blocks >= 64)
    # Memory intake of an SM.
    intake = (tokens * 128 * config.x_bytes + rows * weight_bytes) / (60 if narrow else 47.5)
    bring = 270.0 + tokens * config.x_bytes
    if config.sparse and config.unrolled and rows == 1 and tokens >= 48 and config.cluster_k == 2:
        # K over two warpgroups and two blocks: down and o at 64 tokens 12.4 and 5.4 us; three row tiles, K over four
        # blocks: 14.1 and 6.5
        intake, bring = 0.7 * intake, 0.7 * bring
    stage = max(
        product * rows,
        dequantize * rows,
        # The latency of wait, dequantize and multiply in one warpgroup.
        chain * (450 + 1.25 * product if few else 493) / config.split_k_warpgroups,
        # The latency of a stage, however small.
        bring / (config.span if spanned else 1) if few else 0,
        intake,
    )
    partial = rows * config.split_k_warpgroups * tokens / 64
    around = 0.57 + 0.0055 * tokens  # prologue and epilogue
    waste = 1.0 if token_tiles == 1 or config.promotes or tokens in (16, 32, 64, 128, 256) else 1.05
    if token_tiles > 2 and tokens < 128:
        waste *= 1.06 if config.x_bytes == 2 else 1.02  # weights are read once for each of them
    if config.x_bytes == 1 and not config.promotes and token_tiles == 2 and tokens < 128 and rows == 1:
        waste *= 1.05  # 4096 x 11008 at 128 tokens: 16.1 and 16.8 us (2 and 4 bits), in one tile of 128 13.7 and 15.3
    together = (
        config.x_bytes == 1 and not config.promotes and few and config.split_k_warpgroups == 1 and config.cluster_k > 1
    )
    if together and problem.m > 16 and (problem.m <= 48 or config.cluster_k > 2):
        # Three row tiles, cluster_k 4 and 2: down at 17 to 24 tokens 12.9 us, with two row tiles by two split-K
        # warpgroups and cluster_k = 3 11.2; 5120 x 17408 at 32 17.7, in two row tiles by pairs of blocks 16.0;
        # 12288 x 4096 10.4, in two row tiles by single blocks 9.3.
        waste *= 1.18
    if config.min_blocks_per_sm > 1 and tokens > (32 if config.sparse else 16 if config.code is Code.min else 256):
        # Registers spill: qkv at 64 tokens, w4a16g64min 12.5 us, in one block 9.2, w2a16g128s24 10.3 and 7.3.
        waste *= 1.25
    if config.warpgroups == 1:  # nothing hides the latency of the only warpgroup
        waste *= 1.6 if config.promotes else 1.04
    if tiles > 2 * problem.device.sms and config.warpgroups < 3 and tokens < 256:
        waste *= 1.03  # two warpgroups hide each other's epilogues less well than four
    slots = CLUSTERS.get(config.cluster, 15)
    sharing = 1.0
    if config.min_blocks_per_sm > 1:  # an SM holds a block of the next launch beside these, or two of these
        sharing = 1.0 if tiles <= slots else 1.3 if config.cluster > 1 else 2.0
        if tiles > slots and config.cluster > 1 and config.x_bytes == 2 and not 1.25 < tiles / slots < 1.6:
            # Two blocks take in twice as much: 8192 x 28672 at 48 tokens 71.5 us, one block of two row tiles 44.9, and
            # 7168 x 5120 at 64 14.4, one block 11.2; but 6144 x 4096 at 32 7.2, faster than any single block.
            sharing = max(sharing, 2.4 * intake / stage)
        slots *= 2
    waves = float(-(-tiles // slots))
    if config.block_tiles:  # a range of row tiles, row_warpgroups at a time
        waves = (config.block_tiles / config.row_warpgroups + -(-config.block_tiles // config.row_warpgroups)) / 2
    if config.tensor_store and config.row_warpgroups == 4 and config.cluster_n == 1:  # others were not timed in 16 bits
        # Stores overlap with the next tile's products (gate_up at 4,096 tokens: 931 us instead of 965), and are late if
        # there is none (256 tokens: 54.3 us instead of 52.4).
        waste *= 1.035 if config.block_tiles else 0.965
    summing = 0.1 * partial if config.warpgroups > rows else 0.0
    if config.halves:
        summing = 0.5 if config.x_bytes == 2 else -1.0 if problem.m > 64 else 2.2
        if (
            config.sparse and config.x_bytes == 2 and tokens == 16
        ):  # fp16 12.8 us, whole row tiles 12.5; bf16 14.4, 14.7
            summing = 1.35
    if config.cluster_k > 1:
        summing += (
            (1.0 if few else 0.4 if config.x_bytes == 2 else 0.6) + 0.36 * partial + 0.54 * (config.cluster_k > 2)
        )
        if config.x_bytes == 1 and few and config.cluster_k > 2:
            # down at 32 tokens: clusters of three 11.6 us, of two 11.3
            summing += 1.0 if config.cluster_k == 3 else 0.1
    if waves > 1 and config.split_k_warpgroups * config.cluster_k > 1:
        waves *= 1.08  # split-K blocks are not persistent: every wave has its prologue
    units = -(-problem.column_blocks // config.cluster_k)
    if config.x_bytes == 2 and tokens == 32 and config.span == 2 and config.cluster_k == 2 and problem.m <= 24:
        # Absent tokens cost more than present ones: down at 31 tokens 11.0 us, at 17 13.6, in tiles of 24 11.6.
        summing += 0.027 * units
    one = units * stage * sharing / 1800 + around
    ahead = 0.0
    if config.min_blocks_per_sm > 1:
        known = config.x_bytes == 2 and config.cluster == 2 and (tokens == 16 or (tokens <= 32 and tiles > 66))
        ahead = 0.55 if known else -1.0
    return 1.0 + 0.5 * (config.cluster_n - 1) + summing * waves + waste * waves * one - ahead


def spans(problem: LinearProblem, config: Config) -> bool:
    """Whether a stage holds two steps: of 135 instructions per step of 16 tokens some 14 then run once per stage, and
    there are fewer waits (us, two steps / one: gate_up at 16, 32 and 64 tokens 16.7 / 17.5, 18.7 / 19.4, 25.0 / 27.0,
    down at 16 9.7 / 11.0, qkv 5.7 / 6.1; o, with only 8 steps per warpgroup and one block per SM, 4.5 / 4.5).
    """
    if config.cluster_n > 1 or problem.column_blocks % 2 or config.promotes:
        return False
    if config.sparse and config.x_bytes == 1:  # us: qkv at 16 tokens 4.5 / 5.2, down at 256 18.0 / 22.1
        return config.tile_m <= 128
    if config.tile_m > 64:
        return False
    # 5120 x 17408, both long and of more blocks than SMs: 18.5 / 15.3 to 16.1.
    long, many = (
        problem.column_blocks >= 32 * config.cluster_k,
        problem.weight_tiles * config.cluster_k > problem.device.sms,
    )
    if config.x_bytes == 1:
        # w4a8: gate_up at 16 and 32 tokens 16.0 / 17.3 and 16.7 / 17.5, qkv at 64 and 256 7.2 / 7.9 and 14.7 / 15.3;
        # qkv at 128, three row tiles and K over two blocks, 11.3 / 10.8.
        return config.bits < 8 and not config.halves and (config.split_k_warpgroups > 1 or config.cluster_k == 1)
    if config.halves or (config.sparse and config.row_warpgroups == 4 and config.cluster_k == 1):
        return True
    if config.cluster_k != 2 or config.warpgroups == 1:
        return False
    if config.tile_m == 64:  # two token tiles: down at 128 26.7 / 28.0, o 10.4 / 10.1
        return config.row_warpgroups == 2 and problem.m > 64 and long
    if config.tile_m == 32:  # down 11.8 / 13.3 (four warpgroups along K), o 5.1 / 5.3
        return (
            config.row_warpgroups == 1
            and config.split_k_warpgroups in (2, 4)
            and config.min_blocks_per_sm == 1
            and not many
        )
    return config.tile_m == 16 and config.row_warpgroups == 1 and long != many
