"""y = x W^T for some 2 to 32 tokens of 16-bit activations as int8 digits, weights of 1 to 4 bits.

Host side of sm80_packed_digits.cuh. ``digitize`` converts x in a launch of its own.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybit import jit
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.common.types import Code
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout, packed_problem, sparse_layout
from anybit.kernels.packed.packed_layout import UNIT_ROWS, round_up
from anybit.kernels.packed.packed_problem import FewFacts, Params, facts, legal
from anybit.kernels.packed.sm80_digits import digitize

MOST_TOKENS, MOST_TOKENS_OF_MMA, MOST_BITS = 64, 32, 4
_CODES = (Code.sym, Code.asym, Code.bipolar)
_MMA_TOKENS = 8
"""Tokens up to which mma.sync is the built-in choice."""
_MOST_UNITS = 18
"""Of a warp: more take too long to compile."""


@dataclass(frozen=True)
class Config(FewFacts):
    """A kernel config. wide_store (from the problem): four results per store.

    tile_m: at least m, a multiple of 4. row_warps x k_warps: warps of a block, along N and K. units: of 16 rows, most
    of a warp; together: of them, that are multiplied at a time. stages: blocks of 128 columns of a warp's pipeline, one
    of which it multiplies. cluster_k: blocks that split K. wgmma: instead of mma.sync. min_blocks_per_sm: bounds
    registers. min_shared_bytes: see ``heuristics.limit_occupancy``.
    """

    wide_store: bool
    tile_m: int
    row_warps: int
    k_warps: int
    units: int
    together: int
    stages: int
    cluster_k: int = 1
    wgmma: bool = False
    min_blocks_per_sm: int = 1
    min_shared_bytes: int = 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.k_warps

    @property
    def block_units(self) -> int:
        """Most units of a block."""
        return self.row_warps * self.units


def why_not(problem: LinearProblem, config: Config | None = None, e2m1: bool = False) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can.

    e2m1: whether to take such codes, which become fp16.
    """
    p, c = problem, config
    if p.device.capability < 80:
        return f"{p.device.arch} has no int8 mma.sync with k = 32 (sm_80 and later do)"
    most = MOST_TOKENS if p.device.arch == "sm_90a" else MOST_TOKENS_OF_MMA
    if p.m > most:
        return f"M = {p.m} is more than {most} tokens: see sm90_packed_gemm.py and sm80_packed_gemm.py"
    if p.weights.sparse:
        return sparse_layout.DENSE_ALONE
    if p.activations.quantized:
        return f"it takes float16 or bfloat16 activations, not {p.activations.bits}-bit ones"
    if (reason := packed_problem.why_not(p)) is not None:
        return reason
    if e2m1 and p.weights.code == "e2m1":
        if c is not None and (c.wgmma or c.tile_m % 8):
            return f"e2m1 codes take mma.sync and multiples of 8 tokens, not {c.tile_m}"
    elif p.weights.bits > MOST_BITS or Code[p.weights.code] not in _CODES or p.weights.group == 16:
        return (
            f"it takes sym, asym and bipolar codes of 1 to {MOST_BITS} bits in rows or groups of 32 or more, "
            f"not {p.scheme}"
        )
    if c is None:
        return None
    if c.tile_m % 4 or c.tile_m % c.cluster_k:
        return f"tile_m must be a multiple of 4 that {c.cluster_k} blocks can share evenly, not {c.tile_m}"
    if (reason := _why_not_product(p, c)) is not None:
        return reason
    if not 1 <= c.k_warps <= 15:
        return f"k_warps must be 1 to 15, not {c.k_warps}"
    if c.cluster_k not in (1, 2, 4) or (c.cluster_k > 1 and p.device.capability < 90):
        return f"a cluster has 1 block, or on sm_90 and later 2 or 4, not {c.cluster_k} on {p.device.arch}"
    if c.stages < 2 or not 1 <= c.together <= c.units:
        return f"stages = {c.stages} must be 2 or more, and together = {c.together} at most units = {c.units}"
    return packed_problem.why_not_config(p, c, shared_bytes(c))


def _why_not_product(p: LinearProblem, c: Config) -> str | None:
    if not c.wgmma and c.tile_m > MOST_TOKENS_OF_MMA:
        return f"mma.sync is for up to {MOST_TOKENS_OF_MMA} tokens, not {p.m}"
    if not c.wgmma:
        return None
    if p.device.arch != "sm_90a":
        return f"{p.device.arch} has no wgmma (sm_90a has)"
    if c.row_warps % 4:
        return f"wgmma takes four warps along N, not {c.row_warps}"
    if c.tile_m != _round_tokens(c.tile_m):
        return f"wgmma takes a multiple of 8 tokens above 16, and of 16 above 32, not {c.tile_m}"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: rings of weights and digits, reused for sums; factors; received sums; a barrier."""
    c, rows = config, config.block_units * UNIT_ROWS
    rings = c.stages * (c.warps * c.units * c.unit_bytes + c.k_warps * digitize.block_bytes(c))
    sums = c.k_warps * c.tile_m * (rows + 8) * 4
    received = (c.cluster_k - 1) * (c.tile_m // c.cluster_k) * rows * 4
    barriers = 8 + c.k_warps * c.stages * 8 * c.wgmma
    return max(max(rings, sums) + rows * 8 + received + barriers, c.min_shared_bytes)


def arguments(operands: Operands, problem: LinearProblem, config: Config) -> Params:
    """The Params of a launch, unchecked: x is what ``digitize`` made of it."""
    return packed_problem.arguments(replace(operands, x=operands.scratch[0]), problem)


def _scratch(problem: LinearProblem, config: Config) -> tuple[int, int]:
    return problem.k_blocks * digitize.block_bytes(config), 0


traits = Traits("sm80_packed_digits", Target.bytes, arguments, gathers=True, scratch=_scratch, prepares=digitize.launch)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    c, name = config, traits.name
    return jit.Kernel(f"packed/sm80_digits/{name}.cuh", name, c, Params, c.warps * 32, shared_bytes(c), c.cluster_k)


def grid(problem: LinearProblem, config: Config) -> jit.Grid:
    """A block (or a cluster's share) per SM, if that covers the rows."""
    units = problem.units
    owners = max(min(problem.device.clusters(config.cluster_k), units), -(-units // config.block_units))
    return owners * config.cluster_k, 1, 1


def fitted(
    p: LinearProblem, row_warps: int, k_warps: int, stages: int, cluster: int = 1, wgmma: bool = False,
    together: int | None = None, min_blocks_per_sm: int = 1,
) -> Config:  # fmt: skip
    """A config with these warps; fewer stages if shared memory does not hold them, or K has fewer blocks."""
    tile_m, units = _round_tokens(p.m), -(-p.units // p.device.clusters(cluster))
    row_warps = row_warps if wgmma else min(row_warps, units)
    mine = max(1, min(-(-units // row_warps), _most_units(tile_m, row_warps * k_warps, wgmma)))
    rounds = -(-p.k_blocks // (k_warps * cluster))
    if together is None:
        together = mine if wgmma or tile_m <= 16 else 2
    config = Config(
        **facts(p, Config), tile_m=tile_m, row_warps=row_warps, k_warps=k_warps, units=mine,
        together=min(mine, together), stages=max(2, min(stages, rounds + 1)), cluster_k=cluster, wgmma=wgmma,
        min_blocks_per_sm=min_blocks_per_sm,
    )  # fmt: skip
    while config.stages > 2 and shared_bytes(config) > p.device.shared_bytes:
        config = replace(config, stages=config.stages - 1)
    return config


def _round_tokens(m: int) -> int:
    return round_up(m, 4 if m <= 16 else 8 if m <= 32 else 16)


def _most_units(tile_m: int, warps: int, wgmma: bool) -> int:
    """Units whose sums a thread's registers hold, beside products and operands."""
    others = 2 * min(tile_m, 32) + 64 if wgmma else 3 * tile_m + tile_m // 2 + 48
    return min(_MOST_UNITS, (min(255, 2048 // warps // 8 * 8) - others) // (tile_m // 2))


def refit(p: LinearProblem, c: Config) -> Iterator[Config]:
    """A config of another problem for this one: the same warps and stages."""
    together = c.together if c.together < c.units else None
    for cluster in dict.fromkeys((c.cluster_k, 1)):
        yield fitted(p, c.row_warps, c.k_warps, c.stages, cluster, c.wgmma, together, c.min_blocks_per_sm)


_WARPS, _WGMMA_WARPS = ((1, 8), (2, 4), (2, 6), (2, 8), (2, 2), (1, 1)), ((4, 3), (4, 2), (8, 1), (4, 4))
"""(row_warps, k_warps), in the order in which the default tries them."""
_STAGES, _CLUSTERS = (3, 2), (1, 2)


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    plain = itertools.product(_WARPS, _STAGES, _CLUSTERS, (2, _MOST_UNITS))
    candidates = [fitted(problem, *warps, depth, c, together=together) for warps, depth, c, together in plain]
    for warps, depth, c in itertools.product(_WGMMA_WARPS, _STAGES, _CLUSTERS):
        candidates.append(fitted(problem, *warps, depth, c, wgmma=True))
    return legal(problem, default(problem), why_not, candidates)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """The first warps that cover the rows in one wave, where nothing was measured. Raises KernelError for none."""
    wgmma = problem.device.arch == "sm_90a" and problem.m > _MMA_TOKENS
    tried = [fitted(problem, *warps, max(_STAGES), wgmma=wgmma) for warps in (_WGMMA_WARPS if wgmma else _WARPS)]
    tried.sort(key=lambda config: grid(problem, config)[0] > problem.device.sms)
    return packed_layout.first_legal(problem, tried, why_not)
