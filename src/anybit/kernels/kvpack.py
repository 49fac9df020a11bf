"""Storing new K and V: the host side of ``kvpack.cuh``.

A step of few tokens is one launch: they go to the residual, and a window that they complete is quantized and packed. A
prompt is two, because its newest tokens would overwrite residual slots that its first window still needs.
"""

from dataclasses import dataclass
from functools import cache

from anybit.device import Device
from anybit.jit import Int32, Int64, Kernel, Pointer
from anybit.kernels.decode import residual_tokens
from anybit.kernels.kvpage import PageLayout

_THREADS = 256


@dataclass(frozen=True)
class Problem:
    """``tokens`` new tokens for each of ``batch`` sequences.  ring, window: of the residual.  bf16: else float16."""

    layout: PageLayout
    batch: int
    kv_heads: int
    tokens: int
    ring: int = 160
    window: int = 128
    bf16: bool = False

    @property
    def step(self) -> bool:
        """Whether the tokens are so few that no slot of the residual is both read and overwritten."""
        return self.tokens <= self.ring - self.window + 1


@dataclass(frozen=True)
class Config:
    """How: the constants of one compiled kernel, named as in ``decode.Config``."""

    key_bits: int
    value_bits: int
    by_channel: bool
    chunk: int
    channel_group: int
    block: int
    page: int
    head_dim: int
    bf16: bool
    residual_tokens: int
    query_tiles: int
    threads: int


@dataclass(frozen=True)
class Params:
    """The twin of ``kvpack::Params``."""

    k: Pointer
    v: Pointer
    pages: Pointer
    residual: Pointer
    table: Pointer
    lengths: Pointer
    sequences: Pointer
    k_batch_stride: Int64
    v_batch_stride: Int64
    k_token_stride: Int32
    k_head_stride: Int32
    v_token_stride: Int32
    v_head_stride: Int32
    tokens: Int32
    kv_heads: Int32
    table_width: Int32
    ring: Int32
    window: Int32
    packs: Int32
    keeps: Int32
    stored: Int32 = 0


def default(problem: Problem, threads: int = _THREADS) -> Config:
    """The config of a problem; there is little to choose."""
    layout, format = problem.layout, problem.layout.format
    return Config(
        key_bits=format.key_bits,
        value_bits=format.value_bits,
        by_channel=layout.by_channel,
        chunk=layout.chunk,
        channel_group=layout.channel_group,
        block=layout.block,
        page=layout.page,
        head_dim=layout.head_dim,
        bf16=problem.bf16,
        residual_tokens=residual_tokens(layout),
        query_tiles=1,
        threads=threads,
    )


def configs(problem: Problem) -> list[Config]:
    """Every config worth timing."""
    return [default(problem, threads) for threads in (128, 256, 512)]


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: its tokens, what codes them, and partial ranges."""
    groups = config.head_dim // config.channel_group
    by_token = config.block * groups
    by_channel = config.block // config.chunk * config.head_dim if config.by_channel else by_token
    fit = config.threads // (config.head_dim // 2)
    slices = max(8 if fit >= 8 else 4 if fit >= 4 else 2 if fit >= 2 else 1, _chunks(config))
    tokens = config.block * (config.head_dim + 8) * 2
    return tokens + max(by_token, by_channel) * 12 + slices * config.head_dim * 8


def _chunks(config: Config) -> int:
    return config.block // config.chunk if config.by_channel else 1


def why_not(problem: Problem, config: Config, device: Device) -> str | None:
    """Why this config cannot serve this problem on this device, in a sentence; None if it can."""
    if device.capability < 80:
        return f"{device.name} is {device.arch}, and the KV cache needs sm_80 or later"
    if shared_bytes(config) > device.shared_bytes:
        needed = shared_bytes(config)
        return f"a block of {config.block} tokens needs {needed} bytes of shared memory of {device.shared_bytes}"
    if problem.tokens < 1:
        return f"at least 1 token is stored, not {problem.tokens}"
    return None


def grid(problem: Problem) -> tuple[int, int, int]:
    """Blocks: (blocks of tokens that may become full, heads of K and of V, sequences)."""
    block, window = problem.layout.block, problem.window
    windows = -(-problem.tokens // window) + (0 if problem.tokens == 1 else 1)
    return (windows * (window // block), problem.kv_heads * 2, problem.batch)


@cache
def kernel(config: Config) -> Kernel:
    """The kernel of a config, made once."""
    return Kernel(
        header="kvpack.cuh",
        entry="kvpack::kernel",
        config=config,
        params=Params,
        threads=config.threads,
        shared_bytes=shared_bytes(config),
    )
