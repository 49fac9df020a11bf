"""Bit-plane GEMM for many tokens, with wgmma. Host side of sm90_bitplane_gemm.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import ROWS, LargeFacts, facts
from anybit.kernels.linear_problem import LinearProblem


class Schedule(Enum):
    """How a block's two warpgroups share the tensor cores; see sm90_bitplane_gemm.cuh."""

    cooperative = "cooperative"
    pingpong = "pingpong"


@dataclass(frozen=True)
class Config(LargeFacts):
    """A kernel config: tiles of 128 weights x ``tile_m`` tokens, in persistent blocks.

    weight_chunks, activation_chunks: pipeline depth in chunks of k, per operand.  schedule: how the two warpgroups
    share the tensor cores.  epilogue_tile: tokens of results per staging buffer, of which there are
    ``epilogue_stages``.  tma_store: results are stored by TMA (16-bit, aligned rows of Y).
    """

    tile_m: int
    weight_chunks: int
    activation_chunks: int
    schedule: Schedule = Schedule.cooperative
    tma_store: bool = False
    epilogue_tile: int = 32
    epilogue_stages: int = 3


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = bitplane_problem.why_not(problem)
    if reason is not None or config is None:
        return reason
    return _why_not_tile(problem, config) or bitplane_problem.why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(problem: LinearProblem, c: Config) -> str | None:
    chunks = problem.chunks
    if c.tile_m not in (64, 128, 256):
        return f"tiles have 64, 128 or 256 tokens, not {c.tile_m}"
    if refused := bitplane_problem.why_not_epilogue(c, (32, 64, 128)):
        return refused
    if c.tma_store and (refused := bitplane_problem.why_not_tma(problem)):
        return refused
    sides = ("weight", c.weight_bits, c.weight_chunks), ("activation", c.activation_bits, c.activation_chunks)
    for side, bits, held in sides:
        if held < 1 or held * bits < 2:
            return f"the pipeline needs room for two planes, and {held} chunks of {bits} {side} planes are fewer"
    if c.schedule is Schedule.pingpong and min(c.weight_chunks, c.activation_chunks) < chunks:
        return f"pingpong needs all {chunks} chunks of k of weights and of activations in shared memory"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    weight_slots = config.weight_chunks * config.weight_bits
    activation_slots = config.activation_chunks * config.activation_bits
    slots = (weight_slots * ROWS + activation_slots * config.tile_m) * bitplane_layout.ROW_BYTES
    barriers = 16 * (weight_slots + activation_slots + 2 * config.epilogue_stages)
    return slots + 2 * bitplane_problem.epilogue_bytes(config) + barriers


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A persistent block per SM, or per tile if there are fewer."""
    tiles = -(-problem.m // config.tile_m) * -(-problem.n // ROWS)
    return (min(tiles, problem.device.sms), 1, 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    tma_store = problem.output.is_16bit and problem.n % 8 == 0 and problem.y_aligned
    chunks, staging = (1, 2, 3, 4), ((32, 3), (32, 4), (64, 2), (64, 3))
    for tile_m, weights, activations, (rows, stages), schedule in itertools.product(
        (256, 128, 64), chunks, chunks, staging, Schedule
    ):
        yield Config(*facts(problem), tile_m, weights, activations, schedule, tma_store, rows, stages)


def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem."""
    # Configs are slow to enumerate and depend little on M and N: share them between equivalent problems.
    alike = replace(problem, m=1, n=problem.n % 8 or 8)
    return _configs(alike if min(problem.m, problem.n) >= 1 else problem)


@functools.cache
def _configs(problem: LinearProblem) -> tuple[Config, ...]:
    return tuple(config for config in _candidates(problem) if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """The tiles with the least estimated time, deep pipelines (activations first), and as many buffers as then fit.

    Raises KernelError if there is no config.
    """
    schedule = Schedule.pingpong if problem.weights.bits == problem.activations.bits == 1 else Schedule.cooperative

    def cost(config: Config) -> tuple[float, ...]:
        waves = -(-(-(-problem.m // config.tile_m) * -(-problem.n // ROWS)) // problem.device.sms)
        deep = -min(config.weight_chunks, 3) - 2 * min(config.activation_chunks, 3), config.epilogue_tile
        return waves * (config.tile_m + 24), config.schedule is not schedule, *deep, -config.epilogue_stages

    return min(bitplane_problem.legal(problem, why_not(problem), configs(problem)), key=cost)


traits = bitplane_problem.traits("sm90_bitplane_gemm")


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return bitplane_problem.kernel(traits.name, config, config.threads, shared_bytes(config))
