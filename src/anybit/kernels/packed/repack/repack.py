"""Repack a checkpoint's codes, scales, zeros and minima into packed tiles, on the GPU. Host side of repack.cuh."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.kernels.packed.packed_layout import Order
from anybit.scheme import WeightFormat

_THREADS = 128
SCALES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of scales, in the order of the device's ScaleType."""


@dataclass(frozen=True)
class Config:
    """Width of the codes; bytes: for 8-bit activations (order "a8"); float_order: see ``packed_layout.float_order``."""

    bits: int
    bytes: bool
    float_order: bool = False


def config_of(format: WeightFormat, order: Order) -> Config:
    """The config for codes of ``format`` in an order."""
    return Config(format.bits, order == "a8", format.code == "e2m1")


class Params(jit.Params, header="packed/repack/repack.cuh"):
    """Arguments of one launch."""


@dataclass(frozen=True)
class Groups:
    """Scales and zeros or minima of groups.

    size: columns of a group.  scale: float32, float16 or bfloat16 [n, groups].  zero: uint8 [n, groups] or None.
    minimum: [n, groups] in the scales' dtype, or None.
    columns: int32, the group of each ``size`` columns if they are out of order, else None.  row_scale: float32 [N'],
    written by the kernel.
    """

    size: int
    scale: Tensor
    zero: Tensor | None
    minimum: Tensor | None
    columns: Tensor | None
    row_scale: Tensor


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("packed/repack/repack.cuh", "repack", config, Params, _THREADS, 64 * (128 + 4) + 256)


def arguments(
    words: Tensor, permutation: Tensor | None, tiles: Tensor, n: int, k: int, groups: Groups | None = None
) -> Params:
    """The Params of a launch: words int32 [n, ...] -> tiles uint8 [column blocks, row tiles, bytes of a tile]."""
    size = words.shape[1], tiles.shape[1], tiles.shape[2] // 4
    if groups is None:
        return Params(words, permutation, tiles, None, None, None, None, None, n, k, *size, 0, 0, 0, 0)
    count = groups.scale.shape[1]
    spans = count if groups.columns is None else groups.columns.numel()
    kind = SCALES.index(groups.scale.dtype)
    places = groups.scale, groups.zero, groups.minimum, groups.columns, groups.row_scale
    return Params(words, permutation, tiles, *places, n, k, *size, groups.size, count, spans, kind)


def launch(
    words: Tensor, permutation: Tensor | None, tiles: Tensor, n: int, k: int, groups: Groups | None, config: Config
) -> None:
    """Write ``tiles`` and, for grouped weights, ``groups.row_scale``."""
    grid = (tiles.shape[1], tiles.shape[0], 1)
    params = arguments(words, permutation, tiles, n, k, groups)
    jit.launch(kernel(config), params, grid, device=words.get_device())
