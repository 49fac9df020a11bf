"""Bit-plane GEMM for few tokens, with wgmma: pipelined planes, split-K. Host side of sm90_bitplane_skinny.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import (
    MOST_WGMMA_N,
    WARPGROUP_ROWS,
    Facts,
    Params,
    arguments,
    facts,
    half_bytes,
    legal,
    of_any_size,
    wgmma_n,
    why_not_config,
)
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.gemm_kernel import Traits
from anybit.kernels.linear_problem import LinearProblem


class AOperand(Enum):
    """Which operand is wgmma's A (64 rows, one plane at a time). The other is B, with all planes side by side in N."""

    weights = "weights"
    activations = "activations"


@dataclass(frozen=True)
class SkinnyFacts(Facts):
    """Config fields shared by the kernels for few tokens.

    a_operand: wgmma's A, 64 rows of a tile.  tile_b: rows of B in a tile.  wgmma_n: wgmma's N, which holds all planes
    of a warpgroup's rows of B.
    """

    a_operand: AOperand
    tile_b: int
    wgmma_n: int

    @property
    def a_planes(self) -> int:
        """Planes of A, multiplied one at a time."""
        return self.weight_bits if self.a_operand is AOperand.weights else self.activation_bits

    @property
    def b_planes(self) -> int:
        """Planes of B, side by side."""
        return self.activation_bits if self.a_operand is AOperand.weights else self.weight_bits

    @property
    def tile_n(self) -> int:
        """Weights per tile."""
        return WARPGROUP_ROWS if self.a_operand is AOperand.weights else self.tile_b

    @property
    def tile_m(self) -> int:
        """Tokens per tile."""
        return self.tile_b if self.a_operand is AOperand.weights else WARPGROUP_ROWS


@dataclass(frozen=True)
class Config(SkinnyFacts):
    """A kernel config: pipelines of ``a_stages`` planes of A and ``b_stages`` chunks of B; a pass over A's planes takes
    ``pass_chunks`` chunks. K is split over ``split_k_warpgroups`` of a block or ``cluster_k`` blocks, or B's rows over
    ``split_b_warpgroups``. ``min_blocks_per_sm``: blocks per SM that registers must allow.
    """

    a_stages: int
    b_stages: int
    pass_chunks: int
    split_k_warpgroups: int = 1
    split_b_warpgroups: int = 1
    cluster_k: int = 1
    min_blocks_per_sm: int = 1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.split_k_warpgroups * self.split_b_warpgroups

    @property
    def threads(self) -> int:
        """Threads per block: consumers, and a producer warp."""
        return 128 * self.warpgroups + 32


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = bitplane_problem.why_not(problem)
    if reason is not None or config is None:
        return reason
    refused = why_not_columns(config, config.split_b_warpgroups) or _why_not_stages(problem, config)
    return refused or _why_not_split(config) or why_not_config(problem, config, shared_bytes(config))


def why_not_columns(config: SkinnyFacts, parts: int = 1) -> str | None:
    """Why ``wgmma_n`` columns do not hold B's planes, split over ``parts`` warpgroups; None if they do."""
    if config.tile_b % 8:
        return f"tile_b must be a multiple of 8 rows, not {config.tile_b}"
    needed = config.b_planes * config.tile_b // parts
    if config.tile_b % (8 * parts) or config.wgmma_n != wgmma_n(config.wgmma_n) or config.wgmma_n < needed:
        return f"{config.b_planes} planes of {config.tile_b} rows are {needed} columns, and the most is {MOST_WGMMA_N}"
    return None


def _why_not_stages(problem: LinearProblem, c: Config) -> str | None:
    if not 2 <= c.a_stages <= 32:
        return f"a_stages must be 2 to 32, a lane of the producer warp for each, not {c.a_stages}"
    chunks = -(-problem.chunks // c.cluster_k)
    if not 1 <= c.pass_chunks <= c.b_stages or (c.pass_chunks < chunks and c.b_stages < 2 * c.pass_chunks):
        return (
            f"b_stages must be at least pass_chunks = {c.pass_chunks}, and twice that if a tile has more chunks (here "
            f"{chunks}), not {c.b_stages}"
        )
    if c.split_k_warpgroups > 1 and (c.pass_chunks < chunks or c.a_stages < c.a_planes * chunks):
        # A warpgroup that skips others' chunks cannot tell a stage's phase from the next but one: it hung.
        planes = f"{c.a_planes} planes of {chunks} chunks"
        return f"split_k_warpgroups needs a single pass and a stage for each of {planes}, not {c.a_stages}"
    return None


def _why_not_split(c: Config) -> str | None:
    sums = c.tile_b // 2  # per thread
    if c.warpgroups not in (1, 2, 4) or (c.split_k_warpgroups > 1) + (c.split_b_warpgroups > 1) + (c.cluster_k > 1) > 1:
        return (
            "a tile is split over 1, 2 or 4 warpgroups along k or B, or over a cluster, not over split_k_warpgroups = "
            f"{c.split_k_warpgroups}, split_b_warpgroups = {c.split_b_warpgroups} and cluster_k = {c.cluster_k}"
        )
    room = (c.a_stages * WARPGROUP_ROWS + c.b_stages * c.wgmma_n) * bitplane_layout.ROW_BYTES
    if c.split_k_warpgroups > 1 and c.split_k_warpgroups * c.tile_b * 256 > room:
        return f"the sums of {c.warpgroups} warpgroups do not fit over {c.a_stages} planes and {c.b_stages} chunks"
    if sums % c.warpgroups:
        return f"{c.warpgroups} warpgroups cannot share the {sums} sums of a thread evenly"
    if c.cluster_k not in (1, 2, 4, 8) or sums % c.cluster_k:
        return f"{c.cluster_k} blocks cannot share the {sums} sums of a thread evenly: 1, 2, 4 or 8 can"
    registers = 65536 // (128 * -(-c.min_blocks_per_sm * c.threads // 128)) // 8 * 8  # an SM has four partitions
    if c.wgmma_n * 9 // 16 + 36 > registers:
        return f"{c.wgmma_n // 2} accumulators are too many for {registers} registers per thread"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    received = config.tile_b * 256 if config.cluster_k > 1 else 0
    b_rows = config.b_stages * config.wgmma_n * config.split_b_warpgroups
    stages = (config.a_stages * WARPGROUP_ROWS + b_rows) * bitplane_layout.ROW_BYTES
    return stages + received + 16 * (config.a_stages + config.b_stages) + 16


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A cluster per tile."""
    return (-(-problem.n // config.tile_n) * config.cluster_k, -(-problem.m // config.tile_m), 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    half, p, q = half_bytes(problem.device), problem.weights.bits, problem.activations.bits
    tiles = [(AOperand.weights, 8), (AOperand.weights, 16), (AOperand.weights, 32)]
    tiles += [(AOperand.activations, 16), (AOperand.activations, 32), (AOperand.activations, 64)]
    splits = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1)]  # k, B, k over a cluster
    for (a_operand, tile_b), (along_k, along_b, cluster_k) in itertools.product(tiles, splits):
        n = wgmma_n((q if a_operand is AOperand.weights else p) * tile_b // along_b)
        chunks = -(-problem.chunks // cluster_k)
        for each in sorted({min(count, chunks) for count in (1, 2, 4, 8, 16)}):
            # Stages beyond the number of planes are never filled, and yet few tokens are slower without them.
            for stages in (2, 3, 4, 6, 8, 12, 16):
                rings = stages, each if each == chunks else 2 * each, each
                config = Config(*facts(problem), a_operand, tile_b, n, *rings, along_k, along_b, cluster_k)
                yield config
                # So that the next kernel's block fits beside this one's.
                wide = config.warpgroups > 1 or (a_operand, tile_b) == (AOperand.activations, 32)
                if wide and shared_bytes(config) <= half:
                    yield replace(config, min_blocks_per_sm=2)


def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem; independent of M and N."""
    return _configs(of_any_size(problem))


@functools.cache
def _configs(problem: LinearProblem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Deep pipelines in blocks that leave room for another. Raises KernelError if there is no config."""
    half, tile_b = half_bytes(problem.device), min(32, max(8, 1 << (problem.m - 1).bit_length()))

    def cost(config: Config) -> tuple[float, ...]:
        split = config.warpgroups, config.min_blocks_per_sm, config.cluster_k
        wide = config.a_operand is not AOperand.weights, abs(config.tile_b - tile_b), *split
        return *wide, shared_bytes(config) > half, -config.pass_chunks, abs(config.a_stages - 8)

    return min(legal(problem, why_not(problem), configs(problem)), key=cost)


traits = Traits("sm90_bitplane_skinny", Target.planes, arguments)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    name, size = traits.name, shared_bytes(config)
    return jit.Kernel(
        f"bitplane/sm90_skinny/{name}.cuh", name, config, Params, config.threads, size, cluster=config.cluster_k
    )
