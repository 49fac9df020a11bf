"""The Hadamard transform in one launch: the host side of hadamard.cuh."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit import jit
from anybit.codes import hadamard
from anybit.device import Device
from anybit.errors import KernelError, dtype_name

# Larger orders of the dense factor are better left to a GEMM.
MOST_ORDER = 64
# A vector must fit shared memory.
MOST_SIZE = 32768
# Rows of the dense factor whose sums a thread holds: ``rotation::parts_of``.
_MOST_ROWS = 16


@dataclass(frozen=True)
class Problem:
    """Vectors [rows, k] of a 16-bit type. device: None for one with enough shared memory."""

    rows: int
    k: int
    dtype: torch.dtype = torch.float16
    device: Device | None = None


@dataclass(frozen=True)
class Config:
    """A kernel config, a block per vector. order, power: of the matrix's two factors (``codes.hadamard``)."""

    threads: int
    order: int
    power: int
    is_bf16: bool


class Params(jit.Params, header="block/hadamard.cuh"):
    """The arguments of one launch."""


def why_not(problem: Problem) -> str | None:
    """Why the kernel cannot run a problem, in a sentence; None if it can."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"vectors must be float16 or bfloat16, not {dtype_name(problem.dtype)}"
    if problem.k > MOST_SIZE:
        return f"{problem.k} values are more than a block holds ({MOST_SIZE})"
    order, power = hadamard.factor(problem.k)
    if order > MOST_ORDER:
        return f"the kernel takes dense factors up to order {MOST_ORDER}, and this size has one of {order}: use torch"
    return None if problem.device is None else problem.device.why_not_shared(shared_bytes(order, power))


@cache
def default(problem: Problem) -> Config:
    """The config: about four values per thread, up to 1024 threads. Raises KernelError if ``why_not`` refuses."""
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"no kernel for the Hadamard transform: {reason}")
    order, power = hadamard.factor(problem.k)
    threads = min(max(32, 1 << (problem.k // 4).bit_length()), 1024)
    return Config(threads, order, power, problem.dtype == torch.bfloat16)


@cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel(
        "block/hadamard.cuh", "transform", config, Params, config.threads, shared_bytes(config.order, config.power)
    )


def _parts(order: int) -> int:
    """Number of parts into which a matrix's rows are cut: ``rotation::parts_of``."""
    return next(parts for parts in range(1, order + 1) if order % parts == 0 and order // parts <= _MOST_ROWS)


@cache
def signs(order: int, device: torch.device) -> Tensor | None:
    """The sign bits of the dense factor A as rotation.cuh reads them, int32 [order, parts]; None for order 1.

    Bit r of (b, part) is set if A[part * rows + r, b] is -1.
    """
    if order == 1:
        return None
    parts = _parts(order)
    negative = (hadamard.signs(order).T < 0).reshape(order, parts, order // parts).int()
    return (negative << torch.arange(order // parts)).sum(-1, dtype=torch.int32).to(device)


def shared_bytes(order: int, power: int) -> int:
    """Shared memory of a vector, with runs of 64 padded against bank conflicts, and of A's entries; 0 for order 0."""
    k = order * power
    rows = 0 if order < 2 else -(-order // _parts(order) // 4) * 4
    return 4 * (k + k // 64 * 8 + (order * _parts(order) * rows if order > 1 else 0))


def arguments(x: Tensor, y: Tensor, config: Config) -> Params:
    """The Params of a launch: x [rows, k] of a 16-bit type, rows contiguous; y dense."""
    return Params(x, signs(config.order, x.device), y, x.stride(0), float(x.shape[1]) ** -0.5)


def transform(x: Tensor) -> Tensor:
    """H x for x [..., k] of a 16-bit type on a GPU, in one launch on the current stream."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        config = default(Problem(1, rows.shape[1], x.dtype))
        jit.launch(kernel(config), arguments(rows, y, config), (len(rows), 1, 1), device=x.get_device())
    return y.view(x.shape)
