"""Storing new K and V: the host side of ``kv_quantize.cuh``.

A decode step is one launch: its tokens go to the residual, and a window that they complete is quantized into pages. A
prompt takes two, because its newest tokens would overwrite residual slots that its first window still needs.
"""

from dataclasses import dataclass
from functools import cache

from anybit import jit
from anybit.device import Device
from anybit.jit import Kernel
from anybit.kernels.attention.kv_page import BlockConfig, PageLayout, constants

_THREADS = 256


@dataclass(frozen=True)
class Problem:
    """``tokens`` new tokens for each of ``batch`` sequences.  ring, window: of the residual.  bf16: else float16.

    front, slots: as in ``decode.Problem``.  ragged: sequences have different numbers, at most ``tokens``.
    """

    layout: PageLayout
    batch: int
    kv_heads: int
    tokens: int
    ring: int = 160
    window: int = 128
    bf16: bool = False
    front: int = 0
    slots: int = 0
    ragged: bool = False

    @property
    def step(self) -> bool:
        """Whether the tokens are few enough that no residual slot is both read and overwritten."""
        return self.tokens <= self.ring - self.window + 1


@dataclass(frozen=True)
class Config(BlockConfig):
    """A kernel config.

    checked: validate lengths and tables on the device.  single: one token per sequence, so that all of a full window
    but its last token is in the residual; unless checked, the kernel then loads speculatively by the first length read.
    """

    threads: int
    checked: bool = False
    single: bool = False
    ragged: bool = False


class Params(jit.Params, header="attention/kv_quantize/kv_quantize_tokens.cuh"):
    """The arguments of one launch."""

    stored = page_stride = 0
    starts = None


def default(problem: Problem, checked: bool = False) -> Config:
    """The config of a problem.

    A block of 64 tokens is four tiles of 16, for four warps; keys by channel have eight tiles of channels.
    """
    p = problem
    threads = 128 if p.layout.block == 64 and not p.layout.by_channel else _THREADS
    single = p.tokens == 1 and not p.ragged
    return Config(
        **constants(p.layout, p.bf16, p.front, p.slots),
        threads=threads,
        checked=checked,
        single=single,
        ragged=p.ragged,
    )


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block: 16 tokens of values per warp and their scales, or packed keys by token."""
    values = config.threads // 32 * (16 * (min(config.head_dim, 128) * 2 + 16) + 16)
    words = config.block * config.head_dim * config.key_bits // 8 * (2 if config.key_bits == 2 else 1)
    return values if config.by_channel or config.key_bits == 16 else max(values, words)


def why_not(problem: Problem, config: Config, device: Device) -> str | None:
    """Why a config cannot run a problem on a device, in a sentence; None if it can."""
    if device.capability < 80:
        return f"{device.name} is {device.arch}, and the KV cache needs sm_80 or later"
    if config.fp4:
        return "4-bit floats are packed by kv_page.encode, not by this kernel"
    if shared_bytes(config) > device.shared_bytes:
        needed = shared_bytes(config)
        return f"a block of {config.block} tokens needs {needed} bytes of shared memory of {device.shared_bytes}"
    if problem.tokens < 1:
        return f"at least 1 token is stored, not {problem.tokens}"
    if config.single and problem.tokens != 1:
        return f"a config for steps of one token stores 1 token, not {problem.tokens}: make it by default()"
    return None


def grid(problem: Problem, packs: bool = True) -> tuple[int, int, int]:
    """Blocks: (heads of K and V, blocks of tokens that may become full, sequences)."""
    block, window = problem.layout.block, problem.window
    if not packs:  # only the residual
        return (problem.kv_heads * 2, -(-min(problem.tokens, problem.ring) // 32), problem.batch)
    windows = -(-problem.tokens // window) + (0 if problem.tokens == 1 else 1)
    return (problem.kv_heads * 2, windows * (window // block), problem.batch)


@cache
def kernel(config: Config) -> Kernel:
    """The kernel of a config."""
    header, size = "attention/kv_quantize/kv_quantize.cuh", shared_bytes(config)
    return Kernel(header, "kv_quantize::kernel", config, Params, config.threads, size)
