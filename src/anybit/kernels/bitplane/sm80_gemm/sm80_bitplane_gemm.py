"""Bit-plane GEMM with mma.sync, for sm_80 to sm_90. Host side of sm80_bitplane_gemm.cuh."""

import functools
import itertools
from dataclasses import dataclass

from anybit import jit
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import Facts, facts
from anybit.kernels.linear_problem import LinearProblem


@dataclass(frozen=True)
class Config(Facts):
    """A kernel config: a block's tile, its warps along n, m and k, and its pipeline of stages of stage_k columns.

    aligned: rows of Y are 16-byte aligned, with N a multiple of 8.
    """

    aligned: bool
    tile_n: int
    tile_m: int
    warps_n: int
    warps_m: int
    warps_k: int
    stage_k: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps_n * self.warps_m * self.warps_k


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can.

    APT-LLM's constraints (section V): warps cover the tile with whole 16 x 8 x 256 MMAs, and shared memory holds all
    planes of ``stages`` stages.
    """
    reason = bitplane_problem.why_not(problem, 80)
    if reason is not None or config is None:
        return reason
    return _why_not_tile(problem, config) or bitplane_problem.why_not_config(problem, config, shared_bytes(config))


def _why_not_tile(problem: LinearProblem, config: Config) -> str | None:
    if config.tile_n % (16 * config.warps_n):
        return f"tile_n must be a multiple of 16 for each of {config.warps_n} warps, not {config.tile_n}"
    if config.tile_m % (8 * config.warps_m):
        return f"tile_m must be a multiple of 8 for each of {config.warps_m} warps, not {config.tile_m}"
    if bitplane_layout.CHUNK % config.stage_k or config.stage_k % (256 * config.warps_k):
        return (
            f"stage_k must divide 1024 and be a multiple of 256 for each of {config.warps_k} warps, not "
            f"{config.stage_k}"
        )
    if config.threads > 1024 or config.threads * 128 // config.stage_k % 8:
        return f"{config.threads} threads do not copy whole groups of 8 rows of {config.stage_k} bits"
    if config.stages < 2:
        return f"the pipeline needs at least 2 stages, not {config.stages}"
    accumulators = config.tile_n * config.tile_m // (32 * config.warps_n * config.warps_m)
    if accumulators > 128:
        return f"a thread would hold {accumulators} accumulators, and at most 128 fit its registers"
    if config.aligned and not _aligned(problem):
        return (
            "this config stores 16 bytes at a time, and rows of Y are not 16-byte aligned or N is not a multiple of 8"
        )
    return None


def _aligned(problem: LinearProblem) -> bool:
    return problem.y_aligned and problem.n % 8 == 0


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: all planes of ``stages`` stages, reused for the tile's sums."""
    stage = (config.weight_bits * config.tile_n + config.activation_bits * config.tile_m) * config.stage_k // 8
    return max(config.stages * stage, 4 * config.tile_m * (config.tile_n + 4))


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A block per tile of Y, in one dimension."""
    return (-(-problem.n // config.tile_n) * -(-problem.m // config.tile_m), 1, 1)


# tile_n, tile_m, warps_n, warps_m, warps_k
_TILES = (
    (128, 128, 2, 4, 1),
    (128, 64, 2, 2, 1),
    (64, 64, 2, 2, 1),
    (64, 32, 2, 1, 2),
    (64, 16, 2, 1, 2),
    (64, 8, 2, 1, 2),
    (32, 16, 1, 1, 4),
    (32, 8, 1, 1, 4),
)


@functools.cache
def configs(problem: LinearProblem) -> tuple[Config, ...]:
    """Every legal config: the tiles above, stages of 256 to 1024 columns, 2 to 4 of them."""
    candidates = (
        Config(*facts(problem)[:5], False, _aligned(problem), *tile, stage_k, stages)
        for tile, stage_k, stages in itertools.product(_TILES, (1024, 512, 256), (2, 3, 4))
    )
    return tuple(config for config in candidates if why_not(problem, config) is None)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """The tile with the least estimated work over its waves, then two blocks per SM, then the most columns in flight.

    Tiles much larger than M are excluded: they would read and multiply padding. Raises KernelError if there is none.
    """
    found = bitplane_problem.legal(problem, why_not(problem), configs(problem))
    fitting = [c for c in found if c.tile_m < 2 * max(problem.m, 8)] or found

    def cost(c: Config) -> tuple[int, bool, int]:
        waves = -(-grid(problem, c)[0] // problem.device.sms)
        work = c.tile_n * c.tile_m + 32 * (c.tile_n + c.tile_m)  # products and operand loads
        return waves * work, 2 * shared_bytes(c) > problem.device.shared_bytes, -c.stage_k * c.stages

    return min(fitting, key=cost)


traits = bitplane_problem.traits("sm80_bitplane_gemm")


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return bitplane_problem.kernel(traits.name, config, config.threads, shared_bytes(config))
