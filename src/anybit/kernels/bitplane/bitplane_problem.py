"""Host code shared by the bit-plane kernels: checks, config fields from the problem, and launch arguments.

Y = X W^T for W and X of 1 to 8 bits, each sym, asym or bipolar: products of unsigned bit planes plus rank-1 terms
(APT-LLM's arbitrary-precision decomposition; partial products of planes never leave the chip).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit.tensor_map import Matrix
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block.quantize_activations import Packed, Target, rows_aligned
from anybit.kernels.common.types import Code, Output
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem

ROWS = 128
"""Weights (rows of W) per tile for many tokens: two warpgroups of 64."""
WARPGROUP_ROWS = 64
"""Rows of wgmma's A operand; also of a TMA store box."""
_WGMMA_N = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MOST_WGMMA_N = _WGMMA_N[-1]
_Config = TypeVar("_Config")
_RUNTIME_BYTES = 1024
"""Shared memory that the runtime reserves per block."""


@dataclass(frozen=True)
class Facts:
    """The config fields that follow from the problem. short_sums: all integer results are below 2^22."""

    weight_bits: int
    activation_bits: int
    weight_code: Code
    activation_code: Code
    output: Output
    short_sums: bool

    @property
    def tma_rows(self) -> int:
        """Tokens per TMA store box; 0 if threads store results."""
        return 0


def facts(problem: LinearProblem) -> tuple[int, int, Code, Code, Output, bool]:
    """The fields of ``Facts``."""
    w, x = problem.weights, problem.activations
    return w.bits, x.bits, Code(w.code), Code(x.code), problem.output, problem.short_sums


def why_not(problem: LinearProblem, capability: int = 90) -> str | None:
    """Why no kernel for a minimum compute capability can run ``problem``, in a sentence; None if one might."""
    p, arch = problem, problem.device.arch
    if p.device.capability >= 100:
        return (
            f"{arch} has no 1-bit tensor cores: from sm_100 on they are emulated on the integer units, "
            "many times slower than int8"
        )
    if p.device.capability < capability:
        if capability == 90:
            return f"{arch} has no wgmma, which only sm_90a has"
        return f"{arch} has no 1-bit AND-popcount MMA, which needs sm_{capability}"
    if not p.activations.quantized:
        return "bit planes need quantized activations, and these have 16 bits"
    if p.act_order:
        return "activation order needs groups, and bit planes need one scale a row"
    if refusal := bitplane_layout.why_not(p.weights):
        return refusal
    if not p.activations.integer:
        return f"{p.activations.bits}-bit float activations have no bit planes"
    if min(p.m, p.n, p.k) < 1:
        return f"a product of M = {p.m}, N = {p.n}, K = {p.k} is empty"
    most = bitplane_layout.largest_sum(p.k, p.weights, p.activations)
    if most >= 2**31:
        bits = f"{p.weights.bits}-bit and {p.activations.bits}-bit"
        return f"sums of K = {p.k} products of {bits} codes reach {most} and overflow int32"
    return None


def why_not_config(problem: LinearProblem, config: Facts, shared_bytes: int) -> str | None:
    """Why a config does not match the problem, or needs too much shared memory, in a sentence; None if neither."""
    if (config.weight_bits, config.activation_bits) != (problem.weights.bits, problem.activations.bits):
        return "the config is for other bit-widths"
    if (config.weight_code.value, config.activation_code.value) != (problem.weights.code, problem.activations.code):
        return "the config is for other codes"
    if config.output is not problem.output:
        return f"the config writes {config.output.value}, and the problem needs {problem.output.value}"
    if config.short_sums and not problem.short_sums:
        return f"the config has short_sums, but sums over K = {problem.k} may reach 2^22"
    return problem.device.why_not_shared(shared_bytes)


class LargeFacts(Facts):
    """``Facts`` of kernels for many tokens: two consumer warpgroups, and one that loads and stores.

    Results leave through ``epilogue_stages`` buffers of ``epilogue_tile`` tokens; tma_store: by TMA.
    """

    tile_m: int
    epilogue_tile: int
    epilogue_stages: int

    tma_store = True
    threads = 384

    @property
    def tma_rows(self) -> int:
        """Tokens per TMA store box; 0 if threads store results."""
        return self.epilogue_tile if self.tma_store else 0


def why_not_epilogue(config: LargeFacts, tiles: tuple[int, ...]) -> str | None:
    """Why a config's staging of results is illegal, in a sentence; None if not. tiles: allowed epilogue_tile."""
    most = config.tile_m
    if config.epilogue_tile not in tiles or most % config.epilogue_tile:
        return f"epilogue_tile must be one of {tiles} and divide tile_m = {most}, not {config.epilogue_tile}"
    if not 2 <= config.epilogue_stages <= 8:
        return f"epilogue_stages must be 2 to 8, not {config.epilogue_stages}"
    return None


def why_not_tma(problem: LinearProblem) -> str | None:
    """Why results cannot be stored by TMA, in a sentence; None if they can."""
    if not problem.output.is_16bit:
        return f"TMA stores need 16-bit results, not {problem.output.value}"
    if problem.n % 8 or not problem.y_aligned:
        return f"TMA stores need 16-byte aligned rows of Y with N % 8 == 0, and N is {problem.n}"
    return None


def epilogue_bytes(config: LargeFacts) -> int:
    """Shared memory of a warpgroup's epilogue: 16-bit staging buffers, and per-token constants of two tiles."""
    columns = 2 * config.tile_m * (12 if config.activation_code is Code.asym else 8)
    needed = columns + 128 * config.epilogue_tile * config.epilogue_stages * config.output.is_16bit
    return -(-needed // 1024) * 1024


def of_any_size(problem: LinearProblem) -> LinearProblem:
    """The representative of all problems with the same configs, which do not depend on M and N."""
    return replace(problem, m=1, n=1, aligned=True, y_aligned=True) if min(problem.m, problem.n) >= 1 else problem


def legal(problem: LinearProblem, reason: str | None, configs: Sequence[_Config]) -> Sequence[_Config]:
    """Return ``configs``; raises KernelError if a kernel refuses the problem (``reason``), or there are none."""
    if reason is not None:
        raise KernelError(f"the kernel cannot do {problem}: {reason}")
    if not configs:
        raise KernelError(f"no config of the kernel fits {problem} on {problem.device.arch}")
    return configs


def wgmma_n(columns: int) -> int:
    """The smallest wgmma N of at least ``columns``; 0 if there is none."""
    return next((n for n in _WGMMA_N if n >= columns), 0)


def half_bytes(device: Device) -> int:
    """The most shared memory per block such that two fit an SM, such as one of the next kernel."""
    return (device.shared_bytes + _RUNTIME_BYTES) // 2 - _RUNTIME_BYTES


def blocks_per_sm(shared_bytes: int, device: Device) -> int:
    """How many blocks of ``shared_bytes`` fit an SM."""
    return (device.shared_bytes + _RUNTIME_BYTES) // (shared_bytes + _RUNTIME_BYTES)


def bytes_to_limit(blocks: int, shared_bytes: int, device: Device) -> int | None:
    """Bytes to add per block so that exactly ``blocks`` fit an SM; None if fewer fit."""
    if blocks_per_sm(shared_bytes, device) < blocks:
        return None
    most = (device.shared_bytes + _RUNTIME_BYTES) // (blocks + 1) - _RUNTIME_BYTES  # where one more would fit
    return max(0, -(-(most + 1 - shared_bytes) // 128) * 128)


class Params(jit.Params, header="bitplane/bitplane_terms.cuh"):
    """The arguments of one launch."""


def arguments(operands: Operands, problem: LinearProblem, config: Facts) -> Params:
    """The Params of a launch, unchecked. Results are stored by TMA if ``config.tma_rows``."""
    o, p, rows = operands, problem, bitplane_layout.padded_rows
    weights, scale, correction, zero = o.weight
    y_map: Matrix | bytes = bytes(128)
    if config.tma_rows:
        y_map = Matrix(o.y, 2, p.m, p.n, 2 * o.y_stride, WARPGROUP_ROWS, config.tma_rows)
    return Params(
        y_map, weights, o.x, scale, correction, zero, o.bias, o.x_scale, o.x_sum, o.x_zero, o.y,
        o.y_stride, p.m, p.n, rows(p.m), rows(p.n), p.chunks,
    )  # fmt: skip


def traits(name: str) -> Traits[Any]:
    """The traits of the kernel of this name."""
    return Traits(name, Target.planes, arguments)


def kernel(name: str, config: Facts, threads: int, shared_bytes: int, cluster: int = 1) -> jit.Kernel:
    """The kernel of a config: the template that has its header's name."""
    header = f"bitplane/{name.replace('_bitplane', '')}/{name}.cuh"
    return jit.Kernel(header, name, config, Params, threads, shared_bytes, cluster)


def product(
    x: Packed, weight: bitplane_layout.PlaneWeight, y: Tensor, bias: Tensor | None = None
) -> tuple[LinearProblem, Operands]:
    """The problem and operands of y[:] = x W^T + bias, with a float32 bias. Raises KernelError for operands that do not
    fit.
    """
    n, k = weight.shape
    if x.target is not Target.planes or x.k != k:
        raise KernelError(f"x must be {k} columns of codes in planes, and these are {x.k} in {x.target.value}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise KernelError(f"bias must be a dense float32 [{n}], not {bias.dtype} {tuple(bias.shape)}")
    adjacent = n == 1 or y.stride(-1) == 1
    if y.shape != (x.m, n) or not adjacent or y.get_device() != weight.planes.get_device():
        raise KernelError(
            f"y must be [{x.m}, {n}] on {weight.device} with adjacent columns, not {y.dtype} {tuple(y.shape)} strided "
            f"{y.stride()} on {y.device}"
        )
    y_aligned = n % 8 == 0 and rows_aligned(y)
    problem = LinearProblem(x.m, n, k, weight.format, x.format, y.dtype, Device.of(y), y_aligned=y_aligned)
    return problem, Operands(x.codes, 0, weight.pointers, y, y.stride(0), bias, x.scale, x.sum, x.zero)
