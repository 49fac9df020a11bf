"""The host side of row_sums.cuh, the example of docs/writing-kernels.md."""

from dataclasses import dataclass
from pathlib import Path

from anybit.jit import Float32, Int32, Kernel, Pointer


@dataclass(frozen=True)
class Config:
    columns_a_step: int = 64


@dataclass(frozen=True)
class Params:
    x: Pointer
    y: Pointer
    rows: Int32
    columns: Int32
    scale: Float32


def kernel(config: Config, warps: int = 4) -> Kernel:
    return Kernel(
        header=str(Path(__file__).with_suffix(".cuh")),
        entry="row_sums",
        config=config,
        params=Params,
        threads=32 * warps,
        shared_bytes=warps * config.columns_a_step * 4,
    )
