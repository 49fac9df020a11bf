"""Experts' products for many tokens, as launches: route, gate_up with SiLU, down, combine.

Where few tokens chose an expert, both products run on digits of activations (sm90_grouped_digits).

Weights are tall: expert e has the rows from e * n on, n a multiple of 64. Slots, a token's choices of experts, are
sorted by expert; the products read and write a row a slot. Tiles are chosen from counts alone: ids stay on the GPU.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Pointer
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Codes, Target
from anybit.kernels.common.types import Gate, Operand, Output
from anybit.kernels.experts.combine import combine
from anybit.kernels.experts.halve import halve
from anybit.kernels.experts.route import route
from anybit.kernels.experts.sm90_grouped_digits import sm90_grouped_digits as digits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import TILE_COLUMNS, TILE_ROWS, round_up
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import TOKENS, Config, shared_bytes
from anybit.scheme import ActivationFormat, WeightFormat

_ROW_WARPGROUPS = (4, 3, 2, 1)
_MOST_STAGES = 24
_MOST_HALVED = 128
"""Tokens an expert up to which bf16 activations as fp16 save more than their conversion takes."""
Pair = tuple[Config, Config] | tuple[digits.Config, digits.Config]
"""Configs of gate_up and down."""


@dataclass(frozen=True)
class Problem:
    """y [tokens, hidden] of a mixture's experts, gate_up [2 * inner, hidden] and down [hidden, inner] each.

    gate_up, down: formats of the weights, each expert's rows padded to 64.  dtype: of x and y.  id_words: 32-bit words
    of an id, 1 or 2.  routing: the type of routing weights.  gate: what joins gate and up.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    gate_up: WeightFormat
    down: WeightFormat
    activations: ActivationFormat = field(default_factory=ActivationFormat)
    dtype: torch.dtype = torch.bfloat16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))
    id_words: int = 2
    routing: Output = Output.f32
    gate: Gate = Gate.silu

    @property
    def slots(self) -> int:
        """Tokens' choices of experts."""
        return self.tokens * self.top_k

    @property
    def products(self) -> tuple[LinearProblem, LinearProblem]:
        """gate_up and down of one expert, for all slots."""
        x, dtype, device = self.activations, self.dtype, self.device
        return (
            LinearProblem(self.slots, 2 * self.inner, self.hidden, self.gate_up, x, dtype, device),
            LinearProblem(self.slots, self.hidden, self.inner, self.down, x, dtype, device),
        )


@dataclass(frozen=True, eq=False)
class Operands:
    """What a layer's experts read and write: tensors, or slots of a plan.

    x: [tokens, hidden], rows x_stride values apart, on 16 bytes.  ids, weights: [tokens, top_k], dense.  gate_up, down:
    tiles, row_scale and row_zero of all experts; gate_up's rows alternate eight of gate and eight of up.  Biases: in
    the order of the weights' rows, padding included.  y: [tokens, hidden], dense.  scratch: ``scratch`` bytes, aligned
    to 128.
    """

    x: Pointer
    x_stride: int
    ids: Pointer
    weights: Pointer
    gate_up: tuple[Pointer, Pointer, Pointer]
    down: tuple[Pointer, Pointer, Pointer]
    y: Pointer
    scratch: Tensor | jit.Slot
    gate_up_bias: Pointer = None
    down_bias: Pointer = None


def why_not(problem: Problem, configs: Pair | None = None) -> str | None:
    """Why experts (or their configs) cannot run, in a sentence; None if they can."""
    p = problem
    if reason := route.why_not(p.experts, p.top_k):
        return reason
    if p.hidden % 8 or p.inner % 8:
        return f"rows of x and of inner values must be whole 16-byte vectors, not {p.hidden} and {p.inner} values"
    if p.slots >= 1 << 24:
        return f"{p.slots} choices of experts are more than 2^24 - 1: run fewer tokens at a time"
    for place, product in enumerate(p.products):
        config = configs[place] if configs else None
        if isinstance(config, digits.Config):
            reason = digits.why_not(product, config)
        else:
            reason = sm90_packed_gemm.why_not(product, config) or (_why_not_persistent(config) if config else None)
        if reason:
            return reason
    if configs and configs[0].tile_m != configs[1].tile_m:
        return f"both products share token tiles, and have {configs[0].tile_m} and {configs[1].tile_m}"
    return None


def _why_not_persistent(config: Config) -> str | None:
    special = config.direct or config.block_tiles or config.tensor_store
    if special or config.cluster * config.split_k_warpgroups > 1:
        return "experts take persistent blocks of whole K, without clusters, direct loads or tensor stores"
    return None


def _few(problem: Problem, most: int) -> bool:
    """Whether an expert has up to ``most`` tokens on average."""
    return problem.slots <= most * problem.experts


def _by_digits(problem: Problem) -> bool:
    e2m1 = "e2m1" in (problem.gate_up.code, problem.down.code)
    most = digits.MOST_TOKENS_OF_E2M1 if e2m1 else digits.MOST_TOKENS
    return _few(problem, most) and all(digits.why_not(product) is None for product in problem.products)


def pays(problem: Problem, few: int) -> bool:
    """Whether these kernels are faster than sm90_experts_gemv, which takes ``few`` tokens at a time."""
    return problem.tokens > (1 if problem.slots >= problem.experts and _by_digits(problem) else few)


def config_for(
    product: LinearProblem, tile_m: int, row_warpgroups: int, span: int | None = None, blocks: int = 1
) -> Config:
    """A config with these tiles, ``blocks`` an SM, and as many stages as fit."""
    if span is None and product.k_blocks % 2:
        span = 1
    # The ring runs on from tile to tile: more stages than one tile's K has are of use.
    long = replace(product, k=round_up(product.k, TILE_COLUMNS) * _MOST_STAGES)
    config = sm90_packed_gemm.config_for(
        long, tile_m, row_warpgroups, span=span, unrolled=False, min_blocks_per_sm=blocks
    )
    # One set: with two, ptxas serializes the wgmmas of a tile's several widths.
    sets = 1 if tile_m >= 64 else config.register_sets
    return replace(config, prologue_stages=config.stages, register_sets=sets)


def configs(problem: Problem, tile_m: int, halves: bool = False) -> tuple[Config, Config] | None:
    """Configs of both products with these token tiles: the row tiles that take the least; None if none is legal."""
    found = []
    for product in problem.products:
        if halves:
            product = replace(product, dtype=torch.float16)
        legal = [config_for(product, tile_m, rows) for rows in _ROW_WARPGROUPS]
        legal = [config for config in legal if sm90_packed_gemm.why_not(product, config) is None]
        if not legal:
            return None
        found.append(
            min(legal, key=lambda c: -(-product.weight_tiles // c.row_warpgroups) * _step(c, product.k_blocks))
        )
    first, second = (replace(config, output=problem.products[0].output) for config in found)
    return first, second


def _step(config: Config, k_blocks: int) -> float:
    """The relative time of a tile."""
    return max(config.row_warpgroups * _width_cost(config.tile_m), 512) * (k_blocks + 4)


def _width_cost(tokens: int) -> int:
    """The relative time of a k block of 64 rows by up to ``tokens`` tokens."""
    return max(tokens, 64) + 32


def _expert_cost(problem: Problem, tile_m: int) -> float:
    """The relative time of an expert's tokens, on average over uniform routing; last tiles multiply what they have."""
    mean, cost = problem.slots / problem.experts, 0.0
    for eighth in (-1.15, -0.32, 0.32, 1.15):  # of a normal distribution
        tokens = max(1, round(mean + eighth * math.sqrt(mean)))
        tiles = -(-tokens // tile_m)
        even = min(round_up(-(-tokens // tiles), 16), tile_m)
        cost += (tiles - 1) * _width_cost(even) + _width_cost(round_up(tokens - (tiles - 1) * even, 16))
    return cost


@lru_cache(maxsize=4096)
def default(problem: Problem) -> Pair:
    """Configs of both products, by the mean tokens an expert. Raises KernelError if there are none."""
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"sm90_grouped_gemm cannot take these experts: {reason}")
    if _by_digits(problem):
        first, second = (digits.default(product, problem.slots / problem.experts) for product in problem.products)
        return first, second
    most = 128 if problem.activations.quantized else 160  # wider tiles leave fewer row tiles, and larger last ones
    tiles = sorted((tile for tile in TOKENS if tile <= most), key=lambda tile: _expert_cost(problem, tile))
    halves = problem.dtype == torch.bfloat16 and not problem.activations.quantized and _few(problem, _MOST_HALVED)
    return next(found for tile in tiles if (found := configs(problem, tile, halves)) is not None)


def kernel(config: Config, gate: Gate | None = None) -> jit.Kernel:
    """The kernel of a config. gate: of gate_up, which its epilogue joins."""
    return jit.Kernel(
        header="experts/sm90_grouped_gemm/sm90_grouped_gemm.cuh",
        entry="packed::sm90_grouped_gemm" + (f"<Gate::{gate.name}>" if gate else ""),
        config=config,
        params=sm90_packed_gemm.Params,
        threads=config.threads,
        shared_bytes=shared_bytes(config),
    )


@lru_cache(maxsize=4096)
def _room(problem: Problem, configs: Pair) -> dict[str, int]:
    """Where scratch memory has what, and its size: bytes. codes: of x.  inner_codes: of inner values."""
    p, quantized = problem, problem.activations.quantized
    tiles = route.token_tiles(p.tokens, p.top_k, p.experts, configs[0].tile_m)

    def codes(which: int, rows: int, columns: int) -> int:
        if isinstance(config := configs[which], digits.Config):
            return digits.digits_bytes(p.products[which], config, tiles)
        if _halved(p, configs):
            return 2 * rows * columns + 4 * rows
        return quantize_activations.offsets(rows, columns, p.activations, Target.bytes)[-1] if quantized else 0

    sizes = {
        "token_tile": 16 * tiles,
        "count": 4,
        "place": 4 * p.slots,
        "token": 4 * p.slots,  # of each sorted row
        "codes": codes(0, p.tokens, p.hidden),
        "sorted": 0 if isinstance(configs[0], digits.Config) else p.slots * _pitch(p, p.hidden),
        "scale": 4 * p.slots,
        "sum": 4 * p.slots,
        "inner": 2 * p.slots * p.inner,
        "inner_codes": codes(1, p.slots, p.inner),
        "rows": 2 * p.slots * p.hidden,
    }
    ends = accumulate((round_up(size, 128) for size in sizes.values()), initial=0)
    return dict(zip((*sizes, "size"), ends, strict=True))


def _halved(problem: Problem, configs: Pair) -> bool:
    return problem.dtype == torch.bfloat16 and configs[0].operand is Operand.f16


def _pitch(problem: Problem, columns: int) -> int:
    """Bytes of a sorted row."""
    return round_up(columns * (1 if problem.activations.quantized else 2), 16)


def scratch(problem: Problem, configs: Pair | None = None) -> int:
    """Bytes of scratch memory, which need not be zero."""
    return _room(problem, configs or default(problem))["size"]


def launches(problem: Problem, operands: Operands, configs: Pair | None = None) -> list[jit.Launch]:
    """The launches, in order; each may start before the one ahead ends. Unchecked: see ``why_not``."""
    call, p, o = _Call(problem, operands, configs or default(problem)), problem, operands
    if isinstance(first := call.configs[0], digits.Config):
        found = [call.route(first.tile_m, o.x, 2 * o.x_stride), *call.of_digits(0), *call.of_digits(1)]
    else:
        found = call.of_rows()
    summed = combine.Params(call.at("rows"), call.at("place"), o.weights, o.y, p.tokens, p.hidden // 8)
    return [*found, combine.launch(summed, p.top_k, p.routing, p.dtype == torch.bfloat16)]


@dataclass(frozen=True, eq=False)
class _Call:
    problem: Problem
    operands: Operands
    configs: Pair

    def at(self, name: str, offset: int = 0) -> Pointer:
        """A part of scratch memory, some bytes further on."""
        scratch, offset = self.operands.scratch, _room(self.problem, self.configs)[name] + offset
        return replace(scratch, offset=scratch.offset + offset) if isinstance(scratch, jit.Slot) else scratch[offset:]

    @property
    def tiles(self) -> tuple[Pointer, Pointer]:
        """The token tiles that routing writes, and their number."""
        return self.at("token_tile"), self.at("count")

    def side(self, which: int) -> tuple[LinearProblem, tuple[Pointer, Pointer, Pointer], Pointer, int, Gate | None]:
        """The product, weight, bias, token tiles at most, and gate of gate_up (0) or down (1)."""
        p, o = self.problem, self.operands
        most = route.token_tiles(p.tokens, p.top_k, p.experts, self.configs[which].tile_m)
        weight, bias = (o.down, o.down_bias) if which else (o.gate_up, o.gate_up_bias)
        return p.products[which], weight, bias, most, None if which else p.gate

    def route(self, tile_m: int, x: Pointer, x_stride: int, codes: Codes | None = None, vectors: int = 0) -> jit.Launch:
        """Sorting of slots. codes: of x, whose scales and sums go along.  vectors: of 16 bytes, of a row to gather."""
        p, scale, sums = self.problem, codes and codes.scale, codes and codes.sum
        params = route.Params(
            self.operands.ids, x, scale, sums, self.at("sorted"), self.at("scale"), self.at("sum"), self.at("place"),
            None if vectors else self.at("token"), *self.tiles, p.tokens, p.top_k, p.experts, vectors, x_stride // 16,
            tile_m,
        )  # fmt: skip
        return route.launch(params, p.id_words, p.device.sms)

    def of_digits(self, which: int) -> list[jit.Launch]:
        """Digits of activations, and the product."""
        p, config = self.problem, self.configs[which]
        assert isinstance(config, digits.Config)
        product, weight, bias, most, gate = self.side(which)
        if which == 0:
            x, x_stride, token = self.operands.x, self.operands.x_stride, self.at("token")
            codes, y, n = self.at("codes"), self.at("inner"), p.inner
        else:
            x, x_stride, token = self.at("inner"), p.inner, None
            codes, y, n = self.at("inner_codes"), self.at("rows"), p.hidden
        slots = digits.SlotsParams(x, token, *self.tiles, codes, product.k, product.k_blocks, x_stride)
        params = digits.GroupedParams(
            *weight, bias, codes, *self.tiles, y, p.experts, n, product.k_blocks, product.weight_tiles
        )
        return [
            digits.digitize_launch(product, config, slots, most),
            digits.launch(product, config, params, most, gate),
        ]

    def of_rows(self) -> list[jit.Launch]:
        """Sorting, and both products of sorted rows."""
        p, o, tile_m = self.problem, self.operands, self.configs[0].tile_m
        vectors, inner = _pitch(p, p.hidden) // 16, Codes(self.at("inner"), None, None, None)
        if not (p.activations.quantized or _halved(p, self.configs)):
            found = [self.route(tile_m, o.x, 2 * o.x_stride, None, vectors)]
            found.append(self.product(0, Codes(self.at("sorted"), None, None, None), self.at("inner")))
        else:
            codes, launch = self.quantize(o.x, o.x_stride, p.tokens, p.hidden, "codes")
            found = [launch, self.route(tile_m, codes.codes, _pitch(p, p.hidden), codes, vectors)]
            sums = self.at("sum") if codes.sum is not None else None
            found.append(self.product(0, Codes(self.at("sorted"), self.at("scale"), sums, None), self.at("inner")))
            inner, launch = self.quantize(self.at("inner"), p.inner, p.slots, p.inner, "inner_codes")
            found.append(launch)
        return [*found, self.product(1, inner, self.at("rows"))]

    def product(self, which: int, x: Codes, y: Pointer) -> jit.Launch:
        """gate_up or down of all slots."""
        p, config = self.problem, self.configs[which]
        assert isinstance(config, Config)
        product, weight, bias, most, gate = self.side(which)
        tiles, row_tiles = product.weight_tiles, -(-product.weight_tiles // config.row_warpgroups)
        token_tiles = 1 if p.slots <= p.experts * config.tile_m else 2  # 1: nobody reads an expert's weights again
        params = sm90_packed_gemm.Params(
            *sm90_packed_gemm.boxes(config, x.codes, p.slots, product.k, _pitch(p, product.k)), *weight, x.scale, x.sum,
            bias, y, p.slots, p.experts * tiles * TILE_ROWS, product.k_blocks, p.experts * tiles, row_tiles,
            token_tiles, 1, tiles, *self.tiles, product.n,
        )  # fmt: skip
        grid = min(p.device.sms * config.min_blocks_per_sm, row_tiles * most), 1, 1
        return jit.Launch(kernel(config, gate), params, grid, pdl=True)

    def quantize(self, x: Pointer, stride: int, m: int, k: int, name: str) -> tuple[Codes, jit.Launch]:
        """Codes of rows of x, or halves, in scratch memory."""
        p = self.problem
        if not p.activations.quantized:
            codes, scale = self.at(name), self.at(name, 2 * m * k)
            return Codes(codes, scale, None, None), halve.launch(x, stride, codes, scale, m, k)
        problem = quantize_activations.Problem(m, k, p.activations, p.dtype, target=Target.bytes, device=p.device)
        offsets = quantize_activations.offsets(m, k, p.activations, Target.bytes)
        codes, scale, sums = (self.at(name, offset) for offset in offsets[:3])
        where = Codes(codes, scale, sums if p.activations.integer else None, None)
        config = quantize_activations.default(problem)
        return where, quantize_activations.made(problem, config, where, x, stride, torch.device("cpu"))
