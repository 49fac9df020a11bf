"""y = x W^T for up to 16 tokens and packed weights of 1 to 8 bits. Host side of sm90_packed_skinny.cuh."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybit import jit
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.common.types import Operand
from anybit.kernels.gemm_kernel import Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed import packed_problem as few
from anybit.kernels.packed.packed_layout import round_up
from anybit.kernels.packed.packed_problem import FewFacts, Params, arguments

MOST_TOKENS = 16
"""Most tokens: above, other kernels are faster, and shared memory and registers run out here."""


@dataclass(frozen=True)
class Config(FewFacts):
    """A kernel config.

    tile_m: MMA columns, at least m. warps: of a block, of which split_k_warps split K. row_units: units of 16 rows that
    a warp takes at a time, row_chunks times in sequence. stages: depth of a warp's pipeline of weights;
    prologue_stages: copies issued at once, the others as these land. x_stages: blocks of activations in a warp's shared
    memory; x_resident: whether these are all. trigger: when the next kernel may start (PDL): 0 at once, else when
    trigger - 1 copies are left to issue. chain: length of chains of dependent MMAs. min_shared_bytes: at least so much
    shared memory; see ``heuristics.limit_occupancy``.
    """

    tile_m: int
    warps: int
    split_k_warps: int
    row_units: int
    row_chunks: int
    stages: int
    x_stages: int
    trigger: int = 0
    prologue_stages: int = 1
    chain: int = 2
    x_resident: bool = True
    min_shared_bytes: int = 0


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    p = problem
    if (reason := few.why_not_few(p, MOST_TOKENS, "sm90_packed_gemm.py", int8=True)) is not None:
        return reason
    if p.activations.quantized and p.tile_columns * (2**p.weights.bits) * 128 * 2 >= 2**32:
        return f"sums over K = {p.k} of {p.weights.bits}-bit weights and int8 activations may not fit int32"
    if config is None:
        return None
    return _why_not_split(p, config) or few.why_not_config(p, config, shared_bytes(config))


def _why_not_split(p: LinearProblem, c: Config) -> str | None:
    if c.warps % c.split_k_warps:
        return f"{c.warps} warps are not a multiple of split_k_warps = {c.split_k_warps}"
    if c.x_resident != (c.x_stages * c.split_k_warps >= p.k_blocks):
        return "x_resident must say whether x_stages hold all of a warp's activations"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: per warp a pipeline of weights (reused for sums) and activations; factors; barriers."""
    c = config
    slot = c.tile_m * ((128 if c.operand is Operand.s8 else 256) + (16 if c.tile_m > 1 else 0))
    units = c.row_units * c.row_chunks
    ring = round_up(max(c.stages * c.row_units * c.unit_bytes, units * 16 * c.tile_m * 4), 128)
    rows = c.warps // c.split_k_warps * units * 16
    size = (
        c.warps * (ring + c.x_stages * slot)
        + round_up(rows * 8 + c.tile_m * 4, 128)
        + round_up(c.warps * c.stages * 8, 128)
    )
    return max(size, c.min_shared_bytes)


def kernel(config: Config, silu: bool = False) -> jit.Kernel:
    """The kernel of a config. silu: with a SiLU epilogue; see ``Traits``."""
    entry = "sm90_packed_skinny" + "<Gate::silu>" * silu
    return jit.Kernel(
        "packed/sm90_skinny/sm90_packed_skinny.cuh", entry, config, Params, config.warps * 32, shared_bytes(config)
    )


def _silu(config: Config) -> jit.Kernel | None:
    """With 16-bit activations, SiLU is faster as a kernel of its own."""
    return kernel(config, silu=True) if config.operand is Operand.s8 else None


traits = Traits("sm90_packed_skinny", Target.bytes, arguments, gathers=True, silu=_silu)


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """At most a block per SM if that covers the rows, so that the next kernel's blocks fit beside them."""
    most = config.warps // config.split_k_warps * config.row_units * config.row_chunks
    return max(min(problem.device.sms, problem.units), -(-problem.units // most)), 1, 1


def refit(p: LinearProblem, c: Config) -> Iterator[Config]:
    """A config of another problem for this one: the same warps and copies, with less and less shared memory."""
    for size in few.sizes(c, c.row_units):
        one = fitted(p, c.warps, c.warps // c.split_k_warps, c.row_units, size, c.prologue_stages)
        yield replace(one, chain=c.chain)


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    shapes = itertools.product((8, 16), (1, 2), (1, 2, 3, 4), (48, 72, 96, 160), (1, 2, 4))
    candidates = (fitted(problem, *shape) for shape in shapes)
    return few.legal(problem, default(problem), why_not, candidates)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Pipelines of as much shared memory as fits, where nothing was measured. Raises KernelError if there is none."""
    return packed_layout.first_legal(problem, (fitted(problem, 8, 1, 2, size) for size in few.SIZES), why_not)


def fitted(p: LinearProblem, warps: int, row_warps: int, row_units: int, kibibytes: int, prefetch: int = 0) -> Config:
    """A config with these warps, whose pipelines take about ``kibibytes``. prefetch: prologue_stages; 0: automatic."""
    mine, k_warps, tile_m = -(-p.block_units // row_warps), warps // row_warps, packed_layout.power_of_two(p.m)
    row_units, blocks = min(row_units, mine), -(-p.k_blocks // k_warps)
    chunks, stage = -(-mine // row_units), warps * row_units * packed_layout.unit_bytes(p.weights)
    stages, prologue = few.ring(kibibytes << 10, stage, blocks * chunks, prefetch)
    whole = tile_m <= 8 and warps * blocks * tile_m * 256 <= p.device.shared_bytes // 4
    late = stages < blocks * chunks and warps == 8 and tile_m <= 2
    return Config(
        **few.facts(p, Config), tile_m=tile_m, warps=warps, split_k_warps=k_warps, row_units=row_units,
        row_chunks=chunks, stages=stages, x_stages=blocks if whole else min(blocks, 2), trigger=int(late),
        prologue_stages=prologue, x_resident=whole or blocks <= 2,
    )  # fmt: skip
