"""GPTQ's sequential rounding of channels with error feedback: the host side of gptq_update.cuh."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from anybit import jit

CHANNELS = 32
"""The most channels per launch, which a thread holds in registers."""


@dataclass(frozen=True)
class Config:
    """A kernel config. A thread takes a column of the values, that is, a row of the weight.

    channels: the most per launch, a multiple of 4.  referenced: errors are relative to ``reference``.
    masked: a given 2:4 mask zeroes codes; choosing: the kernel chooses the mask.
    """

    threads: int
    channels: int
    referenced: bool
    masked: bool = False
    choosing: bool = False


class Params(jit.Params, header="gptq/gptq_update.cuh"):
    """The arguments of one launch."""


def default(referenced: bool, masked: bool = False, choosing: bool = False) -> Config:
    """The config. Small blocks, so that small layers fill a GPU."""
    return Config(64, CHANNELS, referenced, masked, choosing)


@cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("gptq/gptq_update.cuh", "sweep", config, Params, config.threads, 4 * config.channels**2)


def arguments(
    values: Tensor,
    coupling: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: int,
    codes: Tensor,
    errors: Tensor,
    reference: Tensor | None = None,
    mask: Tensor | None = None,
    diagonal: Tensor | None = None,
) -> Params:
    """The Params of a launch: all float32, values and reference [channels, columns], at most CHANNELS channels.

    mask: bool [channels, columns], dense.  diagonal: [channels], dense, if the kernel chooses the mask.
    """
    channels, columns = values.shape
    return Params(
        values, reference, coupling, scale, zero, codes, errors, mask, diagonal,
        values.stride(0), 0 if reference is None else reference.stride(0), coupling.stride(0),
        channels, columns, float(top),
    )  # fmt: skip


def launch(params: Params, device: int) -> None:
    """Launch on the current stream. The caller checks shapes and strides."""
    choosing = params.diagonal is not None
    config = default(params.reference is not None, params.mask is not None and not choosing, choosing)
    grid = (-(-int(params.columns) // config.threads), 1, 1)
    jit.launch(kernel(config), params, grid, device=device)
