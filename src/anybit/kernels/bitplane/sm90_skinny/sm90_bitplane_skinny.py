"""Bit-plane GEMM for few tokens, with wgmma: pipelined planes, split-K. Host side of sm90_bitplane_skinny.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import MOST_WGMMA_N, WARPGROUP_ROWS, Facts, facts, wgmma_n
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
    ``pass_chunks`` chunks. K is split over ``cluster_k`` blocks.
    """

    a_stages: int
    b_stages: int
    pass_chunks: int
    cluster_k: int = 1

    threads = 160  # a warpgroup that multiplies, and a warp that loads


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = bitplane_problem.why_not(problem)
    if reason is not None or config is None:
        return reason
    refused = why_not_columns(config) or _why_not_stages(problem, config)
    return refused or bitplane_problem.why_not_config(problem, config, shared_bytes(config))


def why_not_columns(config: SkinnyFacts) -> str | None:
    """Why ``wgmma_n`` columns do not hold B's planes; None if they do."""
    if config.tile_b % 8:
        return f"tile_b must be a multiple of 8 rows, not {config.tile_b}"
    needed = config.b_planes * config.tile_b
    if config.wgmma_n != wgmma_n(config.wgmma_n) or config.wgmma_n < needed:
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
    if c.cluster_k not in (1, 2, 4, 8) or c.tile_b // 2 % c.cluster_k:
        return f"{c.cluster_k} blocks cannot share the {c.tile_b // 2} sums of a thread evenly: 1, 2, 4 or 8 can"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    received = config.tile_b * 256 if config.cluster_k > 1 else 0
    stages = (config.a_stages * WARPGROUP_ROWS + config.b_stages * config.wgmma_n) * bitplane_layout.ROW_BYTES
    return stages + received + 16 * (config.a_stages + config.b_stages) + 16


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A cluster per tile."""
    return (-(-problem.n // config.tile_n) * config.cluster_k, -(-problem.m // config.tile_m), 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    p, q = problem.weights.bits, problem.activations.bits
    tiles = [(AOperand.weights, 8), (AOperand.weights, 16), (AOperand.weights, 32)]
    tiles += [(AOperand.activations, 16), (AOperand.activations, 32), (AOperand.activations, 64)]
    for (a_operand, tile_b), cluster_k in itertools.product(tiles, (1, 2, 4)):
        n = wgmma_n((q if a_operand is AOperand.weights else p) * tile_b)
        chunks = -(-problem.chunks // cluster_k)
        for each in sorted({min(count, chunks) for count in (1, 2, 4, 8, 16)}):
            # Stages beyond the number of planes are never filled, and yet few tokens are slower without them.
            for stages in (2, 3, 4, 6, 8, 12, 16):
                rings = stages, each if each == chunks else 2 * each, each
                yield Config(*facts(problem), a_operand, tile_b, n, *rings, cluster_k)


def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem; independent of M and N."""
    return _configs(bitplane_problem.of_any_size(problem))


@functools.cache
def _configs(problem: LinearProblem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Deep pipelines in blocks that leave room for another. Raises KernelError if there is no config."""
    half, tile_b = bitplane_problem.half_bytes(problem.device), min(32, max(8, 1 << (problem.m - 1).bit_length()))

    def cost(config: Config) -> tuple[float, ...]:
        wide = config.a_operand is not AOperand.weights, abs(config.tile_b - tile_b), config.cluster_k
        return *wide, shared_bytes(config) > half, -config.pass_chunks, abs(config.a_stages - 8)

    return min(bitplane_problem.legal(problem, why_not(problem), configs(problem)), key=cost)


traits = bitplane_problem.traits("sm90_bitplane_skinny")


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return bitplane_problem.kernel(traits.name, config, config.threads, shared_bytes(config), config.cluster_k)
