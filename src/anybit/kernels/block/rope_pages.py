"""RoPE that stores K and V into a paged 16-bit cache: the host side of rope_pages.cuh."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError
from anybit.kernels.block import rope
from anybit.kernels.block.rope import Problem as Problem

HEAD_DIMS = (64, 128, 256)
_CHANNELS = 16
"""Per thread."""


@dataclass(frozen=True)
class Config:
    """A kernel config. threads: per block; the rest follows from the problem."""

    threads: int
    head_dim: int
    is_bf16: bool
    paired: bool


class Params(jit.Params, header="block/rope_pages.cuh"):
    """The arguments of one launch."""


@dataclass(frozen=True)
class RopePagesArgs:
    """RoPE's table and positions for a step's tokens, and the pages to store K and V to.

    table: [positions, head_dim], cosines for half a head, then sines.  positions: int64 [m].  keys, values: [pages,
    page tokens, key heads, head_dim], with equal strides; None to store nothing.  slots: int64 [up to m], page * page
    tokens + token in the page; negative: not stored.
    """

    table: Tensor
    positions: Tensor
    keys: Tensor | None
    values: Tensor | None
    slots: Tensor | None
    query_heads: int
    key_heads: int

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.table.shape[1]

    def params(self) -> dict[str, Any]:
        """The fields that kernels' Params share, by name."""
        keys = self.keys
        page_stride, token_stride, head_stride = (0, 0, 0) if keys is None else keys.stride()[:3]
        return {
            "table": self.table, "positions": self.positions, "slots": self.slots, "keys": keys, "values": self.values,
            "page_stride": page_stride, "token_stride": token_stride, "head_stride": head_stride,
            "query_heads": self.query_heads, "key_heads": self.key_heads, "head_dim": self.head_dim,
            "page_tokens": 1 if keys is None else keys.shape[1], "stored": 0 if self.slots is None else len(self.slots),
        }  # fmt: skip


def why_not(problem: Problem) -> str | None:
    """Why the kernel cannot run a problem, in a sentence; None if it can."""
    if problem.head_dim not in HEAD_DIMS:
        return f"a head has one of {HEAD_DIMS} channels, not {problem.head_dim}"
    if _threads(problem) >= 2**31 - 256:
        return f"{problem.tokens} tokens need more threads than a launch can have (2^31): pass fewer at a time"
    return rope.why_not(problem)


def default(problem: Problem) -> Config:
    """The config: small blocks for few tokens, to spread heads over SMs. Raises KernelError if ``why_not`` refuses."""
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"no kernel for the rotary embedding into pages: {reason}")
    threads = 32 if problem.tokens <= 16 else 256
    return Config(threads, problem.head_dim, problem.dtype == torch.bfloat16, problem.paired)


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """A thread per 16 channels of all heads of all tokens."""
    return -(-_threads(problem) // config.threads), 1, 1


def _threads(problem: Problem) -> int:
    heads = problem.query_heads + 2 * problem.key_heads
    return problem.tokens * heads * (problem.head_dim // _CHANNELS)


@cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("block/rope_pages.cuh", "rotate_pages", config, Params, config.threads, 0)


def arguments(
    step: RopePagesArgs, qkv: Tensor, q: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, epsilon: float
) -> Params:
    """The Params of a launch, unchecked."""
    shared = step.params()
    del shared["head_dim"]
    return Params(
        qkv=qkv, q=q, q_gamma=q_gamma, k_gamma=k_gamma, qkv_stride=qkv.stride(0), tokens=len(qkv), epsilon=epsilon,
        **shared,
    )  # fmt: skip
