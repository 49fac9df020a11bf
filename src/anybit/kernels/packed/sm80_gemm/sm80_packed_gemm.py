"""y = x W^T with mma.sync and cp.async, for sm_80, sm_86 and sm_89 (and later): the host side of sm80_packed_gemm.cuh.

The MARLIN paper's design (section 3.4) over the tiles of ``packed_layout``, and ADAngel's split strategy for int8
activations on int4 tensor cores, which only sm_80 to sm_89 have (sm_90 emulates them, forty times slower).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybit import jit
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.common.types import Operand
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout, packed_problem
from anybit.kernels.packed.packed_problem import Facts, facts, legal

_TOKENS = (8, 16, 32, 64)
"""Columns of a token tile."""
_MOST_TOKENS, _MOST_ROWS = _TOKENS[-1], 256
_WARPS = ((2, 8, 1), (1, 8, 1), (1, 4, 2))
"""(units, row_warps, split_k_warps) of the default, wide row tiles first."""
_PLACES, _SUMS = 2**24 - 1024, 2**28
"""Most places of the line (the kernel divides in float32) and partial sums (a slot per tile) of a launch."""


@dataclass(frozen=True)
class Config(Facts):
    """A kernel config. Warps: row_warps along N, ``units`` of 16 rows each, times split_k_warps along K.

    tile_m: tokens per tile.  stages: depth of the cp.async pipeline.
    nibbles: the split strategy: weights of up to 4 bits, and activations as two nibbles, on int4 tensor cores.
    sparse: the weights are 2:4 sparse.
    """

    tile_m: int
    units: int
    row_warps: int
    split_k_warps: int
    stages: int
    nibbles: bool = False
    sparse: bool = False

    @property
    def rows(self) -> int:
        """Rows of a row tile."""
        return self.row_warps * self.units * 16


class Params(jit.Params, header="packed/sm80_gemm/sm80_packed_gemm.cuh"):
    """Arguments of one launch."""


def at_once(problem: LinearProblem) -> LinearProblem:
    """The problem with at most as many tokens as one launch takes: fewer than 2^24 places, 1 GiB of partial sums."""
    places = max(1, problem.weight_tiles * problem.k_blocks)  # with the narrowest row tiles
    sums = max(1, packed_layout.round_up(problem.n, _MOST_ROWS)) * _MOST_TOKENS
    tiles = min(_PLACES // places, _SUMS // sums)
    return replace(problem, m=min(problem.m, max(1, tiles) * _MOST_TOKENS))


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    p = at_once(problem)
    if p.device.capability < 80:
        return f"{p.device.arch} has no cp.async: sm_80 and later do"
    if p.act_order and p.activations.quantized:
        return "activation order is not supported with quantized activations"
    reason = packed_problem.why_not_integers(p)
    if reason is not None or config is None:
        return reason
    c = config
    if any(getattr(c, name) != value for name, value in facts(p, Config).items()):
        return "the config was made for another problem"
    if c.rows % 64 or c.tile_m % 8 or c.stages < 2 or c.split_k_warps not in (1, 2, 4):
        shape = f"row tiles of {c.rows} rows, {c.tile_m} tokens, {c.stages} stages, {c.split_k_warps} split_k_warps"
        return f"{shape} do not fit together"
    if c.nibbles:
        if c.operand is not Operand.s8 or c.bits > 4 or c.group == 32 or c.sparse:
            return "int4 tensor cores take int8 activations and dense weights of up to 4 bits, in groups of 64 or more"
        if p.device.capability >= 90:
            return f"{p.device.arch} emulates int4 tensor cores, forty times slower than int8"
    tokens, rows, columns = _line(p, c)
    if tokens * rows * columns >= 2**24:
        return f"M = {p.m}, N = {p.n}, K = {p.k} need over 2^24 tiles of {c.tile_m} x {c.rows} x 128: use larger tiles"
    return p.device.why_not_shared(shared_bytes(c))


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: the pipeline, and the exchange of partial sums between split-K warps."""
    c = config
    x = c.tile_m * (128 * (1 if c.operand is Operand.s8 else 2) + 16)
    exchange = (c.split_k_warps - 1) * c.row_warps * 32 * c.units * (c.tile_m // 8) * 16
    return c.stages * (c.rows // 16 * c.unit_bytes + x) + exchange


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    threads = config.row_warps * config.split_k_warps * 32
    return jit.Kernel(
        "packed/sm80_gemm/sm80_packed_gemm.cuh", "sm80_packed_gemm", config, Params, threads, shared_bytes(config)
    )


def _line(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """Token tiles, row tiles and k blocks."""
    rows = problem.weight_tiles * packed_layout.TILE_ROWS
    return -(-problem.m // config.tile_m), -(-rows // config.rows), problem.k_blocks


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """A block per SM, or per place of the line if these are fewer. Blocks wait for each other: all must be resident."""
    tokens, rows, columns = _line(problem, config)
    return min(problem.device.sms, tokens * rows * columns), 1, 1


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    shapes = itertools.product(_TOKENS, ((1, 4, 2), (1, 8, 1), (2, 4, 1), (2, 8, 1)), (2, 3, 4, 6), (False, True))
    candidates = (_config(problem, tokens, *warps, stages, nibbles) for tokens, warps, stages, nibbles in shapes)
    return legal(problem, default(problem), why_not, candidates)


def default(problem: LinearProblem) -> Config:
    """The config for problems that were not tuned. Raises KernelError if there is none.

    Wide row tiles read activations less often. Narrow ones suffice for few tokens (MARLIN, equation 1), and are all
    that fits registers if sums are kept in int32 and float32: for 64 tokens, or groups of 32.
    """
    tokens = next((t for t in _TOKENS if t >= problem.m), _MOST_TOKENS)
    crowded = problem.activations.quantized and (tokens == 64 or problem.weights.group == 32)
    shapes = _WARPS[::-1] if tokens <= 16 else _WARPS[crowded:]
    tried = itertools.product((problem.device.capability < 90, False), shapes, (4, 3, 2))
    found = (_config(problem, tokens, *shape, stages, nibbles) for nibbles, shape, stages in tried)
    return packed_layout.first_legal(problem, found, why_not)


def _config(
    p: LinearProblem, tokens: int, units: int, row_warps: int, k_warps: int, stages: int, nibbles: bool
) -> Config:
    return Config(**facts(p, Config), tile_m=tokens, units=units, row_warps=row_warps, split_k_warps=k_warps,
                  stages=stages, nibbles=nibbles)  # fmt: skip


def scratch_bytes(problem: LinearProblem, config: Config) -> tuple[int, int]:
    """Bytes of a launch's partial sums, float32, and of its locks, int32."""
    tokens, rows, _ = _line(at_once(problem), config)
    return 4 * tokens * rows * config.rows * config.tile_m, 4 * tokens * rows


def arguments(operands: Operands, problem: LinearProblem, config: Config) -> Params:
    """The Params of a launch, unchecked."""
    o, p = operands, problem
    return Params(
        *o.weight[:3], o.x, o.x_scale, o.bias, o.y, *o.scratch,
        p.m, p.n, p.k, o.x_stride, p.k_blocks, p.weight_tiles,
    )  # fmt: skip


traits = Traits("sm80_packed_gemm", Target.bytes, arguments, overlaps=False, scratch=scratch_bytes, at_once=at_once)
