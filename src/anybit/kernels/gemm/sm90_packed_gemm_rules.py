"""What a config of sm90_packed_gemm is, which ones can do a problem (`why_not`), and what they need of a GPU."""

import math
from dataclasses import dataclass

from anybit.kernels.common.types import Code, Operand
from anybit.kernels.gemm import packed_problem
from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.kernels.gemm.packed_layout import TILE_ROWS

_LEAST_SHARED = {1: 117 << 10, 2: 80 << 10}
"""Shared memory of a block of which so many fit a multiprocessor, and one more does not."""
MOST_BESIDE = 113 << 10
"""The most shared memory of a block beside which another fits."""
CLUSTERS = {1: 132, 2: 66, 3: 36, 4: 30}
"""Clusters of so many blocks that an H200 runs at a time: those of four do not fill it."""
TOKENS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Widths of a token tile that wgmma and the epilogue take."""


@dataclass(frozen=True)
class Config:
    """How a block works; every field is a constant of the device code.

    tile_m: tokens of a tile. row_warpgroups: warpgroups side by side, 64 rows each. split_k_warpgroups: warpgroups that
    share the inputs of one row tile. cluster_k: blocks of a cluster that share the inputs; cluster_n: neighbours in a
    cluster that load x for each other. stages: steps of 128 inputs in flight; prologue_stages: of how many the weights
    are asked for before x. epilogue_tile: tokens that a warpgroup turns over at a time on their way to y, in one of
    epilogue_stages places of shared memory. register_sets: of dequantized weights; with 2 one dequantizes while it
    multiplies, with 1 it counts on the others. reallocates: the producer is a warpgroup that gives its registers to the
    others. halves: two blocks share one of their row tiles, half of its inputs each. min_blocks_per_sm: blocks that fit
    a multiprocessor, of this launch and of the next; then each of these gets one at least. span: steps of a stage, 1 or
    2. direct: steps of weights that a warpgroup asks for at a time, past shared memory, while it multiplies those
    before; 0: weights come through the ring. unrolled: each stage of the ring has code of its own. sparse: the weights
    are 2:4 sparse; of these alone: block_tiles: row tiles that a block has to itself, row_warpgroups at a time (0: it
    walks over all of them); tensor_store: outputs leave by a tensor map, a tile of a warpgroup at a time; stagger:
    cycles between its warpgroups' starts.
    """

    operand: Operand
    bits: int
    group: int
    code: Code
    bfloat_out: bool
    tile_bytes: int
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
    stagger: int = 0

    @property
    def x_bytes(self) -> int:
        """Bytes of an element of x."""
        return 1 if self.operand in (Operand.s8, Operand.e4m3) else 2

    @property
    def promotes(self) -> bool:
        """Whether products are added to float totals after every group."""
        return self.operand == Operand.e4m3 or (self.operand == Operand.s8 and self.group != 0)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.row_warpgroups * self.split_k_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block, its producer warp among them, or four of these."""
        return 128 * self.warpgroups + (128 if self.reallocates or self.row_warpgroups * self.tile_m < 256 else 32)

    @property
    def tail_rows(self) -> int:
        """Rows of the boxes that a tile is loaded in if it lacks many of its tokens; 0: such tiles are loaded whole."""
        return 0 if self.cluster_n > 1 or self.tile_m < 48 else 16 if self.tile_m <= 64 else 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.halves else self.cluster_k * self.cluster_n

    @property
    def rows(self) -> int:
        """Rows of W that a cluster works on at a time."""
        if self.block_tiles:
            return TILE_ROWS * self.block_tiles
        if self.halves:
            return TILE_ROWS * (2 * self.row_warpgroups - 1)
        return TILE_ROWS * self.row_warpgroups * self.cluster_n


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: ring, partial sums or staging, barriers. The device code asserts the same."""
    x_bytes = config.tile_m * 128 * config.x_bytes
    weights = 0 if config.direct else -(-config.row_warpgroups * config.tile_bytes // 1024) * 1024
    stage = config.span * (x_bytes + weights)
    ring = config.stages * stage
    reduces = config.split_k_warpgroups * config.cluster_k > 1
    share = _share_bytes(config) if reduces else 0
    # Outputs take half of a sum's bytes, for one of the warpgroups along K.
    outputs = share // (2 * config.split_k_warpgroups) if config.split_k_warpgroups > 1 else 0
    body = max(ring, share + outputs) + (config.cluster_k - 1) * share
    if config.halves:
        body += config.tile_m // 2 * 256
    staged = config.tile_m if config.tensor_store else config.epilogue_stages * config.epilogue_tile
    body += 0 if reduces else config.warpgroups * staged * 128
    # More than half of a multiprocessor's: two blocks would share one while others stand idle.
    return max(body + config.stages * 24 + 8, _LEAST_SHARED[config.min_blocks_per_sm])


def _share_bytes(config: Config) -> int:
    """Bytes of the partial sums that one of the blocks sharing a tile adds up."""
    return config.warpgroups * -(-config.tile_m // 8 // config.cluster_k) * 2048


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why a problem, or a config for it, cannot be taken; None if it can."""
    if problem.device.arch != "sm_90a":
        return f"wgmma needs sm_90a, and the device is {problem.device.arch}"
    reason = packed_problem.why_not(problem) or (_why_not_bytes(problem) if problem.activations.quantized else None)
    if reason is not None or config is None:
        return reason
    if config.tile_m not in TOKENS:
        return f"a token tile has one of {TOKENS} tokens, not {config.tile_m}"
    if config.warpgroups > 4 or config.warpgroups < 1:
        return f"a block has 1 to 4 warpgroups that multiply, not {config.warpgroups}"
    if config.tile_m // 2 + 24 > _at_launch(config):  # one instruction's operands, which the assembler never splits
        return f"sums of {config.tile_m} tokens do not fit the registers of {config.warpgroups} warpgroups at launch"
    if passes_codes_through(config) and config.register_sets != 1:
        return "int8 products read 8-bit codes from the registers that the next load writes: use 1 register set"
    needed, most = registers(config), most_registers(config)
    if needed > most:
        return f"{config.tile_m} tokens need about {needed} registers, and {config.warpgroups} warpgroups have {most}"
    if config.stages < max(config.split_k_warpgroups + 1, config.prologue_stages):
        return (
            f"{config.stages} stages are too few for {config.split_k_warpgroups} warpgroups along the inputs and "
            f"{config.prologue_stages} early stages"
        )
    if config.stages % config.split_k_warpgroups:
        return (
            f"{config.stages} stages are not dealt evenly to {config.split_k_warpgroups} warpgroups along the inputs: "
            "one of them would wait for a use of a stage without having seen the one before"
        )
    if config.cluster > 8:
        return f"a cluster has at most 8 blocks, not {config.cluster}"
    if config.cluster_n not in (1, 2):
        return f"1 or 2 neighbours share their loads of x, not {config.cluster_n}"
    if config.tile_m % (8 * config.cluster_n):
        return f"{config.tile_m} tokens do not divide among {config.cluster_n} blocks in eights"
    if config.halves and (refusal := _why_not_halves(problem, config)):
        return refusal
    if config.span not in (1, 2) or (config.span == 2 and (problem.column_blocks % 2 or config.promotes)):
        return f"a stage has 1 step of inputs, or 2 of an even number (no promotion), not {config.span}"
    if refusal := _why_not_sparse(problem, config):
        return refusal
    if refusal := refusal_of_loop(config):
        return refusal
    if config.cluster_k * config.span > problem.column_blocks:
        steps = f"{problem.column_blocks} steps of inputs"
        return f"{steps} do not divide among {config.cluster_k} blocks, {config.span} at a time"
    if config.min_blocks_per_sm not in _LEAST_SHARED:
        return f"1 or 2 blocks share a multiprocessor, not {config.min_blocks_per_sm}"
    if config.min_blocks_per_sm > 1 and (config.halves or shared_bytes(config) > MOST_BESIDE):
        return "two such blocks do not fit a multiprocessor"
    return problem.device.why_not_shared(shared_bytes(config))


def _why_not_sparse(problem: LinearProblem, config: Config) -> str | None:
    """Why a config is not one of the problem's weights, or of dense ones."""
    if config.sparse != problem.weights.sparse:
        return "the config was made for weights that are 2:4 sparse" if config.sparse else "the weights are 2:4 sparse"
    whole = config.split_k_warpgroups * config.cluster == (1 if config.block_tiles else config.cluster_n)
    if (config.block_tiles or config.tensor_store or config.stagger) and not (config.sparse and whole):
        return (
            "ranges of row tiles, stores by tensor maps and staggered warpgroups are for 2:4 sparse weights whose "
            "inputs no warpgroups or blocks share, and ranges for blocks that load x for themselves, too (cluster_n=1)"
        )
    if config.tensor_store and (problem.n % 8 or config.tile_m % 16):
        return f"a tensor map stores outputs in eights and tokens in sixteens, not {problem.n} and {config.tile_m}"
    return None


def _why_not_halves(problem: LinearProblem, config: Config) -> str | None:
    """Why two blocks cannot halve a row tile of theirs."""
    if (
        config.warpgroups != config.row_warpgroups
        or config.row_warpgroups < 2
        or config.cluster_k * config.cluster_n > 1
    ):
        return "blocks that halve a row tile share nothing else, and have 2 warpgroups or more along the rows"
    if config.promotes or config.tile_m % 16 or problem.column_blocks < 2:
        return "a row tile is halved in 2 steps of inputs or more, 16 tokens at a time, of products without promotion"
    if math.prod(tile_counts(problem, config)) > problem.device.sms // 2:
        return "a pair of blocks that halve a row tile has one range of rows, and there are more of these than pairs"
    return None


def _why_not_bytes(problem: LinearProblem) -> str | None:
    """Which weights do not dequantize to bytes exactly."""
    weights, activations = problem.weights, problem.activations
    if problem.operand == Operand.s8:
        if weights.bits == 8 and weights.code != "sym":
            return f"8-bit {weights.code} weights less their zeros do not fit a signed byte: use sym, or 7 bits"
        largest = 2 ** (weights.bits + (weights.code == "bipolar")) * 2 ** (activations.bits - 1)
        if weights.sparse:  # half of the inputs, codes as large as bytes are
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
    """Whether registers go from shared memory to the products untouched.

    Then the next unit is loaded into registers of products that are on their way, where two sets let them be: the
    assembler does not keep them apart; w8a8 was wrong from 128 tokens on an H200.
    """
    return config.operand is Operand.s8 and config.bits == 8 and config.group == 0 and not config.sparse


def registers(config: Config) -> int:
    """What a thread that multiplies needs: accumulators, sets of dequantized weights, codes, scales, addresses."""
    accumulators = config.tile_m if config.promotes else config.tile_m // 2
    dequantized = 8 * config.x_bytes * (2 if config.promotes else config.register_sets) // (1 + config.sparse)
    # Scales and biases of all its row tiles, where a thread adds up what others send.
    summing = 4 * config.row_warpgroups if config.cluster_k > 1 else 0
    groups = {16: 16, 32: 8}.get(config.group, 0)  # so many scales and zeros of two rows at a time
    return (
        accumulators + dequantized + words_at_hand(config) + 24 + summing + groups - 4 * (config.min_blocks_per_sm > 1)
    )


def _at_launch(config: Config) -> int:
    """Registers of a thread at launch, with a producer beside the warpgroups, on a quarter of a multiprocessor."""
    return min(512 // config.min_blocks_per_sm // (config.warpgroups + 1) // 8 * 8, 255)


def most_registers(config: Config) -> int:
    """Registers of a thread that multiplies after the producer has given up all but 32."""
    if not config.reallocates:
        return _at_launch(config)
    return ((config.warpgroups + 1) * _at_launch(config) - 32) // config.warpgroups // 8 * 8


def tile_counts(problem: LinearProblem, config: Config) -> tuple[int, int]:
    """Row tiles (of clusters) and token tiles."""
    return -(-problem.weight_tiles * TILE_ROWS // config.rows), -(-problem.m // config.tile_m)


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """Blocks of a launch: at most one a multiprocessor; clusters walk over several tiles if there are more."""
    row_tiles, token_tiles = tile_counts(problem, config)
    tiles = row_tiles * token_tiles
    if config.min_blocks_per_sm > 1:  # one a multiprocessor, some of them idle
        return max(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1
    if config.split_k_warpgroups * config.cluster_k > 1 or config.halves or config.block_tiles:
        return tiles * config.cluster, 1, 1
    return min(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1


def refusal_of_loop(config: Config) -> str | None:
    """Why a config's loop cannot be; None if it can."""
    if config.direct and not may_batch(config):
        return (
            "direct loads of weights need 16-bit activations, span=1, prologue_stages=0, register_sets=2, at most 3 "
            "warpgroups along K, dense weights, groups of 32 or more, halves=False and min_blocks_per_sm=1"
        )
    if config.unrolled and not may_unroll(config):
        return (
            "unrolled stages need inputs shared by 2 or 3 warpgroups or by blocks, register_sets=2, direct=0, products "
            "without promotion, and symmetric codes where tiles of more than 16 tokens have min_blocks_per_sm=2"
        )
    return None


def may_batch(config: Config) -> bool:
    """Whether weights can go past shared memory, in batches."""
    alone = config.span == config.min_blocks_per_sm == 1
    plain = alone and not (config.halves or config.prologue_stages or config.sparse)
    plain = plain and config.group != 16  # whose scales take the registers
    return plain and config.x_bytes == 2 and config.split_k_warpgroups < 4 and config.register_sets == 2


def may_unroll(config: Config) -> bool:
    """A block has one tile, so that the ring begins with it."""
    shared = config.split_k_warpgroups * config.cluster_k > 1 and config.split_k_warpgroups < 4
    if config.min_blocks_per_sm == 2 and config.tile_m > 16 and config.code in (Code.asym, Code.min):
        return False  # with zeros of groups the 80 registers do not do
    return shared and not (config.promotes or config.direct) and config.register_sets == 2


def words_at_hand(config: Config) -> int:
    """Registers of codes, scales and zeros that are not in use yet."""
    if config.sparse:
        return config.bits + 2  # and the metadata of two halves
    if not config.direct:
        return 2 * config.bits
    parts = 128 // config.group if 0 < config.group < 128 else int(config.group > 0)
    return 8 + 2 * config.direct * (2 * config.bits + parts * (1 + (config.code in (Code.asym, Code.min))))
