"""Bit-plane GEMM for many tokens, with wgmma. Host side of sm90_bitplane_gemm.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import (
    ROWS,
    LargeFacts,
    Params,
    arguments,
    epilogue_bytes,
    facts,
    legal,
    why_not_config,
    why_not_epilogue,
    why_not_tma,
)
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.common.types import Code
from anybit.kernels.gemm_kernel import Traits
from anybit.kernels.linear_problem import LinearProblem


class Schedule(Enum):
    """How a block's two warpgroups share the tensor cores; see sm90_bitplane_gemm.cuh."""

    cooperative = "cooperative"
    alternating = "alternating"
    pingpong = "pingpong"


@dataclass(frozen=True)
class Config(LargeFacts):
    """A kernel config: tiles of 128 weights x ``tile_m`` tokens, in persistent blocks.

    weight_chunks, activation_chunks: pipeline depth in chunks of k, per operand.  schedule: how the two warpgroups
    share the tensor cores.  epilogue_tile: tokens of results per staging buffer, of which there are
    ``epilogue_stages``.  tma_store: results are stored by TMA (16-bit, aligned rows of Y).  tail_tile_m: tokens of the
    smaller tiles into which tiles of the last partial wave are cut (0: not cut).  cluster_n: blocks of a cluster that
    multicast tokens to each other.  activation_stationary: a block keeps its tokens over all tiles of weights.
    first_plane_pieces: pieces in which a block's first activation plane is loaded and multiplied.
    """

    tile_m: int
    weight_chunks: int
    activation_chunks: int
    schedule: Schedule = Schedule.alternating
    tma_store: bool = False
    epilogue_tile: int = 32
    epilogue_stages: int = 3
    tail_tile_m: int = 0
    cluster_n: int = 1
    activation_stationary: bool = False
    first_plane_pieces: int = 1

    @property
    def tma_rows(self) -> int:
        """Tokens per TMA store box; 0 if threads store results."""
        return self.epilogue_tile if self.tma_store else 0


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    reason = bitplane_problem.why_not(problem)
    if reason is not None or config is None:
        return reason
    refused = _why_not_tile(problem, config) or _why_not_pieces(config)
    return refused or why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(problem: LinearProblem, c: Config) -> str | None:
    chunks = problem.chunks
    if c.tile_m not in (64, 128, 256):
        return f"tiles have 64, 128 or 256 tokens, not {c.tile_m}"
    if refused := why_not_epilogue(c, (32, 64, 128)) or (why_not_tma(problem) if c.tma_store else None):
        return refused
    if c.cluster_n not in (1, 2, 4):
        return f"cluster_n must be 1, 2 or 4, not {c.cluster_n}"
    if c.activation_stationary and c.cluster_n > 1:
        return "activation_stationary needs cluster_n=1"
    if c.tail_tile_m and (c.activation_stationary or c.tail_tile_m not in (64, 128) or c.tail_tile_m >= c.tile_m):
        return (
            f"tail_tile_m must be 0, 64 or 128, less than tile_m = {c.tile_m}, and 0 if activation_stationary, not "
            f"{c.tail_tile_m}"
        )
    sides = ("weight", c.weight_bits, c.weight_chunks), ("activation", c.activation_bits, c.activation_chunks)
    for side, bits, held in sides:
        if held < 1 or held * bits < 2:
            return f"the pipeline needs room for two planes, and {held} chunks of {bits} {side} planes are fewer"
    if c.activation_stationary and c.activation_chunks != chunks:
        return f"activation_stationary needs activation_chunks = {chunks}, all chunks of k, not {c.activation_chunks}"
    if c.schedule is Schedule.pingpong and min(c.weight_chunks, c.activation_chunks) < chunks:
        return f"pingpong needs all {chunks} chunks of k of weights and of activations in shared memory"
    return None


def _why_not_pieces(c: Config) -> str | None:
    """Why a first plane cannot be in pieces. Elsewhere wgmmas of two shapes run out of registers and serialize."""
    if c.first_plane_pieces == 1:
        return None
    rings = c.weight_chunks, c.activation_chunks, c.epilogue_tile, c.epilogue_stages
    codes = c.weight_code, c.activation_code
    if (c.weight_bits, c.activation_bits, c.tile_m) != (2, 2, 256) or codes != (Code.sym, Code.sym):
        return "first_plane_pieces needs 2-bit sym weights and activations and tile_m = 256"
    if c.first_plane_pieces != 2 or rings != (2, 2, 32, 3) or not c.tma_store:
        pieces = c.first_plane_pieces
        return (
            "first_plane_pieces = 2 needs tma_store and (weight_chunks, activation_chunks, epilogue_tile, "
            f"epilogue_stages) = (2, 2, 32, 3), not {pieces} pieces with {rings}"
        )
    if c.activation_stationary or c.cluster_n > 1 or c.tail_tile_m or c.schedule is not Schedule.cooperative:
        return (
            "first_plane_pieces needs the cooperative schedule, cluster_n=1, tail_tile_m=0 and "
            "activation_stationary=False"
        )
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    weight_slots = config.weight_chunks * config.weight_bits
    activation_slots = config.activation_chunks * config.activation_bits
    slots = (weight_slots * ROWS + activation_slots * config.tile_m) * bitplane_layout.ROW_BYTES
    barriers = 16 * (weight_slots + activation_slots + 2 * config.epilogue_stages)
    first = 16 * config.first_plane_pieces if config.first_plane_pieces > 1 else 0
    return slots + 2 * epilogue_bytes(config) + barriers + first


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A persistent block per SM, or per tile if there are fewer."""
    tiles = -(-problem.m // config.tile_m) * -(-problem.n // (ROWS * config.cluster_n))
    pieces = tiles * (config.tile_m // config.tail_tile_m if config.tail_tile_m else 1)
    return (min(pieces, problem.device.sms // config.cluster_n) * config.cluster_n, 1, 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    tma_store = problem.output.is_16bit and problem.n % 8 == 0 and problem.y_aligned
    chunks, staging = (1, 2, 3, 4), ((32, 3), (32, 4), (64, 2), (64, 3))
    waves = -(-problem.m // 256) * -(-problem.n // ROWS) / problem.device.sms
    for tile_m, weights, activations, (rows, stages), schedule in itertools.product(
        (256, 128, 64), chunks, chunks, staging, Schedule
    ):
        config = Config(*facts(problem), tile_m, weights, activations, schedule, tma_store, rows, stages)
        yield config
        yield replace(config, activation_stationary=True)
        yield replace(config, first_plane_pieces=2)
        if tile_m == 256:
            yield replace(config, cluster_n=2)
            if waves > 1:
                yield replace(config, tail_tile_m=64)
                yield replace(config, tail_tile_m=64, cluster_n=2)


def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem."""
    # Configs are slow to enumerate and depend little on M and N: share them between equivalent problems.
    waves = -(-problem.m // 256) * -(-problem.n // ROWS) / problem.device.sms
    alike = replace(problem, m=256 * problem.device.sms + 1 if waves > 1 else 1, n=problem.n % 8 or 8)
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
        plain = config.tail_tile_m > 0, config.activation_stationary, config.cluster_n, config.schedule is not schedule
        deep = -min(config.weight_chunks, 3) - 2 * min(config.activation_chunks, 3), config.epilogue_tile
        return waves * (config.tile_m + 24), *plain, *deep, -config.epilogue_stages, config.first_plane_pieces

    return min(legal(problem, why_not(problem), configs(problem)), key=cost)


traits = Traits("sm90_bitplane_gemm", Target.planes, arguments)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    name, size = traits.name, shared_bytes(config)
    return jit.Kernel(
        f"bitplane/sm90_gemm/{name}.cuh", name, config, Params, config.threads, size, cluster=config.cluster_n
    )
