"""A mixture of experts for a few tokens, as two products on digits of activations. Host side of sm90_experts_gemv.cuh.

Bytes and instructions. A unit of w4a16g128 (16 rows by 128 columns) is 1,056 bytes, 30 ns of an SM's share of
4.67 TB/s: 215 issue slots of its four schedulers. A unit takes some 50 (two loads of codes, 16 ANDs, 4 MMAs, a scale),
and 150 more are a k block's digits for one token, which all units of a block share. So memory is the limit while few
tokens share an expert. Weights are read once for up to tile_m tokens of an expert (gate_up), or for tile_m tokens
(down): where tokens * top / experts is beyond tile_m, kernels that sort tokens by expert read less.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Launch, Pointer
from anybit.kernels.common.types import Gate as Gate
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import UNIT_ROWS, round_up, unit_bytes
from anybit.kernels.packed.packed_problem import FewFacts, facts, ring, why_not_few
from anybit.kernels.packed.sm90_gemv.sm90_packed_gemv import slot_bytes
from anybit.scheme import WeightFormat

MOST_TOKENS = 8
"""Most tokens of a launch."""
_MOST_CHOICES = 32
"""Most choices of the tokens that share a block of ``down``: a lane each."""
_MOST_UNITS = {1: 16, 2: 16, 4: 8}
"""Most units of 16 rows per block, by tile_m."""
_SIZES = (104, 64, 48, 32, 16, 8, 1)
"""Kibibytes of pipelines to try: the first if each SM has one block of gate_up, which leaves room for one of down."""
_LONG = 128
"""Blocks of K from which down takes few warps with deep pipelines: 48.2 us for 50.7 of DeepSeek-V3's 32 experts."""


@dataclass(frozen=True)
class Problem:
    """One of the two products.

    n, k: of one expert's weight.  down: the second product, which sums over a token's experts; else gate_up, whose n
    rows alternate between eight of gate and eight of up.  aligned: rows of x begin on 16 bytes.
    """

    tokens: int
    top: int
    experts: int
    n: int
    k: int
    weights: WeightFormat
    down: bool
    gate: Gate = Gate.silu
    dtype: torch.dtype = torch.float16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))
    aligned: bool = True

    @property
    def product(self) -> LinearProblem:
        """One expert's product for one token."""
        return LinearProblem(
            1, self.n, self.k, self.weights, dtype=self.dtype, device=self.device, aligned=self.aligned
        )

    @property
    def units(self) -> int:
        """Units of an expert, including padding of its last tile."""
        return self.product.units


@dataclass(frozen=True)
class Config(FewFacts):
    """A kernel config.

    places: most experts of a block.  tile_m: tokens that share weights.  blocks: along an expert's rows.
    cluster: blocks that split K (down).  warps: of a block, all along K.  stage_units, chunks, stages, x_stages,
    x_resident, trigger: as those of ``sm90_packed_gemv.Config``.
    """

    down: bool
    gate: Gate
    places: int
    tile_m: int
    blocks: int
    cluster: int
    warps: int
    stage_units: int
    chunks: int
    stages: int
    x_stages: int
    x_resident: bool
    min_blocks_per_sm: int = 1
    sparse: bool = False
    trigger: int = 0


class ExpertsParams(jit.Params, header="experts/sm90_experts_gemv/sm90_experts_gemv.cuh"):
    """The arguments of one launch."""


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    p = problem
    if (reason := why_not_few(p.product, 1, "sm90_packed_gemm.py", sparse=True)) is not None:
        return reason
    if not 1 <= p.tokens <= MOST_TOKENS:
        return f"a launch takes 1 to {MOST_TOKENS} tokens, not {p.tokens}"
    if not 1 <= p.top <= _MOST_CHOICES:
        return f"a token chooses 1 to {_MOST_CHOICES} experts, not {p.top}"
    if not p.down and p.n % UNIT_ROWS:
        return f"rows alternate between eight of gate and eight of up, and {p.n} is no multiple of {UNIT_ROWS}"
    if config is None:
        return None
    c = config
    expected = {**facts(p.product, Config), "down": p.down, "gate": p.gate, "places": c.tile_m * p.top if p.down else 1}
    if any(getattr(c, name) != value for name, value in expected.items()):
        return "the config was made for another problem"
    if c.places > _MOST_CHOICES:
        return f"{c.tile_m} tokens of {p.top} experts each are more than {_MOST_CHOICES} choices"
    if c.stage_units * c.chunks < -(-p.units // c.blocks):
        return f"{c.blocks} blocks of {c.stage_units * c.chunks} units do not cover {p.units}"
    if c.cluster not in ((1, 2, 4) if p.down else (1,)):
        return f"1, 2 or 4 blocks of down split K, and one of gate_up, not {c.cluster}"
    if c.x_resident != (c.x_stages >= _rounds(p, c.cluster * c.warps, c.tile_m)):
        return "x_resident must say whether x_stages hold all of a warp's activations"
    return p.device.why_not_shared(shared_bytes(c))


def _rounds(p: Problem, warps: int, tile_m: int) -> int:
    """Most k blocks of a warp."""
    return -(-p.product.k_blocks * (tile_m * p.top if p.down else 1) // warps)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: per warp a pipeline of weights (reused for sums) and digits; factors, barriers, list."""
    c = config
    rows = c.stage_units * c.chunks * UNIT_ROWS
    pipeline = round_up(max(c.stages * c.stage_units * c.unit_bytes, c.tile_m * rows * 4), 128)
    a_warp = pipeline + c.x_stages * slot_bytes(c, c.tile_m) + c.stages * 8
    received = (c.cluster - 1) * -(-c.tile_m * rows // 4 // c.cluster) * 16
    return c.warps * a_warp + c.places * rows * 8 + received + 12 + c.places * (4 + 8 * c.tile_m)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    entry = "sm90_experts_down" if config.down else "sm90_experts_gate_up"
    header = "experts/sm90_experts_gemv/sm90_experts_gemv.cuh"
    code = replace(config, blocks=0)  # which the grid alone has: one kernel for many shapes
    return jit.Kernel(header, entry, code, ExpertsParams, config.warps * 32, shared_bytes(config), config.cluster)


def grid(problem: Problem, config: Config) -> jit.Grid:
    """Blocks along an expert's rows; and slots (gate_up), or groups of tile_m tokens (down)."""
    return config.blocks * config.cluster, _rows_of_blocks(problem, config.tile_m), 1


def _rows_of_blocks(p: Problem, tile_m: int) -> int:
    return -(-p.tokens // tile_m) if p.down else p.tokens * p.top


def tile_of(p: Problem) -> int:
    """Tokens that share weights: as many as pay, given how often tokens choose the same expert."""
    tile_m = 1 if p.tokens == 1 else 4 if p.tokens > 2 and 2 * p.tokens * p.top > p.experts else 2
    while p.down and tile_m * p.top > _MOST_CHOICES:
        tile_m //= 2
    return tile_m


def blocks_of(p: Problem, tile_m: int, cluster: int = 1) -> int:
    """Blocks along an expert's rows. cluster: blocks that share rows.

    gate_up of one token and down, all of whose blocks work: one on each SM, or as few as registers allow. gate_up of
    more tokens, some of whose blocks end at once: 12 units each, of table codes 15.
    """
    most = _MOST_UNITS[tile_m]
    if p.tokens > 1 and not p.down:
        return -(-p.units // min(15 if p.weights.tabled else 12, most))
    each = max(1, p.device.sms // (cluster * _rows_of_blocks(p, tile_m)))  # for a block on each SM
    return min(p.units, each * -(-p.units // (each * most)))


def cluster_of(p: Problem, tile_m: int) -> int:
    """Blocks that split K: down's in pairs, unless there is a block for each unit."""
    return 2 if p.down and p.units * _rows_of_blocks(p, tile_m) > p.device.sms else 1


def fitted(
    p: Problem, warps: int, kibibytes: int, tile_m: int = 0, blocks: int = 0, stage_units: int = 0, x_stages: int = 4,
    cluster: int = 0,
) -> Config:  # fmt: skip
    """A config with these warps, and pipelines of about ``kibibytes``. Others: 0 for the usual."""
    tile_m = tile_m or tile_of(p)
    cluster = cluster or cluster_of(p, tile_m)
    blocks = blocks or blocks_of(p, tile_m, cluster)
    mine = -(-p.units // blocks)
    rounds = _rounds(p, cluster * warps, tile_m)
    room = kibibytes * 1024 // (warps * unit_bytes(p.weights))  # units of a warp's pipeline

    def cost(units: int) -> tuple[int, float]:  # three copies in flight; idle units, and a copy's own cost
        chunks = -(-mine // units)
        return max(0, min(3, rounds * chunks) - room // units), chunks * (units + 0.25)

    stage_units = stage_units or min(range(1, min(mine, 6) + 1), key=cost)
    chunks = -(-mine // stage_units)
    x_stages = max(1, min(x_stages // min(tile_m, 2), rounds))
    base = Config(
        **facts(p.product, Config), down=p.down, gate=p.gate, places=tile_m * p.top if p.down else 1, tile_m=tile_m,
        blocks=blocks, cluster=cluster, warps=warps, stage_units=stage_units, chunks=chunks, stages=1,
        x_stages=x_stages, x_resident=x_stages >= rounds, min_blocks_per_sm=2 if warps <= 8 else 1,
    )  # fmt: skip
    stages, _ = ring(kibibytes << 10, warps * stage_units * base.unit_bytes, rounds * chunks)
    return replace(base, stages=stages)


def configs(problem: Problem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    yield (first := default(problem))
    for tile_m in sorted({1 if problem.tokens == 1 else 2, tile_of(problem)}):
        for cluster in (1, 2, 4) if problem.down else (1,):
            usual = blocks_of(problem, tile_m, cluster)
            choices = itertools.product((usual, min(problem.units, 2 * usual)), (8, 12, 16), (104, 64))
            for blocks, warps, kibibytes in choices:
                found = fitted(problem, warps, kibibytes, tile_m, blocks, cluster=cluster)
                if found != first and why_not(problem, found) is None:
                    yield found


@cache
def default(problem: Problem) -> Config:
    """The built-in choice. Raises KernelError if there is none."""
    if (reason := why_not(problem)) is not None:
        raise KernelError(reason)
    p, tile_m = problem, tile_of(problem)
    blocks, k_blocks, one, tables = blocks_of(p, tile_m), p.product.k_blocks, p.tokens == 1, p.weights.tabled
    # Of one block an SM, whose weights do not all fit: Qwen3-30B, where they do, takes 9.95 us for 10.6.
    alone = not p.down and blocks * _rows_of_blocks(p, tile_m) <= p.device.sms
    alone = alone and -(-p.units // blocks) * k_blocks * unit_bytes(p.weights) > _SIZES[0] << 10
    long = p.down and one and k_blocks * p.top >= _LONG and p.weights.bits >= 4  # copies of many rows pay
    # Few warps of table codes: gpt-oss at 4 tokens takes 64.1 us for 66.5; at one, with a late down, 20.8 for 22.7.
    warps = (12 if tables else 8 if long else 16) if p.down else 4 if tables and tile_m == 2 else 8
    sizes = _SIZES if alone or long or (p.down and tables and not one) else _SIZES[2 if warps == 4 else 1 :]
    for kibibytes in sizes:
        config = replace(fitted(p, warps, kibibytes), trigger=4 if tables and one and not p.down else 0)
        if (reason := why_not(p, config)) is None:
            return config
    raise KernelError(reason)


def launch(
    problem: Problem, config: Config, weight: tuple[Pointer, Pointer, Pointer], x: Pointer, x_stride: int, y: Pointer,
    y_stride: int, ids: Pointer, id_words: int, routing: Pointer = None, bias: Pointer = None,
) -> Launch:  # fmt: skip
    """A launch, unchecked. weight: tiles, row_scale and row_zero of all experts, each on whole tiles of rows.

    gate_up: x [tokens, k] -> y = h [tokens * top, n / 2].  down: x = h [tokens * top, k] -> y [tokens, n], directly
    behind its gate_up.  ids: int32 or int64 [tokens, top], of ``id_words`` words; others than 0 to experts - 1 are
    skipped.  routing: float32 [tokens, top], for down.  bias: [experts, n].  Strides are in values.
    """
    p, product = problem, problem.product
    params = ExpertsParams(
        *weight, x, bias, ids, routing, y, p.tokens, p.top, p.experts, p.n, p.k, x_stride, y_stride,
        product.k_blocks, product.weight_tiles, id_words,
    )  # fmt: skip
    return Launch(kernel(config), params, grid(p, config), pdl=True)
