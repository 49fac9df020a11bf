"""Any-precision GEMM on the 1-bit tensor cores of sm_90 (wgmma AND-popcount). Host side of sm90_bitplane.cuh.

Y = X W^T for W of 1 to 8 bits and X of 1 to 8 bits, each sym, asym or bipolar: one product of unsigned bit planes and
rank-1 terms (APT-LLM's arbitrary-precision decomposition; the planes of both sides meet on chip, never in memory).
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Int32, Int64, Pointer, tensor_map
from anybit.jit.tensor_map import TensorMap
from anybit.kernels.common.types import Code, Output
from anybit.kernels.elementwise.quantize_activations import Packed, Target
from anybit.kernels.gemm import bitplane_layout
from anybit.kernels.gemm.sm90_bitplane_rules import (
    ROWS,
    SMALL_ROWS,
    Config,
    Path,
    Problem,
    Turns,
    Walk,
    blocks_sharing_k,
    blocks_that_fit,
    grid,
    half_bytes,
    reserved,
    shared_bytes,
    short_sums,
    stacked_columns,
    why_not,
)
from anybit.scheme import Scheme

__all__ = [
    "Config",
    "Output",
    "Params",
    "Path",
    "Problem",
    "Turns",
    "Walk",
    "arguments",
    "configs",
    "default",
    "grid",
    "kernel",
    "multiply",
    "reserved",
    "seeds",
    "shared_bytes",
    "stacked_columns",
    "why_not",
]


@dataclass(frozen=True)
class Params:
    """Arguments of one launch; see bitplane_terms.cuh."""

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
            short_sums(problem),
            weight_groups=weights,
            activation_groups=activations,
            slab=slab,
            buffers=count,
            tensor=tensor,
            turns=turns,
        )
        yield config
        yield replace(config, resident=True)
        if p == q == 2:
            yield replace(config, starts=2)
        if tokens == 256:
            rounds = -(-problem.m // tokens) * -(-problem.n // ROWS) / problem.device.sms
            yield replace(config, cluster=2, multicast=True)
            if rounds > 1:
                yield replace(config, tail=64)
                yield replace(config, tail=64, cluster=2, multicast=True)
    yield from _small_candidates(problem)
    yield from _once_candidates(problem)


def _once_candidates(problem: Problem) -> Iterator[Config]:
    p, q, chunks = problem.weights.bits, problem.activations.bits, bitplane_layout.chunks(problem.k)
    codes = Code(problem.weights.code), Code(problem.activations.code)
    tiles = [(Walk.weights, 16), (Walk.weights, 32), (Walk.tokens, 16), (Walk.tokens, 32)]
    for (walk, tokens), sets, early in itertools.product(tiles, (1, 2, 3), sorted({1, min(2, chunks), chunks})):
        config = Config(
            Path.once,
            p,
            q,
            *codes,
            problem.output,
            tokens,
            short_sums(problem),
            walk=walk,
            stages=chunks,
            sets=sets,
            early=early,
            stacked=stacked_columns((q if walk is Walk.weights else p) * tokens),
        )
        for blocks in (1, 2, 3):
            reserve = reserved(config, blocks, problem.device)
            if reserve is not None:
                yield replace(config, reserve=reserve, even=True)
                yield replace(config, reserve=reserve)
                if q > 2 and (walk, tokens, blocks) == (Walk.weights, 32, 1):  # fewer planes never won
                    yield replace(config, reserve=reserve, even=reserve > 0, threads_copy=True)


def _small_candidates(problem: Problem) -> Iterator[Config]:
    p, q, chunks = problem.weights.bits, problem.activations.bits, bitplane_layout.chunks(problem.k)
    codes = Code(problem.weights.code), Code(problem.activations.code)
    half = half_bytes(problem.device)
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
                    short_sums(problem),
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
    several = -(-problem.m // 256) * -(-problem.n // ROWS) > problem.device.sms
    alike = replace(problem, m=256 * problem.device.sms + 1 if several else 1, n=problem.n % 512 or 512)
    return _configs(alike if min(problem.m, problem.n) >= 1 else problem)


@functools.cache
def _configs(problem: Problem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: Problem) -> Config:
    """A good config, measured on an H200 (docs/notes/2026-11-23-bit-planes.md); KernelError where there is none."""
    reason = why_not(problem)
    if reason is not None:
        raise KernelError(f"no wgmma kernel for {_text(problem)}: {reason}")
    found = configs(problem)
    if not found:
        raise KernelError(f"no wgmma config fits {_text(problem)} on {problem.device.arch}")
    if _small_tiles(problem):
        return _default_small(problem, [c for c in found if c.path is Path.small])
    return _default_large(problem, [c for c in found if c.path is Path.large])


def _small_tiles(problem: Problem) -> bool:
    """Whether small tiles are faster, which load a tile of weights for every 8 to 32 tokens: from 33 tokens on only
    while large ones leave most multiprocessors idle, and the longer the more planes and chunks of k they go through.

    Measured on an H200 at 40 to 128 tokens, twelve shapes: at 33 to 64 tokens large tiles take 0.76 to 0.95 of small
    ones' time where 56 of 132 multiprocessors have one (1.04 to 1.15 with eight products of planes), 0.50 to 0.82 where
    80 or more have, and 1.05 to 2.1 of it where 32 or fewer have.
    """
    m, products = problem.m, problem.weights.bits * problem.activations.bits
    used = -(-m // 64) * -(-problem.n // ROWS) / problem.device.sms
    if m <= 32 or m > 128:
        return m <= 32
    if problem.k < 1024:
        return used < 0.1 or (m <= 64 and used < 0.15)
    if m <= 64:
        return used < (0.4 if products < 8 else 0.55)
    return used < (0.5 if products >= 8 else 0.25 if problem.k >= 4096 else 0.1)


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
        tiles, sms = -(-problem.m // config.tokens) * -(-problem.n // ROWS), problem.device.sms
        # Products of small tiles wait for shared memory; a tile's results and start cost about 24 tokens' products.
        rounds = tiles // sms if config.tail else -(-tiles // sms)
        work = rounds * (config.tokens + 24) * (1.0 if config.tokens == 256 else 1.1)
        if config.tail:
            work += -(-(tiles % sms) * (config.tokens // config.tail) // sms) * (config.tail + 24) * 1.1
        depth = min(config.weight_groups, 3) + 2 * min(config.activation_groups, 3)
        waiting = config.turns is not turns
        single = tiles <= sms  # a tile a block: nothing hides its start and its end
        return (
            work,
            config.resident,
            config.cluster,
            waiting,
            -depth,
            config.turns is Turns.tiles,
            config.slab,
            -config.buffers,
            -config.starts if single else config.starts,
        )

    return min(found, key=cost)


def _default_small(problem: Problem, found: list[Config]) -> Config:
    """Enough blocks for every multiprocessor; few slots where blocks share one, many where a block has it alone."""
    whole = _one_wave(problem, configs(problem))
    if whole is not None:
        return whole
    p, q, m = problem.weights.bits, problem.activations.bits, problem.m
    if m <= 8:
        return _default_few(problem, found)
    walk = Walk.tokens if m > 32 and p == q == 2 else Walk.weights
    tokens = 16 if m > 32 and p * q <= 2 else min(32, 1 << (m - 1).bit_length())
    half = half_bytes(problem.device)

    def cost(config: Config) -> tuple[float, ...]:
        columns, rows, _ = grid(problem, config)
        alone = columns // blocks_sharing_k(config) * rows < 0.9 * problem.device.sms
        slots = 8 if alone else 4
        if m > 16:
            slots = min(8, bitplane_layout.chunks(problem.k) * (p if walk is Walk.weights else q))
        return (
            config.walk is not walk,
            abs(config.tokens - tokens),
            config.groups,
            config.blocks,
            config.cluster != (2 if alone else 1),
            shared_bytes(config) > half,
            -config.span,
            abs(config.slots - slots),
        )

    return min(found, key=cost)


_AHEAD = range(16, 25)
"""Planes of 64 weights, 8 KB each, that a multiprocessor's blocks of few tokens load ahead together, and at least 8
where blocks share k: with 4 of them 8192 x 8192 took 1.08 to 1.28 times as long."""
_ROOM_FOR_CLUSTERS = 0.9
"""The share of the room for blocks that those which share k may take: clusters do not fill it (w2a4 4096 x 11008 in
256 blocks of 264: 9.1 us, and 5.3 with room for 396)."""


def _default_few(problem: Problem, found: list[Config]) -> Config:
    """To 8 tokens: enough planes ahead on a multiprocessor, in blocks that all run at once where there is room.

    Of some 100 configs each of 158 products (w2a2, w2a4, w1a2 and w3a4 in 35 layers, H200) it names one that takes
    1.011 times the best's time in the geometric mean and 1.08 in the worst. Rings may take more than half of a
    multiprocessor's shared memory: steps of SmolLM2-1.7B, whose layers have two chunks of k, took 3 % less so.
    """
    device, chunks = problem.device, bitplane_layout.chunks(problem.k)
    sharing = _sharing_few(-(-problem.n // SMALL_ROWS), chunks, device.sms)
    most = 16 if sharing == 1 else 8

    def cost(config: Config) -> tuple[float, ...]:
        blocks = grid(problem, config)[0]
        each = -(-blocks // device.sms)
        room = device.sms * blocks_that_fit(config, device)
        ahead = each * config.slots
        outside = max(0, ahead - _AHEAD[-1], min(_AHEAD[0], most) - ahead) + max(0, config.slots - most)
        return (
            config.walk is not Walk.weights,
            config.tokens,
            config.groups,
            config.blocks,
            config.cluster != sharing,
            blocks > room * (1.0 if sharing == 1 else _ROOM_FOR_CLUSTERS),
            outside,
            -config.span,
            -config.slots,
        )

    return min(found, key=cost)


def _sharing_few(tiles: int, chunks: int, sms: int) -> int:
    """How many blocks share k: four while a multiprocessor has three of them at most or, of 8 to 24 chunks, five; two
    while it has two or three; one of one or two chunks, whose blocks would wait for each other longer than they read.
    """
    each = -(-4 * tiles // sms)
    if chunks >= 4 and (each <= 3 or (each <= 5 and 8 <= chunks <= 24)):
        return 4
    return 2 if 3 <= chunks <= 24 and 2 * tiles <= 2.5 * sms else 1


_CHUNKS_COPIED = 4
"""Chunks of k from which the threads copy the tokens: K = 3584 and 4096 were measured; w4a4 lost at K = 2048."""


def _one_wave(problem: Problem, found: tuple[Config, ...]) -> Config | None:
    """33 to 64 tokens, and about a tile of 64 weights and 32 tokens a multiprocessor: all of its planes at once.

    One block a multiprocessor: where two fit, most are taken, and some multiprocessors have two of one kernel.
    """
    p, q, sms = problem.weights.bits, problem.activations.bits, problem.device.sms
    if not (32 < problem.m <= 64 and 0.75 * sms <= 2 * -(-problem.n // SMALL_ROWS) <= sms) or max(p, q) > 4:
        return None
    alone = [
        config
        for config in found
        if (config.path, config.walk, config.tokens) == (Path.once, Walk.weights, 32)
        and config.even == (config.reserve > 0)  # alone by its size: idle blocks would only be in other kernels' way
        and blocks_that_fit(config, problem.device) < 2
    ]
    # The more comes in, the more of it may wait: 5.26 us with one chunk early in w4a4, 5.42 with two, 5.8 with all.
    # Tokens of four planes weigh enough to be worth the threads' time; beside as many planes of weights they do not.
    chunks = bitplane_layout.chunks(problem.k)
    threads_copy = q == 4 and p < 4 and chunks >= _CHUNKS_COPIED
    early = chunks if p * q <= 2 else 2 if p * q <= (4 if threads_copy else 8) else 1
    alone = [config for config in alone if config.threads_copy is threads_copy]
    return min(alone, key=lambda config: (-config.sets, abs(config.early - early)), default=None)


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel to compile."""
    return jit.Kernel(
        "gemm/sm90_bitplane.cuh",
        "sm90_bitplane",
        config,
        Params,
        config.threads,
        shared_bytes(config),
        cluster=config.cluster,
    )


def arguments(
    x: Packed,
    weight: bitplane_layout.PlaneWeight,
    y: Tensor,
    bias: Tensor | None = None,
    y_map: bytes = bytes(128),
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
        bitplane_layout.padded_rows(x.m),
        bitplane_layout.padded_rows(weight.shape[0]),
        bitplane_layout.chunks(x.k),
    )


def output_of(
    x: Packed, weight: bitplane_layout.PlaneWeight, output: Output, bias: Tensor | None, y: Tensor | None
) -> Tensor:
    """Where a product of planes goes: ``y``, or a new [m, n]. Raises KernelError for operands that do not fit."""
    n, k = weight.shape
    if x.target is not Target.planes or x.k != k:
        raise KernelError(f"x must be {k} columns of codes in planes, and these are {x.k} in {x.target.value}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise KernelError(f"bias must be a dense float32 [{n}], not {bias.dtype} {tuple(bias.shape)}")
    if y is None:
        return torch.empty(x.m, n, dtype=output.dtype, device=weight.device)
    adjacent = n == 1 or y.stride(-1) == 1
    if y.shape != (x.m, n) or y.dtype != output.dtype or not adjacent or y.get_device() != weight.planes.get_device():
        raise KernelError(
            f"y must be {output.dtype} [{x.m}, {n}] on {weight.device} with adjacent columns, not {y.dtype} "
            f"{tuple(y.shape)} strided {y.stride()} on {y.device}"
        )
    return y


def multiply(
    x: Packed,
    weight: bitplane_layout.PlaneWeight,
    output: Output,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """Y = X W^T + bias on the current stream: coded activations [m, k] in planes times prepared weights -> y [m, n].

    bias: float32 [n].  y: where to write, of ``output``'s dtype, its last dimension contiguous.  config: legal for this
    (``why_not``), and not asked again.  Raises KernelError for operands that do not fit each other.
    """
    y = output_of(x, weight, output, bias, y)
    problem = Problem(x.m, weight.shape[0], x.k, weight.format, x.format, output, Device.of(y))
    config = config or default(problem)
    if config.tensor and (y.stride(0) % 8 or y.data_ptr() % 16):
        config = _by_threads(config)
    y_map = tensor_map.encode(y, SMALL_ROWS, config.slab) if config.tensor else bytes(128)
    params = arguments(x, weight, y, bias, y_map)
    jit.launch(kernel(config), params, grid(problem, config), pdl=pdl, device=y.get_device())
    return y


@functools.cache
def _by_threads(config: Config) -> Config:
    """The same tile where a tensor map cannot store Y: its rows do not start on 16 bytes."""
    return replace(config, tensor=False, streamed=False, starts=1)


def _text(problem: Problem) -> str:
    return f"{problem.m} x {problem.n} x {problem.k} in {Scheme(problem.weights, problem.activations)}"
