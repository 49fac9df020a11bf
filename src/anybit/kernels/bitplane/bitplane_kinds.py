"""Representatives of the space of bit-plane configs, for families without a cost model.

The kind of tile matters more than pipeline depth, and configs that differ from the built-in one only in depths are the
least likely to be faster (docs/tuning.md).
"""

from collections.abc import Sequence
from typing import Any

from anybit.kernels.bitplane.bitplane_problem import half_bytes
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand
from anybit.kernels.linear_problem import LinearProblem

_SPLIT = ("split_k_warpgroups", "split_b_warpgroups", "cluster_k")
_HELD = ("weight_chunks", "activation_chunks")
_KIND: dict[type, tuple[str, ...]] = {
    sm90_bitplane_gemm.Config: ("tile_m", "cluster_n", "tail_tile_m", "first_plane_pieces", *_HELD),
    sm90_bitplane_skinny.Config: ("a_operand", "tile_b", *_SPLIT, "min_blocks_per_sm"),
    sm90_bitplane_resident.Config: ("a_operand", "tile_b", "accumulator_sets", "reserved_bytes"),
}
"""The fields that define a kind of tile, by family; other families have an estimate, or few kinds."""
_MANY = 64
"""Token count above which tiles for few tokens, which each load the weights again, are tried only if tiles for many
would leave most SMs idle."""
_A_STAGES_OF_FEW, _A_STAGES, _A_STAGES_OF_MANY = (2, 3, 4, 6, 8), (2, 4, 6, 8), (4, 12)
"""a_stages of small tiles to try with every pass_chunks: up to 8 tokens, up to ``_MANY``, above."""
_LEAST_OF_MANY = 32
"""The narrowest small tile above ``_MANY`` tokens."""
_LEAST_WIDE = 16
"""Tiles with A = weights up to this width are tried for any number of tokens."""


def representatives(configs: Sequence[Any], problem: LinearProblem, own: Any, idle: bool, rings: bool) -> list[Any]:
    """One config for each kind of tile that suits a problem, among a family's ``configs``; kinds like ``own`` first.

    idle: whether tiles for many tokens leave most SMs idle.  Small tiles get the deepest pipelines that leave room for
    a second block, and with ``rings`` also every pass_chunks with few and many stages (resident tiles: all configs);
    large tiles get two or three chunks of either operand, with the most room for results.
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
        stages = _A_STAGES_OF_FEW if problem.m <= 8 else _A_STAGES if problem.m <= _MANY else _A_STAGES_OF_MANY
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
