"""Norm, logits, top experts and their probabilities of each token, in one launch: the host side of router.cuh.

For many tokens only the choice, by logits that a GEMM made.
"""

from dataclasses import dataclass, field, replace

import torch

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError, sixteen_bits
from anybit.jit import Pointer

_MOST_OF_16, _WHOLE = 4, 128
"""Most clusters of 16 blocks, and the multiprocessors of a GPU whose parts have room for them; others are of eight."""
_ROWS = 16
"""Experts of an MMA."""
_CHUNK = 32
"""Values of K that a warp takes at once."""
_HELD = {256: 8, 512: 4}
"""Chunks of 16 experts that a warp keeps in registers, and tokens at a time, by threads."""


@dataclass(frozen=True)
class Problem:
    """Which ``top`` of ``experts`` rows [tokens, hidden] take. norm: rows are normed first.  aligned: to 16 bytes.

    renormalize: the probabilities of those chosen sum to 1.
    """

    tokens: int
    hidden: int
    experts: int
    top: int
    norm: bool = False
    renormalize: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))
    aligned: bool = True


@dataclass(frozen=True)
class Config:
    """A kernel config.

    cluster: blocks.  tokens: of a cluster at a time.  tiles: of 16 experts a block.  k_parts: blocks that share K.
    chunks: of a warp, of which ``resident`` stay in registers.  vectors: of 8 values of a row a thread.
    """

    threads: int
    cluster: int
    hidden: int
    tokens: int
    tiles: int
    k_parts: int
    chunks: int
    resident: int
    vectors: int
    norm: bool
    renormalize: bool
    is_bf16: bool


@dataclass(frozen=True)
class LargestConfig:
    """A config of the choice by logits. each: logits of a lane."""

    threads: int
    each: int
    renormalize: bool
    is_bf16: bool


class Params(jit.Params, header="experts/router/router.cuh"):
    """The arguments of one launch."""


def why_not(p: Problem) -> str | None:
    """Why the kernel cannot run a problem, in a sentence; None if it can."""
    if p.device.capability < 90:
        return f"clusters of blocks need sm_90, and this is {p.device.arch}"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return sixteen_bits("rows are", p.dtype)
    if not 1 <= p.top <= min(32, p.experts):
        return f"a token takes 1 to {min(32, p.experts)} of {p.experts} experts, not {p.top}"
    if p.experts > 512:
        return f"there are {p.experts} experts, and the kernel takes at most 512"
    if p.tokens < 1 or p.hidden % 8 or not p.aligned or not 8 <= p.hidden <= 16384:
        return f"rows [{p.tokens}, {p.hidden}] are not some of 8 to 16384 values, a multiple of 8, on 16 bytes"
    return None


def config_of(p: Problem) -> Config:
    """The config of a problem. Raises KernelError for one that the kernel cannot run."""
    if (reason := why_not(p)) is not None:
        raise KernelError(f"no kernel for this router: {reason}")
    few, roomy = _fitted(p, 512, 16), p.device.arch == "sm_90a" and p.device.sms >= _WHOLE
    if roomy and p.tokens <= _MOST_OF_16 * few.tokens:
        return few
    return _fitted(p, 256 if p.hidden <= 2048 else 512, 8)


def _fitted(p: Problem, threads: int, cluster: int) -> Config:
    parts = min(cluster, 1 << (-(-p.experts // _ROWS) - 1).bit_length())
    tiles, k_parts = -(-p.experts // (_ROWS * parts)), cluster // parts
    chunks = -(-p.hidden // (_CHUNK * threads // 32 * k_parts))
    vectors = 1 << (-(-p.hidden // (8 * threads)) - 1).bit_length()
    most = max(1, _HELD[threads] // (vectors * (2 if tiles > 2 else 1)))
    tokens = min(most, 1 << (p.tokens - 1).bit_length())
    return Config(
        threads, cluster, p.hidden, tokens, tiles, k_parts, chunks, max(1, _HELD[threads] // tiles), vectors, p.norm,
        p.renormalize, p.dtype == torch.bfloat16,
    )  # fmt: skip


def most_tokens(p: Problem) -> int:
    """The most tokens that all clusters take at once; with more a GEMM's logits are faster."""
    config = config_of(replace(p, tokens=64))
    return config.tokens * (p.device.sms // config.cluster)


def shared_bytes(c: Config) -> int:
    """Rows, the warps' sums of logits, sums of squares, all logits of a token, a barrier."""
    logits = c.tiles * _ROWS * 4
    return c.tokens * (2 * c.hidden + 64 + c.threads // 32 * logits + 128) + c.cluster * logits + 8


def kernel(c: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("experts/router/router.cuh", "route", c, Params, c.threads, shared_bytes(c), c.cluster)


def launch(
    p: Problem, x: Pointer, x_stride: int, weight: Pointer, ids: Pointer, weights: Pointer, residual: Pointer = None,
    gamma: Pointer = None, epsilon: float = 0.0, total: Pointer = None, y: Pointer = None,
) -> jit.Launch:  # fmt: skip
    """ids, weights [tokens, top] (int32, float32) of x [tokens, hidden]; with a norm, of y = RMSNorm(x + residual).

    total: x + residual.  weight: the router's, [experts, hidden] in x's dtype.
    Raises KernelError for a problem that the kernel cannot run.
    """
    config = config_of(p)
    clusters = min(-(-p.tokens // config.tokens), p.device.sms // config.cluster)
    params = Params(
        x, residual, gamma, weight, total, y, ids, weights, x_stride, p.tokens, p.hidden, p.experts, p.top, epsilon
    )
    return jit.Launch(kernel(config), params, (config.cluster * max(clusters, 1), 1, 1), pdl=True)


def launch_largest(p: Problem, logits: Pointer, ids: Pointer, weights: Pointer) -> jit.Launch:
    """ids, weights [tokens, top] of logits [tokens, experts]. Raises KernelError as ``launch`` does."""
    if (reason := why_not(p)) is not None:
        raise KernelError(f"no kernel for this router: {reason}")
    config = LargestConfig(256, -(-p.experts // 32), p.renormalize, p.dtype == torch.bfloat16)
    params = Params(
        logits, None, None, None, None, None, ids, weights, p.experts, p.tokens, p.hidden, p.experts, p.top, 0.0
    )
    made = jit.Kernel("experts/router/router.cuh", "take_largest", config, Params, config.threads)
    return jit.Launch(made, params, (-(-p.tokens // (config.threads // 32)), 1, 1), pdl=True)
