"""y = each token's slots' rows times their routing weights, summed in float32: the host side of combine.cuh."""

from dataclasses import dataclass

from anybit import jit
from anybit.kernels.common.types import Output


@dataclass(frozen=True)
class Config:
    """A kernel config. weight: the type of routing weights."""

    threads: int
    top_k: int
    weight: Output
    is_bf16: bool


class Params(jit.Params, header="experts/combine/combine.cuh"):
    """The arguments of one launch."""


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("experts/combine/combine.cuh", "combine_slots", config, Params, config.threads)


def launch(params: Params, top_k: int, weight: Output, is_bf16: bool) -> jit.Launch:
    """The launch: a block a token and 256 of its vectors."""
    threads = min(256, -(-params.vectors // 32) * 32)
    grid = params.tokens, -(-params.vectors // threads), 1
    return jit.Launch(kernel(Config(threads, top_k, weight, is_bf16)), params, grid, pdl=True)
