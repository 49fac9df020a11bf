"""Dequantize rows of packed tiles to 16-bit floats, as an embedding does. Host side of packed_rows.cuh."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError, dtype_name, sixteen_bits
from anybit.kernels.common.types import Code, Output
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.scheme import WeightFormat

_THREADS = 128


@dataclass(frozen=True)
class Config:
    """The tiles' format, and the output type."""

    bits: int
    group: int
    code: Code
    output: Output


class Params(jit.Params, header="packed/rows/packed_rows.cuh"):
    """Arguments of one launch."""


def why_not(format: WeightFormat, dtype: torch.dtype) -> str | None:
    """Why no kernel dequantizes rows of a format to a dtype, in a sentence; None if one does."""
    if format.sparse:
        return "rows of 2:4 sparse weights cannot be dequantized one by one"
    if dtype not in (torch.float16, torch.bfloat16):
        return sixteen_bits("rows become", dtype)
    return None


def config_of(format: WeightFormat, dtype: torch.dtype) -> Config:
    """The config of a format. Raises KernelError with the reason of ``why_not``."""
    if reason := why_not(format, dtype):
        raise KernelError(reason)
    return Config(format.bits, packed_layout.tile_group(format), Code[format.code], Output(dtype_name(dtype)))


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("packed/rows/packed_rows.cuh", "packed_rows", config, Params, _THREADS, 0)


def grid(weight: PackedWeight, count: int) -> tuple[int, int, int]:
    """A warp per 128 columns of each row."""
    return count, -(-weight.tiles.shape[0] * 32 // _THREADS), 1


def arguments(weight: PackedWeight, ids: Tensor, y: Tensor) -> Params:
    """The Params of a launch: ids int64 [count] -> y float16 or bfloat16 [count, k], both dense."""
    blocks, row_tiles = weight.tiles.shape[:2]
    where = weight.tiles, weight.row_scale, weight.row_zero, weight.permutation
    return Params(ids, *where, y, *weight.shape, row_tiles, blocks)


def launch(weight: PackedWeight, ids: Tensor, y: Tensor) -> None:
    """y[i] = row ids[i] of the weights; NaN if there is no such row. Tiles in order "a16"."""
    if weight.order != "a16":
        raise KernelError(f"rows are read from tiles of order a16, not {weight.order}: use a16 activations")
    config = config_of(weight.format, y.dtype)
    jit.launch(kernel(config), arguments(weight, ids, y), grid(weight, len(ids)), device=ids.get_device())
