"""Rows of bf16 as fp16 times a power of two a row: the host side of halve.cuh."""

from dataclasses import dataclass

from anybit.jit import Int32, Kernel, Launch, Pointer


@dataclass(frozen=True)
class Config:
    """A kernel config: warps of a block."""

    warps: int


@dataclass(frozen=True)
class HalveParams:
    """The arguments of one launch; see the struct of the same name."""

    x: Pointer
    y: Pointer
    scale: Pointer
    vectors: Int32
    x_stride: Int32


def launch(x: Pointer, x_stride: int, y: Pointer, scale: Pointer, rows: int, columns: int) -> Launch:
    """The launch: x [rows, columns], rows x_stride values apart, to y, dense. Columns and stride: multiples of 8."""
    warps = min(8, -(-columns // 256))
    kernel = Kernel("experts/halve/halve.cuh", "halve", Config(warps), HalveParams, 32 * warps, 4 * warps)
    return Launch(kernel, HalveParams(x, y, scale, columns // 8, x_stride // 8), (rows, 1, 1), pdl=True)
