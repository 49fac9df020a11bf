"""A few configs that stand for a whole space, where a family has no estimate: one or two for each kind of tile.

What a kind is decides more than how deep its rings are: of 15 % of the space of w2a2 at K = 4096, drawn at random, the
best were 3 to 11 % faster than the built-in config at up to 24 tokens, all of them of other kinds, and what is most
like the built-in config, ring for ring, was the last place to find them.
"""

from collections.abc import Sequence
from typing import Any

from anybit.kernels.gemm.sm90_bitplane import (
    Config,
    Path,
    Turns,
    Walk,
    shared_bytes,
)

_KIND = ("path", "walk", "tokens", "groups", "by_columns", "cluster", "multicast", "blocks", "sets")
_MANY = 64
"""Above so many tokens only the tiles for many are tried: those for few load weights once for each of them, which costs
less than it gains only where tiles for many would leave most multiprocessors idle (SmolLM2's layers to 256 tokens)."""


_SLOTS, _SLOTS_OF_FEW = (2, 4, 6, 8), (2, 3, 4, 6, 8)
"""Of small tiles' rings, where every span is tried; the second to 8 tokens, which have few kinds of tile. Those that
won on an H200, the deepest apart, had 2 to 8; 12 for 6 cost 9 % (w2a4, 2 tokens, 4096 x 12288), and 4 for 2 cost 11 %
(w2a2, 37 tokens, 5120 x 25600)."""
_SLOTS_OF_MANY, _LEAST_OF_MANY = (4, 12), 32
"""The same above 64 tokens, where large tiles would leave most multiprocessors idle, and the narrowest tile."""
_LEAST_WIDE = 16
"""Tiles of weights so wide are tried for any number of tokens: at 1 and 3 they were 5 to 8 % faster in three problems
(w2a4 1 x 5120 x 5120, w2a2 3 x 10240 x 5120, 3 x 576 x 1536)."""


def representatives(
    configs: Sequence[Config], tokens: int, half: int, own: Config, idle: bool = False, rings: bool = False
) -> list[Config]:
    """What stands for the kinds of tile among ``configs`` that suit so many tokens, those most like ``own`` first.

    half: shared memory of which a multiprocessor has two.  idle: whether large tiles leave most of these idle.
    Of small tiles the deepest rings that leave room for a second block, and with ``rings`` every span, in few and in
    many slots, and of those loaded once all (of w2a2 and w2a4 at 9 to 43 tokens the best began with two chunks five
    times, up to 8 % faster than with one, and once with all, 10 % faster); of large ones two and three chunks of either
    operand, with most room for results.
    """
    kinds: dict[tuple[Any, ...], list[Config]] = {}
    for config in configs:
        if _suits(config, tokens, own, idle, rings):
            kinds.setdefault(_kind(config), []).append(config)
    ordered = sorted(kinds.values(), key=lambda some: _other_kind(some[0], own))

    def best(config: Config) -> tuple[int, ...]:
        if config.path is Path.large:
            return config.slab, -config.buffers
        return shared_bytes(config) > half, -config.span, -shared_bytes(config)

    found = [min(members, key=best) for members in ordered]
    if rings:
        slots = _SLOTS_OF_FEW if tokens <= 8 else _SLOTS if tokens <= _MANY else _SLOTS_OF_MANY
        every = [config for members in ordered for config in members]
        found += [one for one in every if one.path is Path.small and one.slots in slots and one.blocks == 1]
        found += [one for one in every if one.path is Path.once]
    return list(dict.fromkeys(found))


def _suits(config: Config, tokens: int, own: Config, idle: bool, rings: bool) -> bool:
    if config.path is Path.large:
        turns = own.turns if own.path is Path.large else Turns.none
        groups = config.weight_groups, config.activation_groups
        ample = min(groups) >= 2 and max(groups) <= 3
        ample = ample or config.weight_bits * config.activation_bits > 8 or turns is Turns.tiles
        return tokens > 8 and not config.resident and config.turns is turns and ample
    if tokens > _MANY:
        small = rings and config.path is Path.small and config.tokens >= _LEAST_OF_MANY
        return idle and (small or config.path is Path.once)
    if config.walk is Walk.weights:
        return tokens <= 2 * config.tokens and config.tokens <= max(_LEAST_WIDE if rings else 8, 4 * tokens)
    return tokens >= 8


def _kind(config: Config) -> tuple[Any, ...]:
    if config.path is Path.large:
        rings = config.weight_groups, config.activation_groups
        return (config.path, config.tokens, config.cluster, bool(config.tail), config.starts, *rings)
    return (*(getattr(config, name) for name in _KIND), config.reserve if config.path is not Path.small else 0)


def _other_kind(one: Config, own: Config) -> int:
    return sum(getattr(one, name) != getattr(own, name) for name in _KIND)
