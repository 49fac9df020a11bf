"""A few configs that stand for a whole space, where a family has no estimate: one or two for each kind of tile.

What a kind is decides more than how deep its rings are: of 15 % of the space of w2a2 at K = 4096, drawn at random, the
best were 3 to 11 % faster than the built-in config at up to 24 tokens, all of them of other kinds, and what is most
like the built-in config, ring for ring, was the last place to find them.
"""

from collections.abc import Sequence
from typing import Any

from anybit.kernels.gemm import sm90_bitplane_gemm, sm90_bitplane_resident, sm90_bitplane_skinny
from anybit.kernels.gemm.bitplane_problem import Problem, half_bytes
from anybit.kernels.gemm.sm90_bitplane_skinny import AOperand

_KIND: dict[type, tuple[str, ...]] = {
    sm90_bitplane_gemm.Config: (
        *("tile_m", "cluster_n", "first_plane_pieces", "weight_chunks", "activation_chunks"),
        "tail_tile_m",
    ),
    sm90_bitplane_skinny.Config: (
        *("a_operand", "tile_b", "split_k_warpgroups", "split_b_warpgroups", "cluster_k", "min_blocks_per_sm"),
    ),
    sm90_bitplane_resident.Config: ("a_operand", "tile_b", "accumulator_sets", "reserved_bytes"),
}
"""What a kind of tile is, for each family; the others have an estimate or few kinds."""
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


def representatives(configs: Sequence[Any], problem: Problem, own: Any, idle: bool, rings: bool) -> list[Any]:
    """What stands for the kinds of tile that suit a problem among a family's ``configs``, those like ``own`` first.

    idle: whether tiles for many tokens leave most multiprocessors idle.  Of small tiles the deepest rings that leave
    room for a second block, and with ``rings`` every pass, in few and in many stages, and of those loaded once all (of
    w2a2 and w2a4 at 9 to 43 tokens the best began with two chunks five times, up to 8 % faster than with one, and once
    with all, 10 % faster); of large ones two and three chunks of either operand, with most room for results.
    """
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    names = _KIND.get(type(own), ())
    for config in configs if names else ():
        if _suits(config, problem.m, own, idle, rings):
            kinds.setdefault(tuple(getattr(config, name) for name in names), []).append(config)
    mine = tuple(getattr(own, name) for name in names)
    ordered = sorted(kinds.items(), key=lambda kind: sum(a != b for a, b in zip(kind[0], mine, strict=True)))

    def best(config: Any) -> tuple[int, ...]:
        if isinstance(config, sm90_bitplane_gemm.Config):
            return config.epilogue_tile, -config.epilogue_stages
        if isinstance(config, sm90_bitplane_resident.Config):
            return (-sm90_bitplane_resident.shared_bytes(config),)
        size = sm90_bitplane_skinny.shared_bytes(config)
        return size > half_bytes(problem.device), -config.pass_chunks, -size

    found = [min(members, key=best) for _, members in ordered]
    if rings:
        stages = _SLOTS_OF_FEW if problem.m <= 8 else _SLOTS if problem.m <= _MANY else _SLOTS_OF_MANY
        every = [config for _, members in ordered for config in members]
        if isinstance(own, sm90_bitplane_skinny.Config):
            found += [one for one in every if one.a_stages in stages and one.min_blocks_per_sm == 1]
        elif isinstance(own, sm90_bitplane_resident.Config):
            found += every
    return list(dict.fromkeys(found))


def _suits(config: Any, tokens: int, own: Any, idle: bool, rings: bool) -> bool:
    if isinstance(config, sm90_bitplane_gemm.Config):
        held = config.weight_chunks, config.activation_chunks
        ample = min(held) >= 2 and max(held) <= 3
        pingpong = own.schedule is sm90_bitplane_gemm.Schedule.pingpong
        ample = ample or config.weight_bits * config.activation_bits > 8 or pingpong
        return tokens > 8 and not config.activation_stationary and config.schedule is own.schedule and ample
    if tokens > _MANY:
        resident = isinstance(config, sm90_bitplane_resident.Config)
        return idle and (resident or (rings and bool(config.tile_b >= _LEAST_OF_MANY)))
    if config.a_operand is AOperand.weights:
        return bool(tokens <= 2 * config.tile_b and config.tile_b <= max(_LEAST_WIDE if rings else 8, 4 * tokens))
    return tokens >= 8
