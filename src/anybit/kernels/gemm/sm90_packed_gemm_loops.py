"""Which loop of sm90_packed_gemm a config runs: weights through the ring or past it, and unrolled stages.

The choices are of what an H200 took; figures in docs/notes/2026-11-24-packed.md.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anybit.kernels.gemm.sm90_packed_gemm_rules import Config, Problem


def refusal_of_loop(config: "Config") -> str | None:
    """Why a config's loop cannot be; None if it can."""
    if config.direct and not _may_batch(config):
        return (
            "weights go past shared memory for 16-bit activations, in stages of 1 step, none of them early, with 2 "
            "register sets, at most 3 warpgroups along K, no stripes, nothing halved and no second block beside"
        )
    if config.unrolled and not _may_unroll(config):
        return (
            "stages have code of their own where up to 3 warpgroups or some blocks share the inputs, with 2 register "
            "sets, weights that come through the ring to be multiplied without promotion, and no zeros of groups with "
            "two blocks a multiprocessor"
        )
    return None


def _may_batch(config: "Config") -> bool:
    plain = config.stripes == 0 and not config.halves and config.span == config.resident == 1 and not config.early
    return plain and config.x_bytes == 2 and config.k_warpgroups < 4 and config.register_sets == 2


def _may_unroll(config: "Config") -> bool:
    """A block has one tile, so that the ring begins with it."""
    shared = config.k_warpgroups * config.k_blocks > 1 and config.k_warpgroups < 4
    if config.resident == 2 and config.tokens > 16 and config.code.name == "asym":
        return False  # with zeros of groups the 80 registers do not do
    return shared and not (config.stripes or config.promotes or config.direct) and config.register_sets == 2


def batch(problem: "Problem", config: "Config") -> int:
    """How many steps of weights a warpgroup asks for at a time, past shared memory; 0: they come through the ring.

    Measured at 48 and 64 tokens, K over two warpgroups (us: qkv 8.67 for 9.29, down 15.65 for 15.95; at 48 tokens
    7.79 for 8.23 and 13.6 for 14.1). At 16 and 32 tokens it loses 3 to 9 %, and with int8.
    """
    single = config.row_warpgroups == config.row_blocks == 1 and config.k_warpgroups == 2 and config.k_blocks <= 2
    if not single or not _may_batch(replace(config, early=0)) or config.bits > 4 or config.tokens not in (48, 64):
        return 0
    if problem.m > config.tokens:
        return 0
    if problem.units >= 32 * config.k_blocks:
        return 3
    return 2 if config.bits < 4 or config.tokens == 48 else 0  # o: 5.52 us for 5.87 at 48 tokens


def unrolls(config: "Config") -> bool:
    """Whether each stage has code of its own, which takes an eighth of the instructions of a step away.

    16-bit activations in tiles of up to 96 tokens: 1.5 to 6.5 % (us: qkv at 32 and 128 tokens 6.50 for 6.95 and 12.25
    for 12.72, o at 64 and 128 6.11 for 6.31 and 9.40 for 9.67). Nothing in tiles of 128, nor, of blocks that have a
    multiprocessor each, in stages of two steps or tiles of 16.
    """
    few = config.resident == 2 or (24 <= config.tokens < 128 and config.span == 1)
    return few and config.k_blocks < 4 and config.x_bytes == 2 and _may_unroll(config)


def words_at_hand(config: "Config") -> int:
    """Registers of codes, scales and zeros that are not in use yet."""
    if not config.direct:
        return 2 * config.bits
    parts = 128 // config.group if 0 < config.group < 128 else int(config.group > 0)
    return 8 + 2 * config.direct * (2 * config.bits + parts * (1 + (config.code.name == "asym")))
