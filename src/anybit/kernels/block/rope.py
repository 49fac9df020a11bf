"""RoPE for Q and K of a fused QKV projection: the host side of rope.cuh."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError, sixteen_bits
from anybit.kernels.block.norm_act import paired_rows

WARP = 32
MAX_HEAD_DIM = 512
_MANY, _TOGETHER = 32768, 8
"""Heads of all tokens from which a warp turns several, waiting once for their loads, and how many."""
MOST_TOKENS = jit.MOST_BLOCKS[1]
"""Most tokens per launch: tokens are the grid's y dimension."""


@dataclass(frozen=True)
class Problem:
    """RoPE for Q and K in the output of a fused QKV projection.

    paired: channels of Q and K are in ``paired_channels`` order.  stores: K and V are stored to the 16-bit residual of
    a KV cache.
    """

    tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float16
    paired: bool = False
    stores: bool = False


@dataclass(frozen=True)
class Config:
    """A kernel config. threads: per block. heads: of a warp."""

    threads: int
    heads: int
    head_dim: int
    is_bf16: bool
    stores: bool = False
    paired: bool = False


class Params(jit.Params, header="block/rope.cuh"):
    """The arguments of one launch."""


Norms = tuple[Tensor | None, Tensor | None, float]
"""(gain [head_dim] of the norm of query heads or None, the same of key heads, epsilon)."""
NO_NORMS: Norms = (None, None, 0.0)


@dataclass(frozen=True)
class RopeStoreArgs:
    """RoPE's angles for a step's newest tokens, and the residual to store K and V to.

    cosine, sine: [m, head_dim].  ring: a layer's residual, [sequences, key_heads, 2, ring tokens * head_dim].  lengths:
    int32 [sequences], including the new tokens.  sequences: int32 [m / tokens], None for 0, 1, 2 ...  tokens: new
    tokens per sequence.
    """

    cosine: Tensor
    sine: Tensor
    ring: Tensor
    lengths: Tensor
    sequences: Tensor | None
    query_heads: int
    key_heads: int
    tokens: int

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.cosine.shape[1]

    @property
    def ring_tokens(self) -> int:
        """Slots of a sequence's ring."""
        return self.ring.shape[-1] // self.head_dim

    def operands(self) -> tuple[Tensor | int | None, ...]:
        """The fields in order, as ops take them."""
        return (
            self.cosine, self.sine, self.ring, self.lengths, self.sequences, self.query_heads, self.key_heads,
            self.tokens,
        )  # fmt: skip


def paired_channels(query_heads: int, key_heads: int, head_dim: int) -> Tensor:
    """A permutation of a QKV projection's outputs, int64, that puts channels rotated together next to each other.

    In each head of Q and K, eight channels of the first half alternate with their eight partners of the second half; V
    is unchanged.
    """
    turned = (torch.arange(query_heads + key_heads)[:, None] * head_dim + paired_rows(head_dim // 2)).flatten()
    start = len(turned)
    return torch.cat((turned, torch.arange(start, start + key_heads * head_dim)))


def why_not(problem: Problem) -> str | None:
    """Why the kernel cannot run a problem, in a sentence; None if it can."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return sixteen_bits("heads are", problem.dtype)
    step = 16 if problem.paired or problem.stores else 2
    if problem.head_dim % step or not 0 < problem.head_dim <= MAX_HEAD_DIM:
        return f"a head has a multiple of {step} channels, {MAX_HEAD_DIM} at most, not {problem.head_dim}"
    return None


def default(problem: Problem) -> Config:
    """The config: few heads per block, to spread heads over SMs; of many tokens several per warp. Raises KernelError if
    ``why_not`` refuses.
    """
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"no kernel for the rotary embedding: {reason}")
    many = problem.tokens * (problem.query_heads + problem.key_heads) >= _MANY and not problem.stores
    heads, bf16 = _TOGETHER if many else 1, problem.dtype == torch.bfloat16
    return Config(2 * WARP, heads, problem.head_dim, bf16, problem.stores, problem.paired)


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: (heads, tokens)."""
    heads = problem.query_heads + problem.key_heads * (2 if config.stores else 1)
    return -(-heads // (config.threads // WARP * config.heads)), problem.tokens, 1


@cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("block/rope.cuh", "rotate", config, Params, config.threads, 0)


def launches(problem: Problem, params: Params) -> list[jit.Launch]:
    """The launches of a problem, one per ``MOST_TOKENS`` tokens. params: of all tokens, pointers as slots of a plan.

    The caller (``anybit.ops``) checks shapes and dtypes.
    """
    each, made = params.tokens, list[jit.Launch]()
    if each > MOST_TOKENS:
        raise KernelError(f"{each} new tokens of a sequence are more than a launch stores ({MOST_TOKENS})")
    head, most = 2 * problem.head_dim, MOST_TOKENS // each * each  # whole sequences
    sizes = {
        "qkv": 2 * params.qkv_stride, "cosine": head, "sine": head, "q": problem.query_heads * head,
        "k": problem.key_heads * head,
    }  # fmt: skip
    ring = problem.key_heads * 2 * params.ring * head
    of_sequences = {"residual": ring, "lengths": 4} if params.sequences is None else {"sequences": 4}
    for first in range(0, problem.tokens, most):
        some, places = replace(problem, tokens=min(most, problem.tokens - first)), dict[str, jit.Slot]()
        for count, rows in ((first, sizes), (first // each, of_sequences)):
            for name, size in rows.items():
                if isinstance(at := getattr(params, name), jit.Slot):
                    places[name] = replace(at, offset=count * size)
        config, mine = default(some), replace(params, **places)
        made.append(jit.Launch(kernel(config), mine, grid(some, config), pdl=True))
    return made
