"""The host side of row_sums.cuh, the example of docs/writing-kernels.md."""

from dataclasses import dataclass
from pathlib import Path

from anybit import jit

HEADER = str(Path(__file__).with_suffix(".cuh"))


@dataclass(frozen=True)
class Config:
    columns_a_step: int = 64


class Params(jit.Params, header=HEADER):
    """In the order of the header's struct."""


def kernel(config: Config, warps: int = 4) -> jit.Kernel:
    return jit.Kernel(
        header=HEADER,
        entry="row_sums",
        config=config,
        params=Params,
        threads=32 * warps,
        shared_bytes=warps * config.columns_a_step * 4,
    )
