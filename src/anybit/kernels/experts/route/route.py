"""Sort slots (a token's choice of an expert) by expert and gather their rows of x: the host side of route.cuh."""

from dataclasses import dataclass

from anybit import jit

_THREADS, _MANY_THREADS = 256, 1024
_MANY = 4096
"""Slots from which one large block an SM is faster than two: each counts all ids."""


@dataclass(frozen=True)
class Config:
    """A kernel config. id_words: 32-bit words of an id. most_experts: what shared memory has room for."""

    threads: int
    id_words: int
    most_experts: int


class Params(jit.Params, header="experts/route/route.cuh"):
    """The arguments of one launch."""


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory per block: two counts an expert, and a chunk of slots."""
    return 4 * (2 * config.most_experts + config.threads)


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("experts/route/route.cuh", "route_tokens", config, Params, config.threads, shared_bytes(config))


def why_not(experts: int, top_k: int) -> str | None:
    """Why slots cannot be sorted, in a sentence; None if they can."""
    if not 1 <= experts <= 1024:
        return f"a layer has 1 to 1024 experts, not {experts}"
    if not 1 <= top_k <= _THREADS:
        return f"a token has 1 to {_THREADS} experts, not {top_k}"
    return None


def token_tiles(tokens: int, top_k: int, experts: int, tile_m: int) -> int:
    """The most token tiles that any routing makes."""
    slots = tokens * top_k
    return min(experts, slots) + slots // tile_m


def launch(params: Params, id_words: int, sms: int) -> jit.Launch:
    """The launch: one or two blocks an SM, each with its own tokens."""
    room = max(64, 1 << (params.experts - 1).bit_length())
    many = params.tokens * params.top_k >= _MANY
    config = Config(_MANY_THREADS if many else _THREADS, id_words, room)
    return jit.Launch(kernel(config), params, (min(params.tokens, sms if many else 2 * sms), 1, 1), pdl=True)
