"""Bit-plane products through mma.sync, for sm_80 to sm_90. Host side of sm80_bitplane_gemm.cuh."""

import functools
from dataclasses import dataclass

from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.common.types import Code
from anybit.kernels.elementwise.quantize_activations import Packed, rows_aligned
from anybit.kernels.gemm import bitplane_layout
from anybit.kernels.gemm.sm90_bitplane import (
    Output,
    Params,
    arguments,
    output_of,
)
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

_ALIGNED = 8


@dataclass(frozen=True)
class Problem:
    """Y[m, n] = X[m, k] W[n, k]^T for operands in bit planes. ``aligned``: rows of Y start on 16 bytes, n in eights."""

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat
    output: Output
    device: Device
    aligned: bool = True


@dataclass(frozen=True)
class Config:
    """How: a block's tile of weights (n) and tokens (m), its warps along each and along k, and its ring of stages."""

    weight_bits: int
    activation_bits: int
    weight_code: Code
    activation_code: Code
    output: Output
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
        """Threads a block."""
        return 32 * self.warps_n * self.warps_m * self.warps_k


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot do ``problem``, in a sentence; None if it can.

    The paper's constraint (section V): the tile is what the warps cover, each with whole 16 x 8 products of 256 bits,
    and shared memory holds every plane of a stage, ``stages`` times.
    """
    asked = (problem.m, problem.n, problem.k, problem.weights, problem.activations, problem.device)
    reason = bitplane_layout.why_not_product(*asked, first=80)
    if reason is not None:
        return reason
    return None if config is None else _why_not_config(problem, config)


def _why_not_config(problem: Problem, config: Config) -> str | None:
    if (config.weight_bits, config.activation_bits) != (problem.weights.bits, problem.activations.bits):
        return "the config is for other widths"
    if config.tile_n % (16 * config.warps_n):
        return f"{config.tile_n} weight rows are not shared out by {config.warps_n} warps in sixteens"
    if config.tile_m % (8 * config.warps_m):
        return f"{config.tile_m} tokens are not shared out by {config.warps_m} warps in eights"
    if bitplane_layout.CHUNK % config.stage_k or config.stage_k % (256 * config.warps_k):
        return f"a stage of {config.stage_k} columns does not divide 1024, or not into 256s for {config.warps_k} warps"
    if config.threads > 1024 or config.threads * 128 // config.stage_k % 8:
        return f"{config.threads} threads do not copy rows of {config.stage_k} bits in eights"
    if config.stages < 2:
        return "copying ahead needs at least 2 stages"
    accumulators = config.tile_n * config.tile_m // (32 * config.warps_n * config.warps_m)
    if accumulators > 128:
        return f"{accumulators} sums a thread are more than the registers hold beside the operands (128)"
    if config.aligned and not problem.aligned:
        return (
            "rows of Y do not start on 16 bytes or N is not a multiple of 8, and this config writes 16 bytes at a time"
        )
    needed = shared_bytes(config)
    if needed > problem.device.shared_bytes:
        return f"{needed} bytes of shared memory are more than a block of {problem.device.arch} has"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: every plane of a stage, ``stages`` times; the sums of the tile afterwards."""
    stage = (config.weight_bits * config.tile_n + config.activation_bits * config.tile_m) * config.stage_k // 8
    return max(config.stages * stage, 4 * config.tile_m * (config.tile_n + 4))


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """A block for each tile of Y, in one row."""
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
def configs(problem: Problem) -> tuple[Config, ...]:
    """Every legal config: the tiles above, stages of 256 to 1024 columns, as many as fit (at most 4)."""
    found = []
    for tile_n, tile_m, warps_n, warps_m, warps_k in _TILES:
        for stage_k in (1024, 512, 256):
            for stages in (2, 3, 4):
                config = Config(
                    problem.weights.bits,
                    problem.activations.bits,
                    Code(problem.weights.code),
                    Code(problem.activations.code),
                    problem.output,
                    problem.aligned,
                    tile_n,
                    tile_m,
                    warps_n,
                    warps_m,
                    warps_k,
                    stage_k,
                    stages,
                )
                if why_not(problem, config) is None:
                    found.append(config)
    return tuple(found)


@functools.cache
def default(problem: Problem) -> Config:
    """The largest tile that still gives every multiprocessor a block, then long stages, then many of them.

    A tile of more tokens than there are reads and multiplies padding, so M bounds it first.
    """
    reason = why_not(problem)
    if reason is not None:
        raise KernelError(f"no mma.sync kernel for {_text(problem)}: {reason}")
    found = configs(problem)
    if not found:
        raise KernelError(f"no mma.sync config fits {_text(problem)} on {problem.device.arch}")
    fitting = [c for c in found if c.tile_m < 2 * max(problem.m, 8)] or list(found)

    def cost(config: Config) -> tuple[float, int, int]:
        blocks = grid(problem, config)[0]
        waves = -(-blocks // problem.device.sms)
        work = config.tile_n * config.tile_m + 32 * (config.tile_n + config.tile_m)  # products, and reading operands
        two_blocks = 2 * shared_bytes(config) <= problem.device.shared_bytes
        return (waves * work, -two_blocks, -config.stage_k * config.stages)

    return min(fitting, key=cost)


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel to compile."""
    return jit.Kernel(
        "gemm/sm80_bitplane_gemm.cuh", "sm80_bitplane_gemm_kernel", config, Params, config.threads, shared_bytes(config)
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
    """Y = X W^T: coded activations [m, k] in planes times prepared weights -> y [m, n] on the current stream."""
    n, y = weight.shape[0], output_of(x, weight, output, bias, y)
    aligned = n % _ALIGNED == 0 and rows_aligned(y)
    problem = Problem(x.m, n, x.k, weight.format, x.format, output, Device.of(y), aligned)
    config = config or default(problem)
    params = arguments(x, weight, y, bias)
    jit.launch(kernel(config), params, grid(problem, config), pdl=pdl, device=y.get_device())
    return y


def _text(problem: Problem) -> str:
    return f"{problem.m} x {problem.n} x {problem.k} in {Scheme(problem.weights, problem.activations)}"
