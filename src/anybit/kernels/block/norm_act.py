"""RMSNorm with residual, and SiLU(gate) * up, of 16-bit rows: the host side of norm_act.cuh."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError, sixteen_bits
from anybit.jit import Launch, Pointer

VECTOR = 8
WARP = 32
MOST_THREADS = 1024
MOST_VECTORS = 16
_REDUCTION_BYTES = 128
"""Dynamic shared memory: the partial sums of a block's warps."""


@dataclass(frozen=True)
class Problem:
    """Rows [m, k] in ``dtype``.  aligned: rows are 16-byte aligned, and k is a multiple of 8."""

    m: int
    k: int
    dtype: torch.dtype = torch.float16
    aligned: bool = True


@dataclass(frozen=True)
class Config:
    """A kernel config. threads: per block, each with ``vectors`` of 8 values. paired: see ``silu_mul``."""

    threads: int
    vectors: int
    is_bf16: bool
    aligned: bool
    paired: bool = False


class Params(jit.Params, header="block/norm_act.cuh"):
    """The arguments of one launch."""


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run ``problem``, in a sentence; None if they can."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return sixteen_bits("rows are", problem.dtype)
    if problem.m < 1 or problem.k < 1:
        return f"rows of shape {problem.m} x {problem.k} are empty"
    if problem.k > MOST_THREADS * MOST_VECTORS * VECTOR:
        return f"K = {problem.k} is more than one block holds ({MOST_THREADS * MOST_VECTORS * VECTOR})"
    return None


def norm_config(problem: Problem) -> Config:
    """The norm's config: as few vectors per thread as a block can hold the row with, for the least latency."""
    _refuse(problem)
    vectors = 1
    while MOST_THREADS * vectors * VECTOR < problem.k:
        vectors *= 2
    threads = max(WARP, 1 << (-(-problem.k // (VECTOR * vectors)) - 1).bit_length())
    return Config(threads, vectors, problem.dtype == torch.bfloat16, problem.aligned)


def paired_rows(k: int) -> Tensor:
    """A permutation of two halves of k rows, int64 [2 k], that alternates 8 rows of either."""
    return torch.arange(2 * k).view(2, k // VECTOR, VECTOR).transpose(0, 1).flatten()


def silu_config(problem: Problem, paired: bool = False) -> Config:
    """SiLU's config: small blocks, to spread a row over many SMs."""
    _refuse(problem)
    return Config(4 * WARP, 1, problem.dtype == torch.bfloat16, problem.aligned, paired)


def _refuse(problem: Problem) -> None:
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"no kernel for these rows: {reason}")


def kernel(entry: str, config: Config) -> jit.Kernel:
    """The kernel of a config. entry: ``add_rms_norm`` or ``silu_mul``."""
    return jit.Kernel("block/norm_act.cuh", entry, config, Params, config.threads, _REDUCTION_BYTES)


def add_rms_norm(
    problem: Problem, x: Pointer, x_stride: int, residual: Pointer, gamma: Pointer, epsilon: float, y: Pointer,
    total: Pointer,
) -> Launch:  # fmt: skip
    """y[:] = gamma * z / rms(z) with z = x + residual, total[:] = z; all [m, k], dense but x.

    Raises KernelError for an unsupported dtype or k.
    """
    config, stride = norm_config(problem), 0 if residual is None else problem.k
    params = Params(x, residual, total, gamma, y, x_stride, stride, problem.k, epsilon)
    return Launch(kernel("add_rms_norm", config), params, (problem.m, 1, 1), pdl=True)


def silu_mul(problem: Problem, x: Pointer, x_stride: int, y: Pointer, paired: bool = False) -> Launch:
    """y[:] = silu(gate) * up: x [m, gate k | up k] -> y [m, k] dense. paired: x alternates 8 of gate and 8 of up.

    Raises KernelError for an unsupported dtype or k.
    """
    if paired and problem.k % VECTOR:
        raise KernelError(f"gate and up have {problem.k} outputs each, and paired ones need a multiple of {VECTOR}")
    config = silu_config(problem, paired)
    params = Params(x, None, None, None, y, x_stride, 0, problem.k, 0.0)
    grid = problem.m, -(-problem.k // (config.threads * VECTOR)), 1
    return Launch(kernel("silu_mul", config), params, grid, pdl=True)
