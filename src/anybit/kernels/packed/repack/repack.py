"""Repack a checkpoint's codes, scales, zeros and minima into packed tiles, on the GPU. Host side of repack.cuh."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.codes.packing import QuantizedWeight
from anybit.kernels.packed.packed_layout import Order
from anybit.scheme import WeightFormat

_THREADS = 128
_SCALES = (torch.float32, torch.float16, torch.bfloat16)
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


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("packed/repack/repack.cuh", "repack", config, Params, _THREADS, 64 * (128 + 4) + 256)


def arguments(
    weight: QuantizedWeight, permutation: Tensor | None, columns: Tensor | None, tiles: Tensor, row_scale: Tensor
) -> Params:
    """The Params of a launch that writes tiles uint8 [column blocks, row tiles, bytes of a tile] and, of weights in
    groups, row_scale float32 [N'].

    permutation: int32 [K'] or None.  columns: int32, the group of each ``group`` columns if they are out of order.
    """
    w, group, words = weight, weight.format.group, weight.words.contiguous()
    sizes = *w.shape, words.shape[1], tiles.shape[1], tiles.shape[2] // 4
    if group is None:
        return Params(words, permutation, tiles, None, None, None, None, None, *sizes, 0, 0, 0, 0)
    scale = (w.scale if w.scale.dtype in _SCALES else w.scale.float()).contiguous()
    zero = None if w.zero is None else w.zero.contiguous()
    minimum = None if w.minimum is None else w.minimum.to(scale.dtype).contiguous()
    spans = scale.shape[1] if columns is None else columns.numel()
    kind = _SCALES.index(scale.dtype)
    return Params(
        words, permutation, tiles, scale, zero, minimum, columns, row_scale, *sizes, group, scale.shape[1], spans, kind
    )


def launch(
    weight: QuantizedWeight, permutation: Tensor | None, columns: Tensor | None, tiles: Tensor, row_scale: Tensor,
    order: Order,
) -> None:  # fmt: skip
    """Write tiles and, of weights in groups, row_scale: see ``arguments``."""
    params, made = arguments(weight, permutation, columns, tiles, row_scale), kernel(config_of(weight.format, order))
    jit.launch(made, params, (tiles.shape[1], tiles.shape[0], 1), device=tiles.get_device())
