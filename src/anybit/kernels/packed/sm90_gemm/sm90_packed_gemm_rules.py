"""The config of sm90_packed_gemm, which configs are legal for a problem (``why_not``), and their resources."""

import math
from dataclasses import dataclass

from anybit.kernels.common.types import Code, Operand
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem
from anybit.kernels.packed.packed_layout import TILE_ROWS
from anybit.kernels.packed.packed_problem import Facts

_LEAST_SHARED = {1: 117 << 10, 2: 80 << 10}
"""By blocks per SM: the least shared memory per block such that no more fit."""
MOST_BESIDE = 113 << 10
"""Most shared memory per block such that two fit an SM."""
TOKENS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Token tile widths that wgmma and the epilogue support."""


@dataclass(frozen=True)
class Config(Facts):
    """A kernel config; every field is a compile-time constant of the device code.

    tile_m: tokens per tile. row_warpgroups: warpgroups along N, 64 rows each. split_k_warpgroups: warpgroups that split
    K within a block. cluster_k: blocks of a cluster that split K; cluster_n: neighbours in a cluster that multicast x
    to each other. stages: depth of the pipeline; prologue_stages: stages whose weights are requested before x.
    epilogue_tile: tokens that a warpgroup transposes at a time on the way to y, in one of epilogue_stages buffers in
    shared memory. register_sets: of dequantized weights; with 2 a warpgroup dequantizes while it multiplies, with 1 it
    relies on the others to overlap. reallocates: the producer is a warpgroup that gives up its registers (setmaxnreg).
    halves: pairs of blocks share one row tile, half of K each. min_blocks_per_sm: blocks that fit an SM, from this
    launch and the next; with 2 the grid has at least one block per SM. span: k blocks (128 inputs) per stage, 1 or 2.
    direct: k blocks of weights per direct load to registers, past shared memory, overlapped with the previous products;
    0: weights go through the pipeline. unrolled: the loop over stages is unrolled. sparse: the weights are 2:4 sparse;
    only then: block_tiles: row tiles per block, row_warpgroups at a time (0: blocks are persistent over all tiles);
    tensor_store: y is stored by TMA, a warpgroup's tile at a time, and warpgroups start one after another.
    """

    tile_m: int
    row_warpgroups: int
    split_k_warpgroups: int = 1
    cluster_k: int = 1
    cluster_n: int = 1
    stages: int = 4
    prologue_stages: int = 2
    epilogue_tile: int = 16
    epilogue_stages: int = 2
    register_sets: int = 2
    reallocates: bool = False
    halves: bool = False
    min_blocks_per_sm: int = 1
    span: int = 1
    direct: int = 0
    unrolled: bool = False
    sparse: bool = False
    block_tiles: int = 0
    tensor_store: bool = False

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of weights."""
        return 4 * self.unit_bytes

    @property
    def x_bytes(self) -> int:
        """Bytes per element of x."""
        return 1 if self.operand in (Operand.s8, Operand.e4m3) else 2

    @property
    def promotes(self) -> bool:
        """Whether products are promoted to float32 accumulators after every group."""
        return self.operand == Operand.e4m3 or (self.operand == Operand.s8 and self.group != 0)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.row_warpgroups * self.split_k_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block, including its one or four producer warps."""
        return 128 * self.warpgroups + (128 if self.reallocates or self.row_warpgroups * self.tile_m < 256 else 32)

    @property
    def tail_rows(self) -> int:
        """Rows of the TMA boxes for partial token tiles; 0: partial tiles are loaded whole."""
        return 0 if self.cluster_n > 1 or self.tile_m < 48 else 16 if self.tile_m <= 64 else 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.halves else self.cluster_k * self.cluster_n

    @property
    def rows(self) -> int:
        """Rows of W per cluster."""
        if self.block_tiles:
            return TILE_ROWS * self.block_tiles
        if self.halves:
            return TILE_ROWS * (2 * self.row_warpgroups - 1)
        return TILE_ROWS * self.row_warpgroups * self.cluster_n


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block: pipeline, partial sums or staging, barriers. The device code asserts it."""
    x_bytes = config.tile_m * 128 * config.x_bytes
    weights = 0 if config.direct else -(-config.row_warpgroups * config.tile_bytes // 1024) * 1024
    stage = config.span * (x_bytes + weights)
    ring = config.stages * stage
    reduces = config.split_k_warpgroups * config.cluster_k > 1
    # Of partial sums, which each block of a cluster reduces.
    share = config.warpgroups * -(-config.tile_m // 8 // config.cluster_k) * 2048 if reduces else 0
    # Outputs are half as wide as sums, and staged by one of the split-K warpgroups.
    outputs = share // (2 * config.split_k_warpgroups) if config.split_k_warpgroups > 1 else 0
    body = max(ring, share + outputs) + (config.cluster_k - 1) * share
    if config.halves:
        body += config.tile_m // 2 * 256
    staged = config.tile_m if config.tensor_store else config.epilogue_stages * config.epilogue_tile
    body += 0 if reduces else config.warpgroups * staged * 128
    # Pad beyond half of an SM's: otherwise two blocks could share one while others are idle.
    return max(body + config.stages * 24 + 8, _LEAST_SHARED[config.min_blocks_per_sm])


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why the kernel cannot take a problem, or a config for it, in a sentence; None if it can."""
    if problem.device.arch != "sm_90a":
        return f"wgmma needs sm_90a, and the device is {problem.device.arch}"
    reason = packed_problem.why_not(problem) or (_why_not_bytes(problem) if problem.activations.quantized else None)
    if reason is not None or config is None:
        return reason
    if config.tile_m not in TOKENS:
        return f"a token tile has one of {TOKENS} tokens, not {config.tile_m}"
    if config.warpgroups > 4 or config.warpgroups < 1:
        return f"a block has 1 to 4 consumer warpgroups, not {config.warpgroups}"
    if config.tile_m // 2 + 24 > _at_launch(config):  # one wgmma's operands, which ptxas cannot split
        return f"accumulators for {config.tile_m} tokens do not fit the registers of {config.warpgroups} warpgroups"
    if passes_codes_through(config) and config.register_sets != 1:
        return "int8 products read 8-bit codes from the registers that the next load writes: use 1 register set"
    needed, most = registers(config), most_registers(config)
    if needed > most:
        return f"{config.tile_m} tokens need about {needed} registers, and {config.warpgroups} warpgroups have {most}"
    if config.stages < max(config.split_k_warpgroups + 1, config.prologue_stages):
        return (
            f"{config.stages} stages are too few for split_k_warpgroups = {config.split_k_warpgroups} and "
            f"prologue_stages = {config.prologue_stages}"
        )
    if config.stages % config.split_k_warpgroups:
        return (
            f"stages must be a multiple of split_k_warpgroups = {config.split_k_warpgroups}, not {config.stages}: a "
            "warpgroup would miss a phase of a stage's barrier"
        )
    if config.cluster > 8:
        return f"a cluster has at most 8 blocks, not {config.cluster}"
    if config.cluster_n not in (1, 2):
        return f"cluster_n must be 1 or 2, not {config.cluster_n}"
    if config.tile_m % (8 * config.cluster_n):
        return f"tile_m must be a multiple of {8 * config.cluster_n} (8 per block of cluster_n), not {config.tile_m}"
    if config.halves and (refusal := _why_not_halves(problem, config)):
        return refusal
    if config.span not in (1, 2) or (config.span == 2 and (problem.k_blocks % 2 or config.promotes)):
        return f"span must be 1, or 2 with an even number of k blocks and without promotion, not {config.span}"
    if refusal := _why_not_sparse(problem, config):
        return refusal
    if refusal := refusal_of_loop(config):
        return refusal
    if config.cluster_k * config.span > problem.k_blocks:
        return f"{problem.k_blocks} k blocks do not divide among {config.cluster_k} blocks, {config.span} at a time"
    if config.min_blocks_per_sm not in _LEAST_SHARED:
        return f"min_blocks_per_sm must be 1 or 2, not {config.min_blocks_per_sm}"
    if config.min_blocks_per_sm > 1 and config.reallocates:
        return "reallocates hands out the registers of one block per SM: it needs min_blocks_per_sm=1"
    if config.min_blocks_per_sm > 1 and (config.halves or shared_bytes(config) > MOST_BESIDE):
        return "two such blocks do not fit an SM"
    return problem.device.why_not_shared(shared_bytes(config))


def _why_not_sparse(problem: LinearProblem, config: Config) -> str | None:
    """Why a config does not fit dense or 2:4 sparse weights; None if it does."""
    if config.sparse != problem.weights.sparse:
        return "the config was made for weights that are 2:4 sparse" if config.sparse else "the weights are 2:4 sparse"
    whole = config.split_k_warpgroups * config.cluster == (1 if config.block_tiles else config.cluster_n)
    if (config.block_tiles or config.tensor_store) and not (config.sparse and whole):
        return (
            "block_tiles and tensor_store need 2:4 sparse weights and no split of K (split_k_warpgroups=1, "
            "cluster_k=1, halves=False); block_tiles also needs cluster_n=1"
        )
    if config.tensor_store and (problem.n % 8 or config.tile_m % 16):
        return f"tensor_store needs N % 8 == 0 and tile_m % 16 == 0, not {problem.n} and {config.tile_m}"
    return None


def _why_not_halves(problem: LinearProblem, config: Config) -> str | None:
    """Why pairs of blocks cannot halve a row tile; None if they can."""
    if (
        config.warpgroups != config.row_warpgroups
        or config.row_warpgroups < 2
        or config.cluster_k * config.cluster_n > 1
    ):
        return "halves needs 2 or more row_warpgroups, and excludes split_k_warpgroups, cluster_k and cluster_n"
    if config.promotes or config.tile_m % 16 or problem.k_blocks < 2:
        return "halves needs at least 2 k blocks, tile_m % 16 == 0, and products without promotion"
    if math.prod(tile_counts(problem, config)) > problem.device.sms // 2:
        return "halves needs all tiles in one wave of pairs of blocks, and there are more tiles than pairs"
    return None


def _why_not_bytes(problem: LinearProblem) -> str | None:
    """Why weights cannot be dequantized to 8-bit operands exactly; None if they can."""
    weights, activations = problem.weights, problem.activations
    if problem.operand == Operand.s8:
        if weights.bits == 8 and weights.code != "sym":
            return f"8-bit {weights.code} weights minus their zeros do not fit a signed byte: use sym, or 7 bits"
        largest = 2 ** (weights.bits + (weights.code == "bipolar")) * 2 ** (activations.bits - 1)
        if weights.sparse:  # half of the inputs, but codes use the full range of a byte
            largest = max(largest // 2, 2 ** (6 + activations.bits - 1))
        if weights.group is None and problem.k * largest >= 2**31:
            return (
                f"sums over k = {problem.k} of products up to {largest} may overflow int32: use fewer than "
                f"{-(-(2**31) // largest)} inputs, or weights in groups (such as g128), which are summed apart"
            )
        return None
    if weights.sparse:
        return "2:4 sparse weights are multiplied by integers or 16-bit floats, not by 8-bit floats"
    most = 5 if weights.code == "sym" else 4
    if weights.bits > most:
        return (
            f"e4m3 holds integers up to 16 exactly: {weights.code} weights of {most} bits or fewer, not {weights.bits}"
        )
    return None


def passes_codes_through(config: Config) -> bool:
    """Whether codes go from shared memory to wgmma unchanged.

    With two register sets the next k block would be loaded into registers that a wgmma in flight still reads, which
    ptxas does not prevent: w8a8 was wrong from 128 tokens on, on an H200.
    """
    return config.operand is Operand.s8 and config.bits == 8 and config.group == 0 and not config.sparse


def registers(config: Config) -> int:
    """Registers per consumer thread: accumulators, sets of dequantized weights, codes, scales, addresses."""
    accumulators = config.tile_m if config.promotes else config.tile_m // 2
    dequantized = 8 * config.x_bytes * (2 if config.promotes else config.register_sets) // (1 + config.sparse)
    # Scales and biases of all row tiles, if a thread reduces other blocks' partial sums.
    summing = 4 * config.row_warpgroups if config.cluster_k > 1 else 0
    groups = {16: 16, 32: 8}.get(config.group, 0)  # scales and zeros of two rows
    return (
        accumulators + dequantized + words_at_hand(config) + 24 + summing + groups - 4 * (config.min_blocks_per_sm > 1)
    )


def _at_launch(config: Config) -> int:
    """Registers per thread at launch, with a producer beside the consumer warpgroups, one warp each per SM quadrant."""
    return min(512 // config.min_blocks_per_sm // (config.warpgroups + 1) // 8 * 8, 255)


def most_registers(config: Config) -> int:
    """Registers per consumer thread, after the producer has given up all but 32 of its own."""
    if not config.reallocates:
        return _at_launch(config)
    return ((config.warpgroups + 1) * _at_launch(config) - 32) // config.warpgroups // 8 * 8


def tile_counts(problem: LinearProblem, config: Config) -> tuple[int, int]:
    """Row tiles (of clusters) and token tiles."""
    return -(-problem.weight_tiles * TILE_ROWS // config.rows), -(-problem.m // config.tile_m)


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """Blocks of a launch: persistent, at most one per SM, except where a block takes just one tile."""
    row_tiles, token_tiles = tile_counts(problem, config)
    tiles = row_tiles * token_tiles
    if config.min_blocks_per_sm > 1:  # at least one per SM, even if idle
        return max(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1
    if config.split_k_warpgroups * config.cluster_k > 1 or config.halves or config.block_tiles:
        return tiles * config.cluster, 1, 1
    return min(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1


def refusal_of_loop(config: Config) -> str | None:
    """Why a config's main loop is not supported; None if it is."""
    if config.direct and not may_batch(config):
        return (
            "direct loads of weights need 16-bit activations, span=1, prologue_stages=0, register_sets=2, at most 3 "
            "warpgroups along K, dense weights, groups of 32 or more, halves=False and min_blocks_per_sm=1"
        )
    if config.unrolled and not may_unroll(config):
        return (
            "unrolled stages need K split over 2 or 3 warpgroups or over blocks, register_sets=2, direct=0, products "
            "without promotion, and, for tile_m above 16 with min_blocks_per_sm=2, codes without zeros or minima"
        )
    return None


def may_batch(config: Config) -> bool:
    """Whether weights can be loaded directly to registers, in batches."""
    alone = config.span == config.min_blocks_per_sm == 1
    plain = alone and not (config.halves or config.prologue_stages or config.sparse)
    plain = plain and config.group != 16  # whose scales take too many registers
    return plain and config.x_bytes == 2 and config.split_k_warpgroups < 4 and config.register_sets == 2


def may_unroll(config: Config) -> bool:
    """Whether stages can be unrolled: a block must have one tile, so that it starts at stage 0."""
    shared = config.split_k_warpgroups * config.cluster_k > 1 and config.split_k_warpgroups < 4
    if config.min_blocks_per_sm == 2 and config.tile_m > 16 and config.code in (Code.asym, Code.min):
        return False  # group zeros do not fit 80 registers
    return shared and not (config.promotes or config.direct) and config.register_sets == 2


def words_at_hand(config: Config) -> int:
    """Registers of prefetched codes, scales and zeros."""
    if config.sparse:
        return config.bits + 2  # plus metadata of two halves
    if not config.direct:
        return 2 * config.bits
    parts = 128 // config.group if 0 < config.group < 128 else int(config.group > 0)
    return 8 + 2 * config.direct * (2 * config.bits + parts * (1 + (config.code in (Code.asym, Code.min))))
