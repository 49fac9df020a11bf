"""The kernel families that can run a linear problem, behind one interface.

A family is a module of ``anybit.kernels.gemm`` with ``Config``, ``why_not``, ``configs``, ``default``, ``kernel`` and
``shared_bytes``, perhaps ``estimate`` (microseconds); all of them take ``LinearProblem``.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anybit.errors import KernelError, dtype_name
from anybit.kernels.common.types import Output
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Packed, Target
from anybit.kernels.gemm import (
    bitplane,
    bitplane_kinds,
    bitplane_problem,
    heuristics,
    packed_problem,
    sm80_bitplane_gemm,
    sm80_packed_gemm,
    sm90_bitplane_gemm,
    sm90_bitplane_resident,
    sm90_bitplane_skinny,
    sm90_bitplane_stacked,
    sm90_packed_gemm,
    sm90_packed_gemv,
    sm90_packed_skinny,
    sm90_packed_skinny_f16,
)
from anybit.kernels.gemm.bitplane_problem import ROWS
from anybit.kernels.gemm.linear_problem import LinearProblem as LinearProblem
from anybit.scheme import ActivationFormat

FieldValue = int | bool | str
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
EVERY_KIND, EVERY_RING = 4, 12
"""A search for so many of each family tries every kind of bit-plane tile, and for more several rings of each."""


class Layout(Enum):
    """How a layer's weights lie in memory; a candidate reads one of them."""

    planes = "bit planes"
    tiles_a16 = "tiles for 16-bit activations"
    tiles_a8 = "tiles for 8-bit activations"


def tiles_of(activations: ActivationFormat) -> Layout:
    """The layout of tiles for activations."""
    return Layout.tiles_a8 if activations.quantized else Layout.tiles_a16


@dataclass(frozen=True)
class KernelFamily:
    """A family of kernels. target: what activations are quantized into, if they are."""

    name: str
    module: ModuleType
    target: Target

    def layout(self, activations: ActivationFormat) -> Layout:
        """Where the weights must lie."""
        return Layout.planes if self.target is Target.planes else tiles_of(activations)

    def why_not(self, product: LinearProblem, config: Any = None) -> str | None:
        """Why the family, or a config of it, cannot run a product; None if it can."""
        if product.dtype not in _SIXTEEN_BITS:
            return f"kernels take float16 and bfloat16, not {dtype_name(product.dtype)}"
        if self.module is sm80_packed_gemm and product.device.arch == "sm_90a":
            return "sm_90a has wgmma, which is 1.5 times as fast as this family's mma.sync"
        reason: str | None = self.module.why_not(product, config)
        return reason

    def configs(self, product: LinearProblem) -> list[Any]:
        """Every legal config of a product, each once; empty where there is none."""
        if self.why_not(product) is not None:
            return []
        try:
            return list(dict.fromkeys(self._ready(one, product) for one in self.module.configs(product)))
        except KernelError:
            return []

    def default(self, product: LinearProblem) -> Any:
        """The built-in choice among the family's configs. Raises KernelError where there is none."""
        reason = self.why_not(product)
        if reason is not None:
            raise KernelError(f"{self.name} cannot run {product}: {reason}")
        return self._ready(self.module.default(product), product)

    def _ready(self, config: Any, product: LinearProblem) -> Any:
        """A config as layers of a model run it."""
        return heuristics.limit_occupancy(config, product.device)

    def fields(self, config: Any) -> dict[str, FieldValue]:
        """What a search may choose of a config, by name; the inverse of ``rebuild``."""
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _FACTS}
        return {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}

    def rebuild(self, product: LinearProblem, fields: dict[str, FieldValue]) -> Any:
        """The config with these fields, for another product; not yet known to be legal there.

        Fields that are missing are those of the default. Raises KernelError for one that is unknown or of the wrong
        kind, and where the family has no default for the product.
        """
        try:  # what a problem decides of a config does not depend on its tokens
            base = _base(self, replace(product, m=1))
        except KernelError:  # a family for many tokens alone
            base = _base(self, product)
        return replace(base, **self.parsed(fields))

    def parsed(self, fields: Mapping[str, FieldValue]) -> dict[str, Any]:
        """Fields as a config holds them. Raises KernelError for one that is unknown or of the wrong kind."""
        kinds = _kinds(self)
        found: dict[str, Any] = {}
        for name, value in fields.items():
            kind = kinds.get(name)
            if kind is None:
                raise KernelError(f"{self.name} has no field {name!r}")
            if issubclass(kind, Enum):
                if value not in kind.__members__:
                    raise KernelError(f"{name} of {self.name} is one of {', '.join(kind.__members__)}, not {value!r}")
                found[name] = kind[str(value)]
            elif type(value) is not kind:
                raise KernelError(f"{name} of {self.name} is of type {kind.__name__}, not {value!r}")
            else:
                found[name] = value
        return found

    def multiply(
        self, x: Tensor | Packed, weight: Any, y: Tensor, config: Any, bias: Tensor | None = None, **more: Any
    ) -> None:
        """y[:] = x W^T + bias on the current stream; x: 16-bit activations or codes, weight: in the family's layout."""
        if self.target is Target.planes:
            assert isinstance(x, Packed)
            bitplane.multiply(x, weight, Output(dtype_name(y.dtype)), bias=bias, y=y, config=config)
        elif self.module is sm90_packed_gemm:
            sm90_packed_gemm.multiply(x, weight, bias, y, config)
        else:
            rows, scale = (x.codes[:, : x.k], x.scale) if isinstance(x, Packed) else (x, None)
            self.module.launch(weight, rows, y, scale, bias, config, **more)

    def estimate(self, product: LinearProblem, config: Any) -> float | None:
        """About how many microseconds a config takes, by the family's own estimate; None where it has none."""
        if not hasattr(self.module, "estimate"):
            return None
        us: float = self.module.estimate(product, config)
        return us

    def promising(self, product: LinearProblem, count: int) -> list[Any]:
        """What a search times: the default; the ``count`` first by the estimate, or those most like the default where
        it has none; and one of each kind of bit-plane tile where ``count`` is ``EVERY_KIND`` or more.
        """
        found = self.configs(product)
        if not found:
            return []
        own = self.default(product)
        known = vars(own).values()

        def rank(config: Any) -> float:
            us = self.estimate(product, config)
            return sum(map(operator.ne, vars(config).values(), known)) if us is None else us

        kinds = self.kinds(product, count >= EVERY_RING) if count >= EVERY_KIND else []
        return list(dict.fromkeys([own, *sorted(found, key=rank)[:count], *kinds]))

    def kinds(self, product: LinearProblem, rings: bool = False) -> list[Any]:
        """What stands for each kind of bit-plane tile, of small ones' rings several (rings); else nothing."""
        configs = self.configs(product)
        if self.target is not Target.planes or not configs:
            return []
        idle = -(-product.m // ROWS) * -(-product.n // ROWS) <= product.device.sms // 2
        return bitplane_kinds.representatives(configs, product, self.default(product), idle, rings)


@functools.cache
def _kinds(family: KernelFamily) -> dict[str, type]:
    """What a search may choose of a family's configs, by name: bool, int, or an enum whose members are named."""
    hints = typing.get_type_hints(family.module.Config)
    return {name: kind for name, kind in hints.items() if name not in _FACTS}


@functools.lru_cache(maxsize=4096)
def _base(family: KernelFamily, product: LinearProblem) -> Any:
    return family.default(product)


_FACTS = {
    field.name for kind in (packed_problem.FewFacts, bitplane_problem.Facts) for field in dataclasses.fields(kind)
}
_FACTS |= {"wide_store", "bfloat_out", "tile_bytes", "aligned", "sparse"}
"""Fields by which configs repeat their problem: no search chooses them, and no map holds them."""

_MODULES = {
    Target.planes: (
        sm90_bitplane_gemm, sm90_bitplane_skinny, sm90_bitplane_resident, sm90_bitplane_stacked, sm80_bitplane_gemm,
    ),
    Target.bytes: (
        sm90_packed_gemv, sm90_packed_skinny, sm90_packed_skinny_f16, sm90_packed_gemm, sm80_packed_gemm,
    ),
}  # fmt: skip
FAMILIES: dict[str, KernelFamily] = {
    name: KernelFamily(name, module, target)
    for target, modules in _MODULES.items()
    for module in modules
    for name in (module.__name__.rpartition(".")[2],)
}

REVISIONS = dict.fromkeys((*FAMILIES, "quantize_activations"), 1)
"""Which device code a map was measured with. Raise a family's number by one, on purpose, when its kernels' machine code
changes: points of a map with another number are hints for searches, no more. Comments, names and host code leave it as
it is. tests/compile/test_revisions.py compares machine code and says when a number is due."""


def quantizer(product: LinearProblem, target: Target, aligned: bool = True) -> quantize_activations.Config:
    """How activations are quantized: the built-in choice. aligned: rows of x start on 16 bytes, and k is in eights."""
    p = product
    return quantize_activations.default(
        quantize_activations.Problem(p.m, p.k, p.activations, p.dtype, target=target, aligned=aligned)
    )


# -------- how many tokens count as the same

MOST_TOKENS = 8192
INTERPOLATE_FROM = 64
"""To so many tokens the next measured count decides, since a tile holds all tokens; above it the two around do."""


@functools.cache
def bucket(tokens: int) -> int:
    """The token count of a map that stands for ``tokens``: the next power of two or what lies half way between two.

    Above 64, where tiles of tokens fill waves of multiprocessors or do not, the quarters, too; beyond 8192 none.
    """
    return _rounded(tokens, 8 if tokens > INTERPOLATE_FROM else 4)


@functools.cache
def step(tokens: int) -> int:
    """The token count that kernels are chosen for: to 16 that of ``bucket``, to 24 the next eighth of the way between
    two powers of two, to 64 the next quarter, above it the next 32nd. Tiles of tokens that are not there take their
    time: at 24 tokens a tile of 32 is nearly as fast as one of 24, and at 20 it takes 1.17 times as long.
    """
    return _rounded(tokens, next(parts for most, parts in ((16, 4), (24, 16), (64, 8), (tokens, 64)) if tokens <= most))


def _rounded(tokens: int, parts: int) -> int:
    """The next multiple of a part of the next power of two, or that itself beyond ``MOST_TOKENS``."""
    power = power_of_two(tokens)
    unit = max(1, power // parts) if tokens <= MOST_TOKENS else power
    return -(-tokens // unit) * unit


def power_of_two(tokens: int) -> int:
    """The next power of two: what built-in choices are made for, so that they are few."""
    return 1 << (tokens - 1).bit_length()


GRID = tuple(sorted({bucket(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""The token counts of a map of all layers and schemes."""
STEPS = tuple(sorted({step(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""All counts of ``step``: what `anybit tune` measures."""
