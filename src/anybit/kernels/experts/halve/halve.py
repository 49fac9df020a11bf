"""Rows of bf16 as fp16 times a power of two a row: the host side of halve.cuh."""

from dataclasses import dataclass

from anybit import jit
from anybit.jit import Pointer


@dataclass(frozen=True)
class Config:
    """A kernel config: warps of a block."""

    warps: int


class HalveParams(jit.Params, header="experts/halve/halve.cuh"):
    """The arguments of one launch."""


def launch(x: Pointer, x_stride: int, y: Pointer, scale: Pointer, rows: int, columns: int) -> jit.Launch:
    """The launch: x [rows, columns], rows x_stride values apart, to y, dense. Columns and stride: multiples of 8."""
    warps = min(8, -(-columns // 256))
    kernel = jit.Kernel("experts/halve/halve.cuh", "halve", Config(warps), HalveParams, 32 * warps, 4 * warps)
    return jit.Launch(kernel, HalveParams(x, y, scale, columns // 8, x_stride // 8), (rows, 1, 1), pdl=True)
