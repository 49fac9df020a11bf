"""Y = X W^T for packed weights and more than a handful of tokens, on Hopper's wgmma: the host side of packed_large.cuh.

The product is computed as Y^T = W X^T: weights, widened in registers, are the first operand of wgmma and its 64 rows;
tokens are its columns. See docs/packed.md for the figures behind the choices here.
"""

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Int32, Kernel, Pointer, launch
from anybit.jit.tensor_map import TensorMap, encode
from anybit.kernels.pack import Packed
from anybit.kernels.packed_layout import TILE_COLUMNS, TILE_ROWS, PackedWeight, tile_bytes
from anybit.scheme import ActivationFormat, WeightFormat

_ROW_STRIDE = 68
_EARLY_BYTES = 32 << 10
TOKENS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Widths of a token tile that wgmma and the epilogue take."""
_SHARINGS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))
_WORKSPACE, _FLAGS = 5 << 20, 1024
"""32-bit words of the memory through which blocks share sums, and how many of them, at its end, count arrivals."""


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
    in a cluster that load X for each other. k_splits: blocks that are no cluster and share the inputs through L2.
    stages: steps of 128 inputs in flight, and early: of how many the weights are asked for before x. places: where a
    warp turns its sums over, by turns. register_sets: of widened weights; with 2 a warpgroup widens while it
    multiplies, with 1 it counts on the others. reallocates: the producer is a warpgroup that gives its registers to
    the others.
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
    k_splits: int = 1
    stages: int = 4
    early: int = 2
    places: int = 2
    register_sets: int = 2
    reallocates: bool = False

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
        """Threads of a block, its producer warp among them."""
        return 128 * self.warpgroups + (128 if self.reallocates else 32)

    @property
    def k_shares(self) -> int:
        """Blocks that share the inputs of a tile."""
        return self.k_blocks * self.k_splits

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.k_blocks * self.row_blocks

    @property
    def rows(self) -> int:
        """Rows of W that a cluster works on at a time."""
        return TILE_ROWS * self.row_warpgroups * self.row_blocks


@dataclass(frozen=True)
class Params:
    """The arguments of one launch; see the struct of the same name."""

    x: TensorMap
    tiles: Pointer
    row_scale: Pointer
    row_zero: Pointer
    x_scale: Pointer
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


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: ring, partial sums or staging, barriers. The device code asserts the same."""
    x_bytes = config.tokens * 128 * config.x_bytes
    stage = x_bytes + -(-config.row_warpgroups * config.tile_bytes // 1024) * 1024
    ring = config.stages * stage
    reduces = config.k_warpgroups * config.k_shares > 1
    share = _share_bytes(config) if reduces else 0
    body = max(ring, config.k_shares * share) + (config.k_blocks - 1) * share
    return body + (0 if reduces else config.warpgroups * 4 * 512 * config.places) + config.stages * 24 + 8


def _share_bytes(config: Config) -> int:
    """Bytes of the partial sums that one of the blocks sharing a tile adds up."""
    return config.warpgroups * (config.tokens // config.k_shares) * _ROW_STRIDE * 4


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why a problem, or a config for it, cannot be taken; None if it can."""
    weights, activations = problem.weights, problem.activations
    if problem.device.arch != "sm_90a":
        return f"wgmma needs sm_90a, and the device is {problem.device.arch}"
    if min(problem.m, problem.n, problem.k) < 1:
        return f"m, n and k must be at least 1, not {problem.m}, {problem.n} and {problem.k}"
    if weights.sparse:
        return "2:4 sparse weights have a kernel of their own"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"outputs are float16 or bfloat16, not {problem.dtype}"
    refusal = _why_not_bytes(problem) if activations.quantized else None
    if refusal is not None:
        return refusal
    pitch = problem.k * (1 if activations.quantized else 2)
    if pitch % 16:
        return f"rows of x must be multiples of 16 bytes, and k = {problem.k} makes them {pitch}: pad x with zeros"
    if config is None:
        return None
    if config.tokens not in TOKENS:
        return f"a token tile has one of {TOKENS} tokens, not {config.tokens}"
    if config.warpgroups > 4 or config.warpgroups < 1:
        return f"a block has 1 to 4 warpgroups that multiply, not {config.warpgroups}"
    if config.tokens // 2 + 8 > _at_launch(config):  # one instruction's operands, which the assembler never splits
        return f"sums of {config.tokens} tokens do not fit the registers of {config.warpgroups} warpgroups at launch"
    registers, most = _registers(config), _most_registers(config)
    if registers > most:
        return (
            f"{config.tokens} tokens need about {registers} registers, and {config.warpgroups} warpgroups have {most}"
        )
    if config.stages < max(2, config.k_warpgroups, config.early):
        return (
            f"{config.stages} stages are too few for {config.k_warpgroups} warpgroups along the inputs and "
            f"{config.early} early stages"
        )
    if config.cluster > 8:
        return f"a cluster has at most 8 blocks, not {config.cluster}"
    if config.row_blocks not in (1, 2):
        return f"1 or 2 neighbours share their loads of x, not {config.row_blocks}"
    if config.tokens % (8 * config.row_blocks) or config.tokens % (8 * config.k_shares):
        return f"{config.tokens} tokens do not divide among {config.row_blocks} x {config.k_shares} blocks in eights"
    if config.k_shares > problem.units:
        return f"{problem.units} steps of 128 inputs do not divide among {config.k_shares} blocks"
    if config.k_splits > 1:
        if config.cluster > 1:
            return "inputs are shared in clusters or through L2, not both"
        blocks = math.prod(_place(problem, config)) * config.k_splits
        if blocks > problem.device.sms:
            return f"{blocks} blocks that wait for each other must all run at once, on {problem.device.sms} processors"
    if shared_bytes(config) > problem.device.shared_bytes:
        return f"{shared_bytes(config)} bytes of shared memory are more than the device's {problem.device.shared_bytes}"
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
        largest = (2**weights.bits if weights.code != "sym" else 2 ** (weights.bits - 1)) * 2 ** (activations.bits - 1)
        if weights.group is None and problem.k * largest >= 2**31:
            return f"sums over k = {problem.k} of products up to {largest} may overflow int32"
        return None
    most = 5 if weights.code == "sym" else 4
    if weights.bits > most:
        return (
            f"e4m3 holds integers up to 16 exactly: {weights.code} weights of {most} bits or fewer, not {weights.bits}"
        )
    return None


def _registers(config: Config) -> int:
    """About what a thread that multiplies needs: accumulators, sets of widened weights, codes, scales, addresses."""
    accumulators = config.tokens if config.promotes else config.tokens // 2
    widened = 8 * config.x_bytes * (2 if config.promotes else config.register_sets)
    # Scales and biases of all its row tiles, where a thread adds up what others send.
    summing = 4 * config.row_warpgroups if config.k_shares > 1 else 0
    groups = 8 if config.group == 32 else 0  # four scales and zeros of two rows at a time
    return accumulators + widened + 2 * config.bits + 12 + summing + groups


def _at_launch(config: Config) -> int:
    """Registers of a thread at launch, with a producer beside the warpgroups, on a quarter of a multiprocessor."""
    return min(512 // (config.warpgroups + 1) // 8 * 8, 255)


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
    if config.k_warpgroups * config.k_shares > 1:
        return tiles * config.cluster * config.k_splits, 1, 1
    return min(tiles, problem.device.sms // config.cluster) * config.cluster, 1, 1


def config_for(
    problem: Problem,
    tokens: int,
    row_warpgroups: int,
    k_warpgroups: int = 1,
    k_blocks: int = 1,
    row_blocks: int = 1,
    k_splits: int = 1,
    stages: int | None = None,
) -> Config:
    """A config of these tiles; as many stages as shared memory holds, at most 12, if none are asked for."""
    weights = problem.weights
    fields = (problem.operand, weights.bits, weights.group or 0, Code[weights.code], problem.dtype == torch.bfloat16)
    config = Config(
        *fields, tile_bytes(weights), tokens, row_warpgroups, k_warpgroups, k_blocks, row_blocks, k_splits, stages or 2
    )
    # Registers first: give the warpgroups the producer's, then one set of widened weights must do.
    for sets, reallocates in ((2, False), (2, True), (1, True)):
        config = replace(config, register_sets=sets, reallocates=reallocates and config.warpgroups > 1)
        if _registers(config) <= _most_registers(config):
            break
    if stages is None:
        most = max(2, k_warpgroups, min(12, -(-problem.units // config.k_shares)))
        for stages, places in itertools.product(range(most, 1, -1), (2, 1)):
            config = replace(config, stages=stages, places=places)
            if shared_bytes(config) <= problem.device.shared_bytes:
                break
    # X queues behind the weights that were asked for before it: no more of them than keep memory busy until x can come.
    early = max(2, _EARLY_BYTES // (row_warpgroups * config.tile_bytes))
    return replace(config, early=min(config.stages, early))


def configs(problem: Problem) -> Iterator[Config]:
    """Every legal config of the widths that fit `m`, for a search."""
    for tokens in TOKENS:
        if tokens > 16 and tokens >= 2 * problem.m:
            continue
        for row_warpgroups in (1, 2, 3, 4):
            for k_warpgroups in (1, 2, 3, 4):
                if row_warpgroups * k_warpgroups > 4:
                    continue
                for k_blocks, row_blocks, k_splits in _SHARINGS:
                    found = config_for(problem, tokens, row_warpgroups, k_warpgroups, k_blocks, row_blocks, k_splits)
                    if why_not(problem, found) is None:
                        yield found


def estimate(problem: Problem, config: Config) -> float:
    """About how many microseconds a config takes on an H200, between others in a chain; fitted, see docs/packed.md."""
    row_tiles, token_tiles = _place(problem, config)
    tokens, partial = config.tokens, config.row_warpgroups * config.tokens / 64
    # Clusters of four do not fill an H200: 30 of them fit.
    waves = float(-(-row_tiles * token_tiles // {1: 132, 2: 66, 4: 30}.get(config.cluster, 15)))
    if waves > 1 and config.warpgroups * config.k_shares > config.row_warpgroups:
        waves *= 1.7  # blocks that add up sums do not walk on to a next tile: every wave starts anew
    # Cycles that 64 rows take of a stage: tensor cores when tokens are many, else widening, shared memory and issue.
    if config.promotes:
        tile = max(4.5 * tokens, 330)
    elif config.x_bytes == 1:
        tile = max((2.5 if tokens >= 256 else 2.75) * tokens, 310)
    else:
        tile = max(4.3 * tokens, 210 + 2.3 * tokens)
    if config.bits in (3, 5, 6, 7) or config.operand == Operand.bf16:
        tile += 40
    stage = max(
        tile * config.row_warpgroups,
        (230 + 3.6 * min(tokens, 64)) * (1.06 if config.warpgroups == 1 and tokens < 64 else 1),  # however little it is
        (tokens * 128 * config.x_bytes + config.row_warpgroups * config.tile_bytes) / 54,  # what a processor takes in
    )
    summing = 0.5 * partial if config.warpgroups > config.row_warpgroups else 0.0
    if config.k_blocks > 1:
        summing += 1.3 + 0.5 * partial + 0.3 * (config.k_blocks > 2)
    if config.k_splits > 1:
        summing += 2.0 + 1.1 * partial
    waste = 1.0 if token_tiles == 1 or tokens in (16, 32, 64, 128, 256) else 1.05
    units = -(-problem.units // config.k_shares)
    return 1.6 + summing + 0.5 * (config.row_blocks - 1) + waste * waves * (units * stage / 1850 + 0.5 + tokens / 128)


@lru_cache(maxsize=4096)
def default(problem: Problem) -> Config:
    """The legal config that `estimate` likes best. Raises KernelError where there is none.

    Never one with k_splits: its blocks wait for each other, so two such launches on two streams could wait for ever.
    """
    safe = (config for config in configs(problem) if config.k_splits == 1)
    best = min(safe, key=lambda config: estimate(problem, config), default=None)
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
    workspace: Tensor | None = None,
) -> Params:
    """The arguments of a launch: x [m, k] (16-bit, or 8-bit codes with x_scale [m]) -> y [m, n].

    Without an x the map is left empty, for the emulation to fill. workspace: for k_splits, see `workspace_of`.
    """
    row_tiles, token_tiles = _place(problem, config)
    return Params(
        x=b"" if x is None else encode(x, 128 // x.element_size(), config.tokens // config.row_blocks),
        tiles=weight.tiles,
        row_scale=weight.row_scale,
        row_zero=weight.row_zero,
        x_scale=x_scale,
        bias=bias,
        y=y,
        partials=workspace,
        arrived=None if workspace is None else workspace[-_FLAGS:],
        tokens=problem.m,
        rows=problem.n,
        units=problem.units,
        weight_tiles=problem.weight_tiles,
        row_tiles=row_tiles,
        token_tiles=token_tiles,
        raster=max(1, 4096 // config.rows),
    )


def workspace_of(device: torch.device) -> Tensor:
    """Where blocks of k_splits > 1 leave partial sums: one for each stream, zero at first and between launches.

    A launch waits until all its blocks are on the device, which two of them on two streams may keep from each other
    when both are there with half of their blocks: so `default` takes no such config. Raises KernelError where a graph
    is being captured on a stream that has none yet, since what zeros it would only run with the graph.
    """
    if device.type != "cuda":
        return _workspace(device, 0)
    stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _with_workspace and torch.cuda.is_current_stream_capturing():
        raise KernelError("a config with k_splits needs one launch on the capturing stream before its capture begins")
    _with_workspace.add((device, stream))
    return _workspace(device, stream)


_with_workspace: set[tuple[torch.device, int]] = set()


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Zeros, for the blocks of one stream's launches."""
    return torch.zeros(_WORKSPACE + _FLAGS, dtype=torch.int32, device=device)


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

    x: y's dtype, contiguous along k (in the order of the tiles' columns), or the bytes of ``pack`` with their scales.
    bias: [n] in y's dtype. pdl: the launch may begin before the one ahead of it ends. Shapes were checked by ops.
    """
    x_scale = None
    activations = ActivationFormat()
    if bias is not None and bias.dtype != y.dtype:
        bias = bias.to(y.dtype)
    if isinstance(x, Packed):
        activations, x_scale, x = x.format, x.scale, x.codes[:, : x.k]
    problem = Problem(y.shape[0], y.shape[1], x.shape[1], weight.format, activations, y.dtype)
    config = config or default(problem)
    workspace = workspace_of(y.device) if config.k_splits > 1 else None
    arguments = params(problem, config, x, weight, y, bias, x_scale, workspace)
    launch(kernel(config), arguments, grid(problem, config), pdl=pdl)
