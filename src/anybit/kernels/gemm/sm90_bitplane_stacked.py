"""Large tiles of the bitwise GEMM whose tokens' planes stand side by side. Host side of sm90_bitplane_stacked.cuh.

Beside sm90_bitplane.py, whose problems,
parameters and layout it shares: the sums of a tile leave most of their registers
when the tile ends, so that its results are written while the next one's products run.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import tensor_map
from anybit.kernels.common.types import Code, Output
from anybit.kernels.elementwise.quantize_activations import Packed
from anybit.kernels.gemm import bitplane_layout, sm90_bitplane
from anybit.kernels.gemm.sm90_bitplane import Params
from anybit.kernels.gemm.sm90_bitplane_rules import (
    ROWS,
    SMALL_ROWS,
    Problem,
    short_sums,
    why_not_facts,
)
from anybit.scheme import Scheme


class Keep(Enum):
    """What stays in shared memory from one tile of a block to the next."""

    nothing = "nothing"
    weights = "weights"
    tokens = "tokens"


@dataclass(frozen=True)
class Config:
    """How: tiles of 128 weights x ``tokens``, all planes of these side by side.

    ``weight_slots`` planes of weights and ``token_slots`` chunks of k of the tokens' planes are in shared memory;
    either may stay for all tiles of a block that share it (``keep``). ``early`` planes of weights are asked for before
    the kernel ahead has ended. The second warpgroup begins ``lag`` chunks behind the first. ``slab`` tokens of results
    are staged at once, in one of ``buffers``. ``short_sums``: no V reaches 2^22.
    """

    weight_bits: int
    activation_bits: int
    weight_code: Code
    activation_code: Code
    output: Output
    short_sums: bool
    tokens: int
    weight_slots: int
    token_slots: int
    keep: Keep = Keep.nothing
    early: int = 1
    lag: int = 0
    slab: int = 32
    buffers: int = 3

    @property
    def threads(self) -> int:
        """Threads a block: two warpgroups that multiply, and one of which a thread loads, and two store."""
        return 384


_PLANES = 2
"""Planes side by side: with one nothing is added up, and sums of two tiles at once leave only narrow products; four
were slower than their rotation (docs/notes/2026-11-23-bit-planes.md)."""
_FEW = 64
"""To so many tokens tiles are for few: those of 128 tokens would be half empty."""


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot do ``problem``, in a sentence; None if it can."""
    asked = (problem.m, problem.n, problem.k, problem.weights, problem.activations, problem.device)
    reason = bitplane_layout.why_not_product(*asked, first=90)
    if reason is not None:
        return reason
    if problem.output not in (Output.f16, Output.bf16):
        return f"results leave by tensor map, 16 bits each, and {problem.output.value} is asked for"
    if problem.n % 8:
        return f"tensor maps store whole sixteen bytes, and rows of {problem.n} results end within them"
    if problem.m <= _FEW:
        return f"its tiles are for more than {_FEW} tokens, and {problem.m} would leave them half empty"
    if problem.activations.bits != _PLANES:
        return f"planes of {_PLANES}-bit activations stand side by side, not of {problem.activations.bits}-bit ones"
    return None if config is None else _why_not_config(problem, config)


def _why_not_config(problem: Problem, config: Config) -> str | None:
    p, chunks = config.weight_bits, bitplane_layout.chunks(problem.k)
    reason = why_not_facts(problem, config)
    if reason is not None:
        return reason
    if config.slab not in (32, 64) or config.tokens % config.slab:
        return f"32 or 64 tokens are staged at once, and a tile of {config.tokens} is not made of {config.slab}"
    if not 2 <= config.buffers <= 8:
        return f"results are staged in 2 to 8 buffers, not {config.buffers}"
    if config.tokens not in (64, 128):
        return f"two planes of 64 or 128 tokens are the columns of a product, not of {config.tokens}"
    if config.weight_slots < 2 or config.token_slots < 2:
        return "loading ahead needs two slots of weights and of tokens"
    if not 0 <= config.early <= config.weight_slots:
        return f"{config.weight_slots} slots do not hold {config.early} early planes of weights"
    if config.lag < 0 or config.lag >= config.token_slots or config.lag * p >= config.weight_slots:
        slots = f"{config.weight_slots} slots of weights and {config.token_slots} of tokens"
        return f"a warpgroup {config.lag} chunks behind holds all {slots}"
    if config.keep is Keep.weights and config.weight_slots != chunks * p:
        return f"weights that stay are {chunks * p} planes, and the config holds {config.weight_slots}"
    if config.keep is Keep.tokens and config.token_slots != chunks:
        return f"tokens that stay are all {chunks} chunks of k, and the config holds {config.token_slots}"
    needed, room = shared_bytes(config), problem.device.shared_bytes
    return None if needed <= room else f"{needed} bytes of shared memory are more than the {room} of a block"


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block."""
    columns = 2 * config.tokens * (12 if config.activation_code is Code.asym else 8)
    writer = -(-(128 * config.slab * config.buffers + columns) // 1024) * 1024
    rows = config.weight_slots * ROWS + config.token_slots * config.activation_bits * config.tokens
    return (
        rows * bitplane_layout.ROW_BYTES
        + 2 * writer
        + 16 * (config.weight_slots + config.token_slots + 2 * config.buffers)
    )


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """As few blocks as end no later: each has as many tiles as the next, or one less."""
    tiles = -(-problem.m // config.tokens) * -(-problem.n // ROWS)
    return (-(-tiles // -(-tiles // problem.device.sms)), 1, 1)


def _candidates(problem: Problem) -> Iterator[Config]:
    p, q, chunks = problem.weights.bits, problem.activations.bits, bitplane_layout.chunks(problem.k)
    same = (p, q, Code(problem.weights.code), Code(problem.activations.code), problem.output, short_sums(problem))
    staging, ring = ((32, 3), (32, 4), (32, 5), (64, 2)), (2, 3, 4, 6, 8)
    for tokens, (slab, buffers), lag in itertools.product((128, 64), staging, (0, 1, 2)):
        for slots, stages in itertools.product(ring, ring):
            yield Config(*same, tokens, slots, stages, Keep.nothing, 1, lag, slab, buffers)
        for slots in ring:
            yield Config(*same, tokens, slots, chunks, Keep.tokens, 1, lag, slab, buffers)
            yield Config(*same, tokens, chunks * p, slots, Keep.weights, 1, lag, slab, buffers)


@functools.cache
def configs(problem: Problem) -> tuple[Config, ...]:
    """Every legal config of a problem."""
    found = dict.fromkeys(_candidates(problem)) if why_not(problem) is None else {}
    return tuple(config for config in found if why_not(problem, config) is None)


@functools.cache
def default(problem: Problem) -> Config:
    """A good config, measured on an H200 (docs/notes/2026-11-23-bit-planes.md); KernelError where there is none."""
    text = f"{problem.m} x {problem.n} x {problem.k} in {Scheme(problem.weights, problem.activations)}"
    reason = why_not(problem)
    if reason is not None:
        raise KernelError(f"no wgmma kernel of planes side by side for {text}: {reason}")
    found = configs(problem)
    if not found:
        raise KernelError(f"no config of planes side by side fits {text} on {problem.device.arch}")

    def cost(config: Config) -> tuple[int, ...]:
        keeps = (Keep.tokens, Keep.weights, Keep.nothing).index(config.keep)
        ring = -min(config.weight_slots, 4), -min(config.token_slots, 4)
        return -config.tokens, keeps, *ring, config.lag, config.slab, abs(config.buffers - 3)

    return min(found, key=cost)


def seeds(problem: Problem) -> list[Config]:
    """What a search starts from: the default, the same with a lag, and the best that keeps nothing."""
    own = default(problem)
    others = [replace(own, lag=1), replace(own, keep=Keep.nothing, token_slots=min(own.token_slots, 4))]
    return list(dict.fromkeys([own, *(config for config in others if why_not(problem, config) is None)]))


_PREFERRED_CHUNKS = 4
"""Chunks of k whose tokens stay in shared memory: K = 4096 was measured. Where they do not fit (K = 14336) these tiles
were 0.5 % faster, which is not enough to say so."""


def preferred(problem: Problem) -> bool:
    """Whether, as far as was measured on an H200, these tiles are faster than those of sm90_bitplane.py.

    3 to 13 % with 1-bit and 2-bit weights, where most blocks have two tiles or more; with 3-bit and 4-bit ones they
    were 6 to 11 % slower.
    """
    p, tiles = problem.weights.bits, -(-problem.m // ROWS) * -(-problem.n // ROWS)
    return p <= 2 and bitplane_layout.chunks(problem.k) == _PREFERRED_CHUNKS and tiles > problem.device.sms


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel to compile."""
    return jit.Kernel(
        "gemm/sm90_bitplane_stacked.cuh", "sm90_bitplane_stacked", config, Params, config.threads, shared_bytes(config)
    )


def multiply(
    x: Packed,
    weight: bitplane_layout.PlaneWeight,
    output: Output,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """Y = X W^T + bias on the current stream, as ``bitwise.multiply``; rows of ``y`` start on 16 bytes."""
    n, y = weight.shape[0], sm90_bitplane.output_of(x, weight, output, bias, y)
    if y.stride(0) % 8 or y.data_ptr() % 16:
        raise KernelError(
            f"y has rows {y.stride(0)} elements apart from address {y.data_ptr():#x}, and tensor maps store rows that "
            "start on 16 bytes: give y such rows, or take bitwise.multiply"
        )
    problem = Problem(x.m, n, x.k, weight.format, x.format, output, Device.of(y))
    config = config or default(problem)
    params = sm90_bitplane.arguments(x, weight, y, bias, tensor_map.encode(y, SMALL_ROWS, config.slab))
    jit.launch(kernel(config), params, grid(problem, config), pdl=pdl, device=y.get_device())
    return y
