"""Y = X W^T for packed weights and more than a handful of tokens, on Hopper's wgmma: the host side of packed_large.cuh.

The product is computed as Y^T = W X^T: weights, widened in registers, are the first operand of wgmma and its 64 rows;
tokens are its columns. See docs/packed.md for the figures behind the choices here.
"""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Int32, Kernel, Pointer, launch
from anybit.jit.tensor_map import TensorMap, encode
from anybit.kernels.pack import Packed
from anybit.kernels.packed_large_estimate import estimate, spans
from anybit.kernels.packed_large_loops import batch, refusal_of_loop, unrolls, words_at_hand
from anybit.kernels.packed_layout import TILE_COLUMNS, TILE_ROWS, PackedWeight, tile_bytes
from anybit.scheme import ActivationFormat, WeightFormat

_EARLY_BYTES = 32 << 10
_RESIDENT = ((2, 2), (2, 1), (1, 2))
"""Warpgroups and blocks that share K, where two blocks share a multiprocessor: what `configs` offers."""
_MOST_STAGES = 24
_LEAST_SHARED = {1: 117 << 10, 2: 80 << 10}
"""Shared memory of a block of which so many fit a multiprocessor, and one more does not."""
_MOST_BESIDE = 113 << 10
TOKENS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Widths of a token tile that wgmma and the epilogue take."""
_SHARINGS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2))


class Operand(enum.Enum):
    """What the tensor cores multiply: the type of x, and of the widened weights."""

    f16 = "float16"
    bf16 = "bfloat16"
    s8 = "int8"
    e4m3 = "e4m3"


class Code(enum.Enum):
    """The code of the weights, see anybit.scheme."""

    sym = "sym"
    asym = "asym"
    bipolar = "bipolar"


@dataclass(frozen=True)
class Problem:
    """Y[m, n] = X[m, k] W[n, k]^T, W packed in `weights`, X in `activations`, Y and 16-bit X in `dtype`.

    k: columns of x as the kernel is given it, in the order of the tiles' columns (activation order applied).
    Integer activations are bytes, codes less 2^(bits - 1).
    """

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat = field(default_factory=ActivationFormat)
    dtype: torch.dtype = torch.float16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))

    @property
    def operand(self) -> Operand:
        """What the tensor cores multiply."""
        if self.activations.quantized:
            return Operand.s8 if self.activations.integer else Operand.e4m3
        return Operand.bf16 if self.dtype == torch.bfloat16 else Operand.f16

    @property
    def units(self) -> int:
        """Steps of 128 inputs."""
        return -(-self.k // TILE_COLUMNS)

    @property
    def weight_tiles(self) -> int:
        """Tiles of 64 rows."""
        return -(-self.n // TILE_ROWS)


@dataclass(frozen=True)
class Config:
    """How a block works: fields are the constants of the device code.

    tokens: columns of a token tile. row_warpgroups: warpgroups side by side, 64 rows each. k_warpgroups: warpgroups
    that share the inputs of one row tile. k_blocks: blocks of a cluster that share the inputs. row_blocks: neighbours
    in a cluster that load X for each other. stripes: if not 0, the blocks of the launch, that take equal shares of all
    steps of all tiles and pass sums of tiles that they share through L2. stages: steps of 128 inputs in flight, and
    early: of how many the weights are asked for before x. staged: tokens that a warpgroup turns over at a time on their
    way to y, by turns in so many places of shared memory. register_sets: of widened weights; with 2 a warpgroup widens
    while it multiplies, with 1 it counts on the others. reallocates: the producer is a warpgroup that gives its
    registers to the others. halves: two blocks share one of their row tiles, half of its inputs each.
    resident: blocks that fit a multiprocessor, of this launch and of the next; then each of these gets one at least.
    span: steps of 128 inputs of a stage, 1 or 2: all that is done once a stage is done half as often with 2.
    direct: steps of weights that a warpgroup asks for at a time, past shared memory, while it multiplies those before;
    0: weights come through the ring. unrolled: each stage of the ring has code of its own, where a block has one tile.
    """

    operand: Operand
    bits: int
    group: int
    code: Code
    bfloat_out: bool
    tile_bytes: int
    tokens: int
    row_warpgroups: int
    k_warpgroups: int = 1
    k_blocks: int = 1
    row_blocks: int = 1
    stripes: int = 0
    stages: int = 4
    early: int = 2
    staged: int = 16
    places: int = 2
    register_sets: int = 2
    reallocates: bool = False
    halves: bool = False
    resident: int = 1
    span: int = 1
    direct: int = 0
    unrolled: bool = False

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
        return self.row_warpgroups * self.k_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block, its producer warp among them, or four of these."""
        return 128 * self.warpgroups + (128 if self.reallocates or self.row_warpgroups * self.tokens < 256 else 32)

    @property
    def tail_rows(self) -> int:
        """Rows of the boxes that a tile is loaded in if it lacks many of its tokens; 0: such tiles are loaded whole."""
        return 0 if self.row_blocks > 1 or self.tokens < 48 else 16 if self.tokens <= 64 else 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.halves else self.k_blocks * self.row_blocks

    @property
    def rows(self) -> int:
        """Rows of W that a cluster works on at a time."""
        if self.halves:
            return TILE_ROWS * (2 * self.row_warpgroups - 1)
        return TILE_ROWS * self.row_warpgroups * self.row_blocks


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
    partials: Pointer
    arrived: Pointer
    tokens: Int32
    rows: Int32
    units: Int32
    weight_tiles: Int32
    row_tiles: Int32
    token_tiles: Int32
    raster: Int32
    whole_tiles: Int32


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: ring, partial sums or staging, barriers. The device code asserts the same."""
    x_bytes = config.tokens * 128 * config.x_bytes
    weights = 0 if config.direct else -(-config.row_warpgroups * config.tile_bytes // 1024) * 1024
    stage = config.span * (x_bytes + weights)
    ring = config.stages * stage
    reduces = not config.stripes and config.k_warpgroups * config.k_blocks > 1
    share = _share_bytes(config) if reduces else 0
    # Outputs take half of a sum's bytes, for one of the warpgroups along K.
    outputs = share // (2 * config.k_warpgroups) if config.k_warpgroups > 1 else 0
    body = max(ring, share + outputs) + (config.k_blocks - 1) * share
    if config.stripes:
        body += (config.warpgroups - config.row_warpgroups) * config.tokens * 256
    if config.halves:
        body += config.tokens // 2 * 256
    body += 0 if reduces else config.warpgroups * config.places * config.staged * 128
    # More than half of a multiprocessor's: two blocks would share one while others stand idle.
    return max(body + config.stages * 24 + 8, _LEAST_SHARED[config.resident])


def _share_bytes(config: Config) -> int:
    """Bytes of the partial sums that one of the blocks sharing a tile adds up."""
    return config.warpgroups * -(-config.tokens // 8 // config.k_blocks) * 2048


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why a problem, or a config for it, cannot be taken; None if it can."""
    weights, activations = problem.weights, problem.activations
    if problem.device.arch != "sm_90a":
        return f"wgmma needs sm_90a, and the device is {problem.device.arch}"
    if min(problem.m, problem.n, problem.k) < 1:
        return f"m, n and k must be at least 1, not {problem.m}, {problem.n} and {problem.k}"
    if weights.sparse:
        return "no kernel multiplies 2:4 sparse weights yet: the reference backends do"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"outputs are float16 or bfloat16, not {problem.dtype}"
    if activations.quantized and (refusal := _why_not_bytes(problem)):
        return refusal
    if config is None:
        return None
    if config.tokens not in TOKENS:
        return f"a token tile has one of {TOKENS} tokens, not {config.tokens}"
    if config.warpgroups > 4 or config.warpgroups < 1:
        return f"a block has 1 to 4 warpgroups that multiply, not {config.warpgroups}"
    if config.tokens // 2 + 24 > _at_launch(config):  # one instruction's operands, which the assembler never splits
        return f"sums of {config.tokens} tokens do not fit the registers of {config.warpgroups} warpgroups at launch"
    if _unwidened(config) and config.register_sets != 1:
        return "8-bit codes that int8 products take as they lie are loaded over what products read: 1 register set"
    registers, most = _registers(config), _most_registers(config)
    if registers > most:
        return (
            f"{config.tokens} tokens need about {registers} registers, and {config.warpgroups} warpgroups have {most}"
        )
    if config.stages < max(config.k_warpgroups + 1, config.early):
        return (
            f"{config.stages} stages are too few for {config.k_warpgroups} warpgroups along the inputs and "
            f"{config.early} early stages"
        )
    if config.stages % config.k_warpgroups:
        return (
            f"{config.stages} stages are not dealt evenly to {config.k_warpgroups} warpgroups along the inputs: one of "
            "them would wait for a use of a stage without having seen the one before"
        )
    if config.cluster > 8:
        return f"a cluster has at most 8 blocks, not {config.cluster}"
    if config.row_blocks not in (1, 2):
        return f"1 or 2 neighbours share their loads of x, not {config.row_blocks}"
    if config.tokens % (8 * config.row_blocks):
        return f"{config.tokens} tokens do not divide among {config.row_blocks} blocks in eights"
    if config.halves and (refusal := _why_not_halves(problem, config)):
        return refusal
    if config.stripes:
        if config.cluster > 1:
            return "inputs are shared in clusters or in stripes, not both"
        most = min(problem.device.sms, math.prod(_place(problem, config)) * problem.units)
        if not 0 < config.stripes <= most:
            return f"stripes are 1 to {most} blocks, no more than multiprocessors or steps, not {config.stripes}"
    if config.span not in (1, 2) or (config.span == 2 and (problem.units % 2 or config.promotes or config.stripes)):
        return f"a stage has 1 step of inputs, or 2 of an even number (no stripes, no promotion), not {config.span}"
    if refusal := refusal_of_loop(config):
        return refusal
    if config.k_blocks * config.span > problem.units:
        return f"{problem.units} steps of inputs do not divide among {config.k_blocks} blocks, {config.span} at a time"
    if config.resident not in _LEAST_SHARED:
        return f"1 or 2 blocks share a multiprocessor, not {config.resident}"
    if config.resident > 1 and (config.stripes or config.halves or shared_bytes(config) > _MOST_BESIDE):
        return "two such blocks do not fit a multiprocessor"
    if shared_bytes(config) > problem.device.shared_bytes:
        return f"{shared_bytes(config)} bytes of shared memory are more than the device's {problem.device.shared_bytes}"
    return None


def _why_not_halves(problem: Problem, config: Config) -> str | None:
    """Why two blocks cannot halve a row tile of theirs."""
    if (
        config.warpgroups != config.row_warpgroups
        or config.row_warpgroups < 2
        or config.k_blocks * config.row_blocks > 1
    ):
        return "blocks that halve a row tile share nothing else, and have 2 warpgroups or more along the rows"
    if config.promotes or config.tokens % 16 or problem.units < 2:
        return "a row tile is halved in 2 steps of inputs or more, 16 tokens at a time, of products without promotion"
    if math.prod(_place(problem, config)) > problem.device.sms // 2:
        return "a pair of blocks that halve a row tile has one range of rows, and there are more of these than pairs"
    return None


def _why_not_bytes(problem: Problem) -> str | None:
    """Which weights widen to bytes exactly, and which activations are bytes."""
    weights, activations = problem.weights, problem.activations
    if problem.operand == Operand.s8:
        if activations.code != "sym" or activations.bits == 1:
            return (
                f"integer activations are symmetric and have 2 bits or more, not {activations.bits} {activations.code}"
            )
        if weights.bits == 8 and weights.code != "sym":
            return f"8-bit {weights.code} weights less their zeros do not fit a signed byte: use sym, or 7 bits"
        largest = 2 ** (weights.bits + (weights.code == "bipolar")) * 2 ** (activations.bits - 1)
        if weights.group is None and problem.k * largest >= 2**31:
            return f"sums over k = {problem.k} of products up to {largest} may overflow int32"
        return None
    most = 5 if weights.code == "sym" else 4
    if weights.bits > most:
        return (
            f"e4m3 holds integers up to 16 exactly: {weights.code} weights of {most} bits or fewer, not {weights.bits}"
        )
    return None


def _unwidened(config: Config) -> bool:
    """Whether registers go from shared memory to the products untouched.

    Then the next unit is loaded into registers of products that are on their way, where two sets let them be: the
    assembler does not keep them apart; w8a8 was wrong from 128 tokens on an H200.
    """
    return config.operand is Operand.s8 and config.bits == 8 and config.group == 0


def _registers(config: Config) -> int:
    """About what a thread that multiplies needs: accumulators, sets of widened weights, codes, scales, addresses."""
    accumulators = config.tokens if config.promotes else config.tokens // 2
    widened = 8 * config.x_bytes * (2 if config.promotes else config.register_sets)
    # Scales and biases of all its row tiles, where a thread adds up what others send.
    summing = 4 * config.row_warpgroups if config.k_blocks > 1 else 0
    groups = 8 if config.group == 32 else 0  # four scales and zeros of two rows at a time
    walk = 4 if config.stripes else 0
    return accumulators + widened + words_at_hand(config) + 24 + summing + groups + walk - 4 * (config.resident > 1)


def _at_launch(config: Config) -> int:
    """Registers of a thread at launch, with a producer beside the warpgroups, on a quarter of a multiprocessor."""
    return min(512 // config.resident // (config.warpgroups + 1) // 8 * 8, 255)


def _most_registers(config: Config) -> int:
    """Registers of a thread that multiplies after the producer has given up all but 32."""
    if not config.reallocates:
        return _at_launch(config)
    return ((config.warpgroups + 1) * _at_launch(config) - 32) // config.warpgroups // 8 * 8


def _place(problem: Problem, config: Config) -> tuple[int, int]:
    """Row tiles (of clusters) and token tiles."""
    return -(-problem.weight_tiles * TILE_ROWS // config.rows), -(-problem.m // config.tokens)


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks of a launch: at most one a multiprocessor; clusters walk over several tiles if there are more."""
    row_tiles, token_tiles = _place(problem, config)
    tiles = row_tiles * token_tiles
    if config.stripes:
        return config.stripes, 1, 1
    if config.resident > 1:  # one a multiprocessor, some of them idle
        return max(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1
    if config.k_warpgroups * config.k_blocks > 1 or config.halves:
        return tiles * config.cluster, 1, 1
    return min(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1


def config_for(
    problem: Problem,
    tokens: int,
    row_warpgroups: int,
    k_warpgroups: int = 1,
    k_blocks: int = 1,
    row_blocks: int = 1,
    stripes: int = 0,
    stages: int | None = None,
    halves: bool = False,
    resident: int = 1,
    direct: int | None = None,
    unrolled: bool | None = None,
) -> Config:
    """A config of these tiles; as many stages as fit, at most 24, if none are asked for, and `batch` for `direct`."""
    weights = problem.weights
    fields = (problem.operand, weights.bits, weights.group or 0, Code[weights.code], problem.dtype == torch.bfloat16)
    config = Config(
        *fields,
        tile_bytes(weights),
        tokens,
        row_warpgroups,
        k_warpgroups,
        k_blocks,
        row_blocks,
        stripes,
        stages or 2 * k_warpgroups,
        halves=halves,
        resident=resident,
    )
    shared = problem.device.shared_bytes if resident == 1 else _MOST_BESIDE
    most = 0 if stages else min(_MOST_STAGES, -(-problem.units // k_blocks))
    if count := direct if direct is not None else 0 if stages else batch(problem, config):
        found = _fitted(replace(config, direct=count, early=0), most, shared)
        if direct or found.register_sets == 2:
            return found
    fitted = _fitted(config, most, shared)
    if not stages and spans(problem, config):
        found = _fitted(replace(config, span=2), min(_MOST_STAGES, -(-problem.units // 2 // k_blocks)), shared)
        fitted = found if found.stages > max(2, k_warpgroups) else fitted
    return replace(fitted, unrolled=unrolls(fitted) if unrolled is None else unrolled)


@lru_cache(maxsize=1 << 14)
def _fitted(config: Config, most: int, shared: int) -> Config:
    """The config with registers and shared memory handed out; as many stages as fit, up to `most` if that is not 0.

    Kept, since searches and built-in choices ask for the same few hundred tiles for every layer.
    """
    # Registers first: give the warpgroups the producer's, then one set of widened weights must do.
    ways = ((1, False), (1, True)) if _unwidened(config) else ((2, False), (2, True), (1, True))
    for sets, reallocates in ways:
        if (sets, reallocates) != (2, False):
            config = replace(
                config, register_sets=sets, reallocates=reallocates and config.warpgroups > 1 and config.resident == 1
            )
        if _registers(config) <= _most_registers(config):
            break
    if most:
        stages, staged, places = _staging(config, most, shared)
        whole = 2 * config.direct * config.k_warpgroups  # whole rounds of batches: each stage has code of its own
        stages = min(stages, 12) // whole * whole or stages if whole else stages
        config = replace(config, stages=stages, staged=staged, places=places)
    if config.direct:
        return config
    # X queues behind the weights that were asked for before it: no more of them than keep memory busy until x can come.
    early = max(2, _EARLY_BYTES // (config.row_warpgroups * config.tile_bytes))
    if config.span > 1:
        if config.x_bytes == 1:
            early = 2 if config.tokens * config.row_warpgroups >= 256 else 4
        elif config.tokens > 16:
            early = 1 if config.halves and config.tokens > 32 else 3 if config.k_warpgroups == 4 else 2
        else:
            early = 2 if config.halves else config.stages // 2 if config.resident > 1 else 4
    elif config.x_bytes == 2 and 48 <= config.tokens <= 64:
        early = min(early, 3)
    elif config.halves:
        early = 3
    elif config.resident > 1:
        early = max(2, config.stages // 2)
    return replace(config, early=min(config.stages, early))


def _staging(config: Config, most: int, shared: int) -> tuple[int, int, int]:
    """stages, staged, places: the most stages that shared memory holds, then the most room for results on their way."""
    rooms = ((32, 2), (16, 2), (16, 1))
    least = 2 * config.k_warpgroups
    # Bytes are linear in stages where the ring is what needs them, so two sizes tell how many fit.
    tight = replace(config, stages=64, staged=rooms[-1][0], places=rooms[-1][1])
    size = shared_bytes(tight)
    step = size - shared_bytes(replace(tight, stages=63))
    stages = min(max(least, most), max(least, 64 - -(-max(0, size - shared) // step)))
    stages = max(stages // config.k_warpgroups, 2) * config.k_warpgroups
    for staged, places in rooms[:-1]:
        if shared_bytes(replace(config, stages=stages, staged=staged, places=places)) <= shared:
            return stages, staged, places
    return stages, *rooms[-1]


def configs(problem: Problem) -> Iterator[Config]:
    """Every legal config of the widths that fit `m`, for a search; without stripes, which must be asked for."""
    for tokens in TOKENS:
        # Narrow tiles side by side read the weights more than once (o at 64 tokens: 9.2 us, and 7.0 in one tile).
        if (tokens > 16 and tokens >= 2 * problem.m) or (tokens < 48 and tokens < problem.m):
            continue
        for row_warpgroups in (1, 2, 3, 4):
            for k_warpgroups in (1, 2, 3, 4):
                if row_warpgroups * k_warpgroups > 4:
                    continue
                for k_blocks, row_blocks in _SHARINGS:
                    found = config_for(problem, tokens, row_warpgroups, k_warpgroups, k_blocks, row_blocks)
                    if why_not(problem, found) is None:
                        yield found
            if row_warpgroups == 4 and problem.m <= 128:
                found = config_for(problem, tokens, row_warpgroups, halves=True)
                if why_not(problem, found) is None:
                    yield found
        for k_warpgroups, k_blocks in _RESIDENT if problem.m <= 64 else ():
            found = config_for(problem, tokens, 1, k_warpgroups, k_blocks, resident=2)
            if why_not(problem, found) is None:
                yield found


@lru_cache(maxsize=4096)
def default(problem: Problem) -> Config:
    """The legal config that `estimate` likes best, never with stripes. Raises KernelError where there is none."""
    best = min(configs(problem), key=lambda config: estimate(problem, config), default=None)
    if best is None:
        raise KernelError(f"packed_large cannot take {problem}: {why_not(problem) or 'no config is legal'}")
    return best


@lru_cache(maxsize=4096)
def kernel(config: Config) -> Kernel:
    """The kernel of a config, for jit."""
    return Kernel(
        header="packed_large.cuh",
        entry="packed::packed_large",
        config=config,
        params=Params,
        threads=config.threads,
        shared_bytes=shared_bytes(config),
        cluster=config.cluster,
    )


def params(
    problem: Problem,
    config: Config,
    x: Tensor | None,
    weight: PackedWeight,
    y: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_sum: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Params:
    """The arguments of a launch: x [m, k] (16-bit, or 8-bit codes with x_scale [m]) -> y [m, n].

    x_sum: int32 [m], the sums of integer codes, needed where weights have whole rows.

    Without an x the map is left empty, for the emulation to fill. workspace: for stripes, see `workspace_for`.
    """
    row_tiles, token_tiles = _place(problem, config)
    tiles, flags = row_tiles * token_tiles, config.stripes * config.row_warpgroups * config.tokens * 256
    # Stripes share the tiles of the last wave and of the one before it.
    waves = tiles // config.stripes if config.stripes else 0
    return Params(
        x=b"" if x is None else encode(x, 128 // x.element_size(), config.tokens // config.row_blocks),
        x_tail=b"" if x is None else encode(x, 128 // x.element_size(), config.tail_rows or 8),
        tiles=weight.tiles,
        row_scale=weight.row_scale,
        row_zero=weight.row_zero,
        x_scale=x_scale,
        x_sum=x_sum,
        bias=bias,
        y=y,
        partials=workspace,
        arrived=None if workspace is None else workspace[flags:],
        tokens=problem.m,
        rows=problem.n,
        units=problem.units,
        weight_tiles=problem.weight_tiles,
        row_tiles=row_tiles,
        token_tiles=token_tiles,
        raster=max(1, 4096 // config.rows),
        whole_tiles=max(waves - 1, 0) * config.stripes,
    )


def workspace_for(config: Config, device: torch.device) -> Tensor | None:
    """Where stripes leave the sums of tiles that they share, and flags; None for a config without stripes.

    It may hold anything but the flags' own 64 bits, and needs no clearing: so every launch takes a fresh one from
    torch's allocator, which keeps streams and captured graphs apart.
    """
    if not config.stripes:
        return None
    slots = config.stripes * config.row_warpgroups
    return torch.empty(slots * (config.tokens * 256 + 8), dtype=torch.uint8, device=device)


def multiply(
    x: Tensor | Packed,
    weight: PackedWeight,
    bias: Tensor | None,
    y: Tensor,
    config: Config | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Write y[m, n] = x[m, k] W^T (+ bias): one launch on the current stream.

    x: y's dtype, contiguous along k (in the order of the tiles' columns), its rows a multiple of 16 bytes apart, or the
    bytes of ``pack`` with their scales. bias: [n] in y's dtype. pdl: the launch may begin before the one ahead of it
    ends. Shapes were checked by ops.
    """
    x_scale = x_sum = None
    activations = ActivationFormat()
    if bias is not None and bias.dtype != y.dtype:
        bias = bias.to(y.dtype)
    if isinstance(x, Packed):
        activations, x_scale, x_sum, x = x.format, x.scale, x.sum, x.codes[:, : x.k]
    problem = Problem(y.shape[0], y.shape[1], x.shape[1], weight.format, activations, y.dtype)
    config = config or default(problem)
    workspace = workspace_for(config, y.device)
    arguments = params(problem, config, x, weight, y, bias, x_scale, x_sum, workspace)
    launch(kernel(config), arguments, grid(problem, config), pdl=pdl, device=y.get_device())
