"""Any-precision GEMM on the 1-bit tensor cores of sm_90 (wgmma AND-popcount). Host side of bitwise.cuh.

Y = X W^T for W of 1 to 8 bits and X of 1 to 8 bits, each sym, asym or bipolar: one product of unsigned bit planes and
rank-1 terms (APT-LLM's arbitrary-precision decomposition; the planes of both sides meet on chip, never in memory).
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Int32, Int64, Pointer, tensor_map
from anybit.jit.tensor_map import TensorMap
from anybit.kernels import planes
from anybit.kernels.pack import Packed
from anybit.kernels.planes import Code
from anybit.scheme import ActivationFormat, Scheme, WeightFormat


class Output(Enum):
    """What a product is written as: the exact integer V of bitwise_terms.cuh, or scaled and rounded once."""

    s32 = "int32"
    f16 = "float16"
    bf16 = "bfloat16"
    f32 = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


class Path(Enum):
    """Which kernel: tiles of 128 weights for many tokens, or of 64 with k shared out, for few."""

    large = "large"
    small = "small"


class Turns(Enum):
    """How the two warpgroups of a large tile take turns; staggered: not at all, but the second starts later."""

    none = "none"
    diagonals = "diagonals"
    tiles = "tiles"
    staggered = "staggered"


class Walk(Enum):
    """Which operand of a small tile stands on wgmma's A side, 64 rows, and is walked plane by plane."""

    weights = "weights"
    tokens = "tokens"


@dataclass(frozen=True)
class Problem:
    """Y[m, n] = X[m, k] W[n, k]^T for operands in bit planes."""

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat
    output: Output
    device: Device


@dataclass(frozen=True)
class Config:
    """How. ``tokens`` of a tile; ``short_sums``: no V reaches 2^22; ``blocks`` that registers must allow a
    multiprocessor; the rest belongs to one path.

    large: chunks of weights and of activations that shared memory holds (``weight_groups``, ``activation_groups``),
    tokens that are staged at once on their way out (``slab``) and how many such ``buffers`` there are, whether they
    leave by tensor map (``tensor``: rows of Y start on 16 bytes and end so), how the two warpgroups take turns,
    whether a block keeps its activations while it goes through weights (``resident``), the tokens of the tiles into
    which those are cut that whole rounds leave (``tail``, 0: none is cut), whether results leave L2 first
    (``streamed``), and the blocks (``cluster``, with ``multicast``) that load their tokens for each other.
    small: the operand that is walked (``walk``), its planes in flight (``slots``), the chunks of the other in shared
    memory (``stages``) and in a walk (``span``), the columns of the product (``stacked``, planes side by side), the
    warpgroups of a block (``groups``) that share k, or the columns of the tile (``by_columns``), or the blocks
    (``cluster``) that share k or (``multicast``) load their tokens for each other. ``tokens`` are the columns of the
    tile, which for Walk.tokens are weights.
    """

    path: Path
    weight_bits: int
    activation_bits: int
    weight_code: Code
    activation_code: Code
    output: Output
    tokens: int
    short_sums: bool = False
    blocks: int = 1
    weight_groups: int = 0
    activation_groups: int = 0
    slab: int = 32
    buffers: int = 3
    tensor: bool = False
    turns: Turns = Turns.diagonals
    resident: bool = False
    tail: int = 0
    streamed: bool = False
    walk: Walk = Walk.weights
    slots: int = 0
    stages: int = 0
    span: int = 0
    groups: int = 1
    by_columns: bool = False
    cluster: int = 1
    multicast: bool = False
    stacked: int = 0

    @property
    def threads(self) -> int:
        """Threads a block: two warpgroups that multiply, or one, and a warpgroup or a warp, of which a thread loads."""
        return 384 if self.path is Path.large else 128 * self.groups + 32


@dataclass(frozen=True)
class Params:
    """Arguments of one launch; see bitwise_terms.cuh."""

    y_map: TensorMap
    weights: Pointer
    activations: Pointer
    weight_scale: Pointer
    correction: Pointer
    weight_zero: Pointer
    bias: Pointer
    activation_scale: Pointer
    activation_sum: Pointer
    activation_zero: Pointer
    y: Pointer
    y_stride: Int64
    m: Int32
    n: Int32
    rows_m: Int32
    rows_n: Int32
    chunks: Int32


_ROWS = 128
_SMALL_ROWS = 64
_PLANE_N = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # what wgmma takes
_SLOT_ROW = planes.ROW_BYTES


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot do ``problem``, in a sentence; None if it can."""
    asked = (problem.m, problem.n, problem.k, problem.weights, problem.activations, problem.device)
    reason = planes.why_not_product(*asked, first=90)
    if reason is not None:
        return reason
    return None if config is None else _why_not_config(problem, config)


def _why_not_config(problem: Problem, config: Config) -> str | None:
    if (config.weight_bits, config.activation_bits) != (problem.weights.bits, problem.activations.bits):
        return "the config is for other widths"
    if (config.weight_code.value, config.activation_code.value) != (problem.weights.code, problem.activations.code):
        return "the config is for other codes"
    if config.output is not problem.output:
        return f"the config writes {config.output.value}, and {problem.output.value} is asked for"
    if config.short_sums and not _short_sums(problem):
        return f"sums of K = {problem.k} may reach 2^22, and the config's are shorter"
    if config.tokens % 8:
        return f"a tile of {config.tokens} tokens is not made of eights"
    reason = _why_not_large(problem, config) if config.path is Path.large else _why_not_small(problem, config)
    if reason is not None:
        return reason
    needed = shared_bytes(config)
    if needed > problem.device.shared_bytes:
        return (
            f"{needed} bytes of shared memory are more than the {problem.device.shared_bytes} that a block of "
            f"{problem.device.arch} can have"
        )
    return None


def _short_sums(problem: Problem) -> bool:
    return planes.largest_sum(problem.k, problem.weights, problem.activations) < 2**22


def _why_not_large(problem: Problem, config: Config) -> str | None:
    p, q, chunks = config.weight_bits, config.activation_bits, planes.chunks(problem.k)
    if config.tokens not in (64, 128, 256):
        return f"large tiles have 64, 128 or 256 tokens, not {config.tokens}"
    if config.slab not in (32, 64, 128) or config.slab > config.tokens:
        return f"32, 64 or 128 of a tile's {config.tokens} tokens are staged at once, not {config.slab}"
    if not 2 <= config.buffers <= 8:
        return f"results are staged in 2 to 8 buffers, not {config.buffers}"
    if config.cluster not in (1, 2, 4) or config.multicast != (config.cluster > 1):
        return f"1, 2 or 4 blocks load tokens for each other, not {config.cluster}"
    if config.resident and config.multicast:
        return "blocks that keep their tokens do not load them for each other"
    if config.streamed and not config.tensor:
        return "results that leave L2 first leave by tensor map"
    if config.tail and (config.resident or config.tail not in (64, 128) or config.tail >= config.tokens):
        return f"streaming blocks cut their last tiles of {config.tokens} tokens into 64 or 128, not {config.tail}"
    if config.tensor and not _narrow(config):
        return f"tensor maps store 16-bit results, not {config.output.value}"
    if config.tensor and problem.n % 8:
        return f"tensor maps store whole sixteen bytes, and rows of {problem.n} results end within them"
    for side, bits, groups in (("weight", p, config.weight_groups), ("activation", q, config.activation_groups)):
        if groups < 1 or groups * bits < 2:
            return f"loading ahead needs room for two planes, and {groups} chunks of {bits} {side} planes are fewer"
    if config.resident and config.activation_groups != chunks:
        return f"resident activations are all {chunks} chunks of k, and the config holds {config.activation_groups}"
    if config.turns is Turns.tiles and min(config.weight_groups, config.activation_groups) < chunks:
        return f"turns tile by tile need all {chunks} chunks of k in shared memory, for weights and activations"
    return None


def _why_not_small(problem: Problem, config: Config) -> str | None:
    beside = _beside(config)
    parts = config.groups if config.by_columns else 1
    needed = beside * config.tokens // parts
    if config.tokens % (8 * parts) or config.stacked not in _PLANE_N or config.stacked < needed:
        return f"{beside} planes of {config.tokens} rows are {needed} columns, and the most is {_PLANE_N[-1]}"
    if not 2 <= config.slots <= 32:
        return f"loading ahead needs slots for two planes, and a lane of the loading warp for each, not {config.slots}"
    split = _split(config)
    rounds = -(-planes.chunks(problem.k) // split)
    if not 1 <= config.span <= config.stages or (config.span < rounds and config.stages < 2 * config.span):
        return f"walks of {config.span} chunks of {rounds} need as many slots, or twice as many, not {config.stages}"
    if config.groups not in (1, 2, 4) or config.groups > 1 < split:
        return f"k is shared by 1, 2 or 4 warpgroups or by blocks, not by {config.groups} of each of {split}"
    walked = config.weight_bits if config.walk is Walk.weights else config.activation_bits
    once = config.span >= rounds and config.slots >= walked * rounds
    if config.groups > 1 and not config.by_columns and not once:
        # A warpgroup that skips the others' chunks tells one use of a slot from the next but one by nothing: it hung.
        return f"warpgroups that share k need a slot for each of {walked} planes of {rounds} chunks, not {config.slots}"
    if config.multicast:
        reason = _why_not_multicast(problem, config, rounds)
        if reason is not None:
            return reason
    room = (config.slots * _SMALL_ROWS + config.stages * config.stacked) * _SLOT_ROW
    if not config.by_columns and config.groups * config.tokens * 256 > room:
        return f"the sums of {config.groups} warpgroups do not fit over {config.slots} slots and {config.stages} chunks"
    if config.tokens // 2 % config.groups:
        return f"the {config.tokens // 2} sums of a thread are not shared out by {config.groups} warpgroups"
    registers = 65536 // (128 * -(-config.blocks * config.threads // 128)) // 8 * 8  # warps lie in four partitions
    if config.stacked * 9 // 16 + 36 > registers:
        return f"{config.stacked // 2} sums are too many for the {registers} registers of each of so many threads"
    if config.cluster not in (1, 2, 4, 8) or config.tokens // 2 % split:
        return f"the {config.tokens // 2} sums of a thread are not shared out by {config.cluster} blocks"
    return None


def _why_not_multicast(problem: Problem, config: Config, rounds: int) -> str | None:
    weights = _SMALL_ROWS if config.walk is Walk.weights else config.tokens
    tokens = config.tokens if config.walk is Walk.weights else _SMALL_ROWS
    if config.cluster == 1 or -(-problem.n // weights) % config.cluster:
        return f"{-(-problem.n // weights)} tiles of weights are not made of clusters of {config.cluster}"
    if tokens % (8 * config.cluster):
        return f"{config.cluster} blocks do not load {tokens} tokens in eights"
    if config.span < rounds:
        return f"the slots of chunks are used once, and {config.span} of {rounds} chunks have one"
    return None


def _split(config: Config) -> int:
    """Blocks that share k."""
    return 1 if config.multicast else config.cluster


def _narrow(config: Config) -> bool:
    return config.output in (Output.f16, Output.bf16)


def _beside(config: Config) -> int:
    """Planes that stand side by side."""
    return config.activation_bits if config.walk is Walk.weights else config.weight_bits


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block."""
    p, q = config.weight_bits, config.activation_bits
    if config.path is Path.large:
        weight_slots, activation_slots = config.weight_groups * p, config.activation_groups * q
        columns = 2 * config.tokens * (12 if config.activation_code is Code.asym else 8)
        writer = 128 * config.slab * config.buffers * _narrow(config) + columns
        slots = (weight_slots * _ROWS + activation_slots * config.tokens) * _SLOT_ROW
        barriers = 16 * (weight_slots + activation_slots + 2 * config.buffers)
        return slots + 2 * (-(-writer // 1024) * 1024) + barriers
    received = config.tokens // 2 * 4 * 128 if _split(config) > 1 else 0
    stacked = config.stacked * (config.groups if config.by_columns else 1)
    slots = (config.slots * _SMALL_ROWS + config.stages * stacked) * _SLOT_ROW
    return slots + received + 16 * (config.slots + config.stages) + 16


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """large: as many blocks as run at once, each taking tile after tile; small: a cluster a tile."""
    if config.path is Path.large:
        tiles = -(-problem.m // config.tokens) * -(-problem.n // (_ROWS * config.cluster))
        pieces = tiles * (config.tokens // config.tail if config.tail else 1)
        return (min(pieces, problem.device.sms // config.cluster) * config.cluster, 1, 1)
    weights, tokens = (_SMALL_ROWS, config.tokens) if config.walk is Walk.weights else (config.tokens, _SMALL_ROWS)
    return (-(-problem.n // weights) * _split(config), -(-problem.m // tokens), 1)


def stacked_columns(needed: int) -> int:
    """The smallest N of a product that holds ``needed`` columns; 0 if there is none."""
    return next((n for n in _PLANE_N if n >= needed), 0)


def _candidates(problem: Problem) -> Iterator[Config]:
    p, q = problem.weights.bits, problem.activations.bits
    codes = Code(problem.weights.code), Code(problem.activations.code)
    tensor = problem.output in (Output.f16, Output.bf16) and problem.n % 8 == 0
    groups, buffers = (1, 2, 3, 4), ((32, 3), (32, 4), (64, 2), (64, 3))
    for tokens, weights, activations, (slab, count), turns in itertools.product(
        (256, 128, 64), groups, groups, buffers, Turns
    ):
        config = Config(
            Path.large,
            p,
            q,
            *codes,
            problem.output,
            tokens,
            _short_sums(problem),
            weight_groups=weights,
            activation_groups=activations,
            slab=slab,
            buffers=count,
            tensor=tensor,
            turns=turns,
        )
        yield config
        yield replace(config, resident=True)
        if tokens == 256:
            rounds = -(-problem.m // tokens) * -(-problem.n // _ROWS) / problem.device.sms
            yield replace(config, cluster=2, multicast=True)
            if rounds > 1:
                yield replace(config, tail=64)
                yield replace(config, tail=64, cluster=2, multicast=True)
    yield from _small_candidates(problem)


def _small_candidates(problem: Problem) -> Iterator[Config]:
    p, q, chunks = problem.weights.bits, problem.activations.bits, planes.chunks(problem.k)
    codes = Code(problem.weights.code), Code(problem.activations.code)
    half = problem.device.shared_bytes // 2 - 1024
    tiles = [
        (Walk.weights, 8),
        (Walk.weights, 16),
        (Walk.weights, 32),
        (Walk.tokens, 16),
        (Walk.tokens, 32),
        (Walk.tokens, 64),
    ]
    sharing = [(1, 1, False), (1, 2, False), (1, 4, False), (2, 1, False), (4, 1, False), (2, 1, True), (4, 1, True)]
    for (walk, tokens), (groups, cluster, by_columns) in itertools.product(tiles, sharing):
        beside = (q if walk is Walk.weights else p) * tokens // (groups if by_columns else 1)
        rounds = -(-chunks // cluster)
        for span in sorted({min(n, rounds) for n in (1, 2, 4, 8, 16)}):
            # Slots beyond the planes hold nothing, and yet M = 1 was 24 to 49 % slower without them (4096 x 4096);
            # perhaps because they keep a multiprocessor from taking many small blocks.
            for slots in (2, 3, 4, 6, 8, 12, 16):
                config = Config(
                    Path.small,
                    p,
                    q,
                    *codes,
                    problem.output,
                    tokens,
                    _short_sums(problem),
                    walk=walk,
                    slots=slots,
                    stages=span if span == rounds else 2 * span,
                    span=span,
                    groups=groups,
                    by_columns=by_columns,
                    cluster=cluster,
                    stacked=stacked_columns(beside),
                )
                yield config
                # So that the next kernel's block fits beside this one's.
                if shared_bytes(config) <= half and (groups > 1 or (walk, tokens) == (Walk.tokens, 32)):
                    yield replace(config, blocks=2)


@functools.cache
def configs(problem: Problem) -> tuple[Config, ...]:
    """Every legal config of a problem."""
    # Of M and N they depend on little: whether tiles are left for a last round, and how N divides. Problems that agree
    # in it share their configs, which take a twentieth of a second to find.
    several = -(-problem.m // 256) * -(-problem.n // _ROWS) > problem.device.sms
    alike = replace(problem, m=256 * problem.device.sms + 1 if several else 1, n=problem.n % 512 or 512)
    return _configs(alike if min(problem.m, problem.n) >= 1 else problem)


@functools.cache
def _configs(problem: Problem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: Problem) -> Config:
    """A good config, by what was measured on an H200 (docs/bitwise.md); raises KernelError where there is none."""
    reason = why_not(problem)
    if reason is not None:
        raise KernelError(f"no wgmma kernel for {_text(problem)}: {reason}")
    found = configs(problem)
    if not found:
        raise KernelError(f"no wgmma config fits {_text(problem)} on {problem.device.arch}")
    # Small tiles load a tile of weights for every 8 to 32 tokens: from 33 on only while large ones leave blocks idle.
    if problem.m <= 32 or (problem.m <= 64 and -(-problem.n // _ROWS) < problem.device.sms):
        return _default_small(problem, [c for c in found if c.path is Path.small])
    return _default_large(problem, [c for c in found if c.path is Path.large])


def seeds(problem: Problem) -> list[Config]:
    """What a search starts from: the default, and the default of each path whatever M is."""
    found = configs(problem)
    by_path = {path: [config for config in found if config.path is path] for path in Path}
    others = [_default_large(problem, by_path[Path.large])] if by_path[Path.large] else []
    others += [_default_small(problem, by_path[Path.small])] if by_path[Path.small] else []
    return list(dict.fromkeys([default(problem), *others]))


def _default_large(problem: Problem, found: list[Config]) -> Config:
    """The tiles that fill the GPU best, deep rings (activations first), and as many buffers as they leave room for."""
    turns = Turns.tiles if problem.weights.bits == problem.activations.bits == 1 else Turns.none

    def cost(config: Config) -> tuple[float, ...]:
        tiles, sms = -(-problem.m // config.tokens) * -(-problem.n // _ROWS), problem.device.sms
        # Products of small tiles wait for shared memory; a tile's results and start cost about 24 tokens' products.
        rounds = tiles // sms if config.tail else -(-tiles // sms)
        work = rounds * (config.tokens + 24) * (1.0 if config.tokens == 256 else 1.1)
        if config.tail:
            work += -(-(tiles % sms) * (config.tokens // config.tail) // sms) * (config.tail + 24) * 1.1
        depth = min(config.weight_groups, 3) + 2 * min(config.activation_groups, 3)
        waiting = config.turns is not turns
        return (
            work,
            config.resident,
            config.cluster,
            waiting,
            -depth,
            config.turns is Turns.tiles,
            config.slab,
            -config.buffers,
        )

    return min(found, key=cost)


def _default_small(problem: Problem, found: list[Config]) -> Config:
    """Enough blocks for every multiprocessor; few slots where blocks share one, many where a block has it alone."""
    whole = _one_wave(problem, found)
    if whole is not None:
        return whole
    p, q, m = problem.weights.bits, problem.activations.bits, problem.m
    walk = Walk.tokens if m > 32 and p == q == 2 else Walk.weights
    tokens = 16 if m > 32 and p * q <= 2 else min(32, max(8, 1 << (m - 1).bit_length()))
    half = problem.device.shared_bytes // 2 - 1024  # so that the next kernel's block fits beside this one's
    # Long rows of 2-bit weights: four blocks with a slot for every plane were faster than two (4096 x 14336 at M = 1).
    chunks = planes.chunks(problem.k)
    four = tokens == 8 and walk is Walk.weights and p == q == 2 and 12 <= chunks <= 16

    def cost(config: Config) -> tuple[float, ...]:
        columns, rows, _ = grid(problem, config)
        alone = columns // _split(config) * rows < 0.9 * problem.device.sms
        slots = (8 if four else 12 if tokens == 8 else 8) if alone else 4
        if m > 16:
            slots = min(8, planes.chunks(problem.k) * (p if walk is Walk.weights else q))
        return (
            config.walk is not walk,
            abs(config.tokens - tokens),
            config.groups,
            config.blocks,
            config.cluster != (4 if four and alone else 1 + alone),
            shared_bytes(config) > half,
            -config.span,
            abs(config.slots - slots),
        )

    return min(found, key=cost)


def _one_wave(problem: Problem, found: list[Config]) -> Config | None:
    """33 to 64 tokens, and about a tile of 32 weights a multiprocessor: a slot for every plane, warpgroups sharing k.

    Not for one bit by two, which was measured to be faster in tiles of 16 tokens once its activations are quantized.
    Two bits by two have one warpgroup: 0.1 us slower alone than four, 0.4 us faster with quantization, since two blocks
    fit a multiprocessor.
    """
    p, q = problem.weights.bits, problem.activations.bits
    tiles = -(-problem.n // 32)
    if not (32 < problem.m <= 64 and 0.75 * problem.device.sms <= tiles <= problem.device.sms) or p * q == 2:
        return None
    rounds, groups = planes.chunks(problem.k), 4 if p * q < 4 else 1 if (p, q) == (2, 2) else 2
    fitting = [
        config
        for config in found
        if (config.walk, config.tokens, config.groups) == (Walk.tokens, 32, groups)
        and (config.cluster, config.span, config.slots, config.by_columns) == (1, rounds, q * rounds, False)
    ]
    return max(fitting, key=lambda config: config.blocks, default=None)


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel to compile."""
    return jit.Kernel(
        "bitwise.cuh", "bitwise", config, Params, config.threads, shared_bytes(config), cluster=config.cluster
    )


def arguments(
    x: Packed, weight: planes.PlaneWeight, y: Tensor, bias: Tensor | None = None, y_map: bytes = bytes(128)
) -> Params:
    """The parameters of a launch; ``y_map`` where results leave by tensor map."""
    codes, scale, sum, zero = x.addresses
    return Params(
        y_map,
        weight.planes,
        codes,
        weight.scale,
        weight.correction,
        weight.zero,
        bias,
        scale,
        sum,
        zero,
        y,
        y.stride(0),
        x.m,
        weight.shape[0],
        planes.padded_rows(x.m),
        planes.padded_rows(weight.shape[0]),
        planes.chunks(x.k),
    )


def multiply(
    x: Packed,
    weight: planes.PlaneWeight,
    output: Output,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """Y = X W^T + bias on the current stream: coded activations [m, k] in planes times prepared weights -> y [m, n].

    bias: float32 [n].  y: where to write, of ``output``'s dtype, its last dimension contiguous.
    """
    n, _ = weight.shape
    if y is None:
        y = torch.empty(x.m, n, dtype=output.dtype, device=weight.device)
    problem = Problem(x.m, n, x.k, weight.format, x.format, output, Device.of(y))
    config = config or default(problem)
    if config.tensor and (y.stride(0) % 8 or y.data_ptr() % 16):
        config = _by_threads(config)
    y_map = tensor_map.encode(y, _SMALL_ROWS, config.slab) if config.tensor else bytes(128)
    params = arguments(x, weight, y, bias, y_map)
    jit.launch(kernel(config), params, grid(problem, config), pdl=pdl, device=y.get_device())
    return y


@functools.cache
def _by_threads(config: Config) -> Config:
    """The same tile where a tensor map cannot store Y: its rows do not start on 16 bytes."""
    return replace(config, tensor=False, streamed=False)


def _text(problem: Problem) -> str:
    return f"{problem.m} x {problem.n} x {problem.k} in {Scheme(problem.weights, problem.activations)}"
