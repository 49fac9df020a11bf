"""Bit-plane GEMM for many tokens of 2-bit activations, planes stacked in N. Host side of sm90_bitplane_stacked.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import ROWS, LargeFacts, facts
from anybit.kernels.linear_problem import LinearProblem


class Stationary(Enum):
    """What stays in shared memory between a block's tiles."""

    none = "none"
    activations = "activations"


@dataclass(frozen=True)
class Config(LargeFacts):
    """A kernel config: tiles of 128 weights x ``tile_m`` tokens, all planes of the tokens side by side in wgmma's N.

    weight_stages: pipeline depth in planes of weights.  activation_stages: in chunks of k of all activation planes.
    stationary: what stays in shared memory while tiles share it.  epilogue_tile: tokens of results per staging
    buffer, of which there are ``epilogue_stages``.
    """

    tile_m: int
    weight_stages: int
    activation_stages: int
    stationary: Stationary = Stationary.none
    epilogue_tile: int = 32
    epilogue_stages: int = 3


_PLANES = 2
"""Planes side by side: one would gain nothing; four leave registers only for narrow tiles."""
_FEW = 64
"""Token count up to which tiles would be half empty."""


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    if (reason := bitplane_problem.why_not(problem)) is not None:
        return reason
    if refused := bitplane_problem.why_not_tma(problem):
        return refused
    if problem.m <= _FEW:
        return f"its tiles are for more than {_FEW} tokens, and {problem.m} would leave them half empty"
    if problem.activations.bits != _PLANES:
        return f"it takes {_PLANES}-bit activations, not {problem.activations.bits}-bit ones"
    if config is None:
        return None
    return _why_not_tile(problem, config) or bitplane_problem.why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(problem: LinearProblem, c: Config) -> str | None:
    if refused := bitplane_problem.why_not_epilogue(c, (32, 64)):
        return refused
    if c.tile_m not in (64, 128):
        return f"tile_m must be 64 or 128, not {c.tile_m}"
    if c.weight_stages < 2 or c.activation_stages < 2:
        return "the pipeline needs at least 2 stages of weights and of activations"
    if c.stationary is Stationary.activations and c.activation_stages != (chunks := problem.chunks):
        return f"stationary activations need activation_stages = {chunks}, all chunks of k, not {c.activation_stages}"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block, in bytes."""
    rows = config.weight_stages * ROWS + config.activation_stages * config.activation_bits * config.tile_m
    barriers = 16 * (config.weight_stages + config.activation_stages + 2 * config.epilogue_stages)
    return rows * bitplane_layout.ROW_BYTES + 2 * bitplane_problem.epilogue_bytes(config) + barriers


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """The fewest persistent blocks that finish as early: tiles per block differ by at most one."""
    tiles = -(-problem.m // config.tile_m) * -(-problem.n // ROWS)
    return (-(-tiles // -(-tiles // problem.device.sms)), 1, 1)


def _candidates(problem: LinearProblem) -> Iterator[Config]:
    none, activations = Stationary
    staging, ring = ((32, 3), (32, 4), (32, 5), (64, 2)), (2, 3, 4, 6, 8)
    for tile_m, epilogue in itertools.product((128, 64), staging):
        for stages in itertools.product(ring, ring):
            yield Config(*facts(problem), tile_m, *stages, none, *epilogue)
        for count in ring:
            yield Config(*facts(problem), tile_m, count, problem.chunks, activations, *epilogue)


@functools.cache
def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config of a problem."""
    found = dict.fromkeys(_candidates(problem)) if why_not(problem) is None else {}
    return tuple(config for config in found if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Stationary activations if they fit, then deep pipelines. Raises KernelError if there is no config."""

    def cost(config: Config) -> tuple[int, ...]:
        ring = -min(config.weight_stages, 4), -min(config.activation_stages, 4)
        keeps = config.stationary is not Stationary.activations
        return -config.tile_m, keeps, *ring, config.epilogue_tile, abs(config.epilogue_stages - 3)

    return min(bitplane_problem.legal(problem, why_not(problem), configs(problem)), key=cost)


traits = bitplane_problem.traits("sm90_bitplane_stacked")


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return bitplane_problem.kernel(traits.name, config, config.threads, shared_bytes(config))
