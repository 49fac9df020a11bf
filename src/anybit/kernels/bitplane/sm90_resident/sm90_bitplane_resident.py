"""Bit-plane GEMM for few tokens, with wgmma: whole tiles in shared memory. Host side of sm90_bitplane_resident.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import WARPGROUP_ROWS, facts
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand, SkinnyFacts, why_not_columns
from anybit.kernels.linear_problem import LinearProblem


@dataclass(frozen=True)
class Config(SkinnyFacts):
    """A kernel config: shared memory holds all ``k_chunks`` chunks of k of a tile.

    accumulator_sets: planes i and i + accumulator_sets share accumulators.  prologue_stages: chunks whose weights are
    prefetched before the previous kernel has ended.  reserved_bytes: extra shared memory that limits blocks per SM.
    fill_waves: idle blocks fill the last wave.  cp_async_activations: all threads copy the tokens by cp.async, 16 bytes
    each, instead of bulk copies.
    """

    k_chunks: int
    accumulator_sets: int = 1
    prologue_stages: int = 0
    reserved_bytes: int = 0
    fill_waves: bool = False
    cp_async_activations: bool = False

    threads = 128  # every warp loads, multiplies and stores


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = bitplane_problem.why_not(problem)
    if reason is not None or config is None:
        return reason
    refused = why_not_columns(config) or _why_not_tile(problem, config)
    return refused or bitplane_problem.why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(problem: LinearProblem, c: Config) -> str | None:
    if c.reserved_bytes < 0 or c.reserved_bytes % 16:
        return f"reserved_bytes must be a multiple of 16, not {c.reserved_bytes}"
    if c.k_chunks != problem.chunks or not 0 <= c.prologue_stages <= c.k_chunks:
        return f"shared memory must hold all {problem.chunks} chunks of k, and the config is for {c.k_chunks}"
    if c.cp_async_activations and c.a_operand is AOperand.weights and c.tile_b % 16:
        return f"128 threads copy 16 tokens of a plane at a time, so tile_b must be a multiple of 16, not {c.tile_b}"
    if not 1 <= c.accumulator_sets <= c.a_planes:
        return f"accumulator_sets must be 1 to {c.a_planes}, the planes of A, not {c.accumulator_sets}"
    sums = c.accumulator_sets * c.wgmma_n // 2
    if sums + c.tile_b // 2 + 36 > 255:
        return f"{sums} accumulators are too many for the 255 registers of a thread"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    rows = config.k_chunks * (config.a_planes * WARPGROUP_ROWS + config.wgmma_n)
    staged = config.a_operand is AOperand.weights and config.output.is_16bit
    staging = 128 * config.tile_b if staged else 0
    return rows * bitplane_layout.ROW_BYTES + staging + 16 * config.k_chunks + config.reserved_bytes


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A block per tile, plus idle ones with fill_waves."""
    tiles, sms = -(-problem.n // config.tile_n) * -(-problem.m // config.tile_m), problem.device.sms
    return (-(-tiles // sms) * sms if config.fill_waves else tiles, 1, 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    p, q, chunks = problem.weights.bits, problem.activations.bits, problem.chunks
    for (a_operand, tile_b), sets, stages in itertools.product(
        itertools.product(AOperand, (16, 32)), (1, 2, 3), sorted({1, min(2, chunks), chunks})
    ):
        n = bitplane_problem.wgmma_n((q if a_operand is AOperand.weights else p) * tile_b)
        config = Config(*facts(problem), a_operand, tile_b, n, chunks, sets, stages)
        for blocks in (1, 2, 3):
            # If an SM fits a block of each of several kernels, the next kernels can prefetch weights. If it fits more,
            # some SMs take two blocks of one kernel, and all others wait for them.
            reserved = bitplane_problem.bytes_to_limit(blocks, shared_bytes(config), problem.device)
            if reserved is not None:
                limited = replace(config, reserved_bytes=reserved)
                yield replace(limited, fill_waves=True)
                yield limited
                if q > 2 and (a_operand, tile_b, blocks) == (AOperand.weights, 32, 1):  # fewer planes never won
                    yield replace(limited, fill_waves=reserved > 0, cp_async_activations=True)


def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem; independent of M and N."""
    return _configs(bitplane_problem.of_any_size(problem))


@functools.cache
def _configs(problem: LinearProblem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """One block per SM: if two fit, some SMs take two of one kernel. Raises KernelError if there is no config."""
    tile_b = 16 if problem.m <= 16 else 32

    def cost(config: Config) -> tuple[float, ...]:
        alone = bitplane_problem.blocks_per_sm(shared_bytes(config), problem.device) == 1
        idle = config.fill_waves != (config.reserved_bytes > 0)  # if alone by its size, idle blocks are in the way
        return config.a_operand is not AOperand.weights, abs(config.tile_b - tile_b), not alone, idle

    return min(bitplane_problem.legal(problem, why_not(problem), configs(problem)), key=cost)


traits = bitplane_problem.traits("sm90_bitplane_resident")


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return bitplane_problem.kernel(traits.name, config, config.threads, shared_bytes(config))
