"""Experts' products where few tokens chose an expert, on digits of activations. Host side of sm90_grouped_digits.cuh.

At a few tokens an expert bf16 operands take 200 instructions a warp and block of 16 rows by 128 columns, most of what
an SM issues while its share of memory brings them; digits take some 50, and 10 more for each four tokens.
"""

import math
from dataclasses import dataclass, replace

from anybit import jit
from anybit.jit import Launch
from anybit.kernels.common.types import Gate
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_problem import facts
from anybit.kernels.packed.sm80_digits import digitize, sm80_packed_digits
from anybit.kernels.packed.sm80_digits.sm80_packed_digits import Config as Config
from anybit.kernels.packed.sm80_digits.sm80_packed_digits import shared_bytes

MOST_TOKENS = 20
"""Tokens an expert, on average, up to which digits are faster than wgmma of 16-bit operands."""
MOST_TOKENS_OF_E2M1 = 4
"""The same of e2m1 codes, as fp16. gpt-oss-120b: 377 us for 437 at 2 tokens, 540 for 519 at 8."""
_TILES = (4, 8, 16, 24)
_FOLDER = "experts/sm90_grouped_digits"


class GroupedParams(jit.Params, header="experts/sm90_grouped_digits/sm90_grouped_digits.cuh"):
    """Arguments of a product."""


@dataclass(frozen=True)
class SlotsConfig(digitize.Config):
    """What digits of slots depend on. of_tokens: slots name rows of x.  at_once: blocks of columns of a warp."""

    of_tokens: bool
    at_once: int


class SlotsParams(jit.Params, header="experts/sm90_grouped_digits/digitize_slots.cuh"):
    """Arguments of digitize_slots."""


def why_not(product: LinearProblem, config: Config | None = None) -> str | None:
    """Why the kernel cannot take an expert's product (or a config for it), in a sentence; None if it can."""
    if product.k % 8:
        return f"rows of x must be whole 16-byte vectors, not {product.k} values"
    one = replace(product, m=1)
    return sm80_packed_digits.why_not(one, config and replace(config, wide_store=one.n % 4 == 0), e2m1=True)


def config_for(
    product: LinearProblem, tile_m: int, row_warps: int, k_warps: int, units: int, stages: int, wgmma: bool = False
) -> Config:
    """A config with these tiles. units: of 16 rows of a warp."""
    rounds = -(-product.k_blocks // k_warps)
    return Config(
        **facts(product, Config), tile_m=tile_m, row_warps=row_warps, k_warps=k_warps, units=units,
        together=min(units, 2) if tile_m > 8 and not wgmma else units, stages=max(2, min(stages, rounds + 1)),
        wgmma=wgmma,
    )  # fmt: skip


def default(product: LinearProblem, mean: float) -> Config:
    """The built-in choice for ``mean`` tokens an expert: a tile holds those of nearly all experts."""
    tile_m = next((tile for tile in _TILES if tile >= mean + 2 * math.sqrt(mean)), _TILES[-1])
    k_blocks = product.k_blocks
    if product.weights.code == "e2m1":
        return config_for(product, max(tile_m, 8), 2, 2, 4, 3)
    if tile_m > 8:
        long = (4, 1, 2, 4) if k_blocks <= 64 else (4, 3, 2, 3)
        return config_for(product, tile_m, *((4, 1, 4, 3) if tile_m > 16 and k_blocks <= 16 else long), wgmma=True)
    return config_for(
        product, tile_m, *((4, 1, 4, 3) if k_blocks <= 8 else (2, 2, 4, 3) if k_blocks <= 64 else (2, 4, 4, 2))
    )


def kernel(config: Config, gate: Gate | None = None) -> jit.Kernel:
    """The kernel of a config. gate: of gate_up."""
    entry = "sm90_grouped_digits" + (f"<Gate::{gate.name}>" if gate else "")
    return jit.Kernel(
        f"{_FOLDER}/sm90_grouped_digits.cuh", entry, config, GroupedParams, config.warps * 32, shared_bytes(config)
    )


def digits_bytes(product: LinearProblem, config: Config, token_tiles: int) -> int:
    """Bytes of the digits of all token tiles."""
    return token_tiles * product.k_blocks * digitize.block_bytes(config)


def digitize_launch(product: LinearProblem, config: Config, params: SlotsParams, token_tiles: int) -> Launch:
    """The launch that makes a product's digits."""
    fields = {name: getattr(config, name) for name in digitize.Config.__dataclass_fields__}
    at_once = 4 if product.k_blocks <= 32 else 8
    made = SlotsConfig(**fields, of_tokens=params.token is not None, at_once=at_once)
    warps = math.gcd(config.tile_m, 8)  # few of a large block's would have a token
    code = jit.Kernel(f"{_FOLDER}/digitize_slots.cuh", "digitize_slots", made, SlotsParams, 32 * warps)
    return Launch(code, params, (-(-product.k_blocks // at_once), token_tiles, config.tile_m // warps), pdl=True)


def launch(
    product: LinearProblem, config: Config, params: GroupedParams, token_tiles: int, gate: Gate | None
) -> Launch:
    """The launch of a product, right behind that of its digits."""
    blocks = -(-product.units // config.block_units)
    return Launch(kernel(config, gate), params, (blocks, token_tiles, 1), pdl=True)
