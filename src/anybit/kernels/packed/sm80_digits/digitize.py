"""16-bit activations as digits for sm80_packed_digits: the launch before its own. Host side of digitize.cuh."""

from dataclasses import dataclass
from typing import Any

from anybit import jit
from anybit.kernels.common.types import Code, Operand
from anybit.kernels.gemm_kernel import Operands
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_layout import subgroups
from anybit.scheme import TABLES


@dataclass(frozen=True)
class Config:
    """What digits depend on: the product's config has the same fields."""

    operand: Operand
    bits: int
    group: int
    code: Code
    gather: bool
    ragged: bool
    tile_m: int
    wgmma: bool


class Params(jit.Params, header="packed/sm80_digits/digitize.cuh"):
    """Arguments of one launch."""


def block_bytes(config: Any) -> int:
    """Bytes of a block of 128 columns: two a value; for each group and token a scale and a sum, or a token's scale."""
    facts = 4 if config.code.name in TABLES else 8 * max(1, subgroups(config.group))
    return int(config.tile_m) * (256 + facts)


def launch(operands: Operands, problem: LinearProblem, config: Any) -> jit.Launch:
    """Digits of x in the product's scratch. config: the product's."""
    o, p = operands, problem
    made = Config(**{name: getattr(config, name) for name in Config.__dataclass_fields__})
    warps = min(made.tile_m, 16 if made.tile_m % 16 == 0 else 12 if made.tile_m % 12 == 0 else 8)
    kernel = jit.Kernel("packed/sm80_digits/digitize.cuh", "digitize", made, Params, 32 * warps)
    params = Params(o.x, o.weight[3], o.scratch[0], p.m, p.k, o.x_stride)
    return jit.Launch(kernel, params, (p.k_blocks, made.tile_m // warps, 1), pdl=True)
