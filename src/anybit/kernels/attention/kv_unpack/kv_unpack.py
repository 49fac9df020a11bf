"""Dequantize pages, or copy a page's worth of residual tokens, to plain K and V: the host side of ``kv_unpack.cuh``."""

from dataclasses import dataclass
from functools import cache

from anybit import jit
from anybit.device import Device
from anybit.jit import MOST_BLOCKS, Kernel
from anybit.kernels.attention.kv_page import BlockConfig, PageLayout, constants

_MOST_JOBS = MOST_BLOCKS[1]


@dataclass(frozen=True)
class Problem:
    """``jobs`` pages of ``kv_heads`` heads each.

    front, slots: residual pages per row, and tokens of each.  bf16: 16-bit tokens and the output are bfloat16, else
    float16.
    """

    layout: PageLayout
    front: int
    slots: int
    kv_heads: int
    jobs: int
    bf16: bool = False


@dataclass(frozen=True)
class Config(BlockConfig):
    """A kernel config."""

    threads: int


class Params(jit.Params, header="attention/kv_unpack/kv_unpack.cuh"):
    """The arguments of one launch."""


def default(problem: Problem) -> Config:
    """The config of a problem."""
    return Config(**constants(problem.layout, problem.bf16, problem.front, problem.slots), threads=256)


def why_not(problem: Problem, config: Config, device: Device) -> str | None:
    """Why a config cannot run a problem on a device, in a sentence; None if it can."""
    if device.capability < 80:
        return f"{device.name} is {device.arch}, and the KV cache needs sm_80 or later"
    if not 1 <= problem.jobs <= _MOST_JOBS:
        return f"1 to {_MOST_JOBS} pages are unpacked at a time, not {problem.jobs}"
    return None


def grid(problem: Problem) -> tuple[int, int, int]:
    """Blocks: (heads of K and V, pages)."""
    return (problem.kv_heads * 2, problem.jobs, 1)


@cache
def kernel(config: Config) -> Kernel:
    """The kernel of a config."""
    return Kernel("attention/kv_unpack/kv_unpack.cuh", "kv_unpack::kernel", config, Params, config.threads, 0)
