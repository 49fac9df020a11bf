"""Channels rounded one after the other with error feedback: the host side of gptq_update.cuh."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from anybit import jit
from anybit.jit import Float32, Int32, Int64, Pointer

CHANNELS = 32
"""The most channels of one launch: what a thread holds in registers."""


@dataclass(frozen=True)
class Config:
    """A thread a column of the values, that is, a row of the weight.

    channels: the most that a launch walks.  referenced: errors are measured from ``reference``.
    """

    threads: int
    channels: int
    referenced: bool


@dataclass(frozen=True)
class Params:
    """Arguments of one launch; see gptq_update.cuh."""

    values: Pointer
    reference: Pointer
    coupling: Pointer
    scale: Pointer
    zero: Pointer
    codes: Pointer
    errors: Pointer
    value_stride: Int64
    reference_stride: Int64
    coupling_stride: Int64
    channels: Int32
    columns: Int32
    top: Float32


def default(referenced: bool) -> Config:
    """Small blocks: a small layer has too few rows to fill a GPU otherwise."""
    return Config(64, CHANNELS, referenced)


@cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel to compile."""
    return jit.Kernel("quantization/gptq_update.cuh", "sweep", config, Params, config.threads, 4 * config.channels**2)


def arguments(
    values: Tensor,
    coupling: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: int,
    codes: Tensor,
    errors: Tensor,
    reference: Tensor | None = None,
) -> Params:
    """Parameters of a launch: float32 all, values and reference [channels, columns], channels at most CHANNELS."""
    channels, columns = values.shape
    return Params(
        values, reference, coupling, scale, zero, codes, errors,
        values.stride(0), 0 if reference is None else reference.stride(0), coupling.stride(0),
        channels, columns, float(top),
    )  # fmt: skip


def launch(params: Params, device: int) -> None:
    """Launch on the current stream. Shapes and strides are the caller's to check."""
    config = default(params.reference is not None)
    grid = (-(-int(params.columns) // config.threads), 1, 1)
    jit.launch(kernel(config), params, grid, device=device)
