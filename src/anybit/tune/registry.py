"""What a linear call is (`LinearProblem`), and the kernel families that can run one, behind one interface.

A family is a module of ``anybit.kernels.gemm`` with ``Problem``, ``Config``, ``why_not``, ``configs``, ``default``,
``kernel`` and ``shared_bytes``, perhaps ``estimate`` (microseconds).
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anybit.device import Device
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
    sparse_layout,
)
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

FieldValue = int | bool | str
_OUTPUTS = {torch.float16: Output.f16, torch.bfloat16: Output.bf16}
_TILE = 128
EVERY_KIND, EVERY_RING = 4, 12
"""A search for so many of each family tries every kind of bit-plane tile, and for more several rings of each."""


@dataclass(frozen=True)
class LinearProblem:
    """One linear call, quantization of its activations included: y[m, n] = x[m, k] W[n, k]^T, x and y in ``dtype``.

    columns: K' of the tiles, where an activation order makes them more than K rounded up to 128 (``act_order``).
    aligned: rows of x start on 16 bytes, and K is in eights.
    """

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat = field(default_factory=ActivationFormat)
    dtype: torch.dtype = torch.float16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))
    act_order: bool = False
    columns: int = 0
    aligned: bool = True

    @property
    def scheme(self) -> Scheme:
        """Weights and activations as a scheme."""
        return Scheme(self.weights, self.activations)

    @property
    def tile_columns(self) -> int:
        """K' of the tiles."""
        return self.columns or -(-self.k // _TILE) * _TILE

    def __str__(self) -> str:
        return f"{self.scheme} {self.m} x {self.n} x {self.k}"


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
    problem: Callable[[LinearProblem], Any]
    target: Target

    def layout(self, activations: ActivationFormat) -> Layout:
        """Where the weights must lie."""
        return Layout.planes if self.target is Target.planes else tiles_of(activations)

    def why_not(self, product: LinearProblem, config: Any = None) -> str | None:
        """Why the family, or a config of it, cannot run a product; None if it can."""
        reason = _beside(self, product)
        if reason is not None:
            return reason
        problem = self.problem(product)
        reason = self.module.why_not(problem) if config is None else self.module.why_not(problem, config)
        return None if reason is None else str(reason)

    def configs(self, product: LinearProblem) -> list[Any]:
        """Every legal config of a product, each once; empty where there is none."""
        if self.why_not(product) is not None:
            return []
        try:
            return list(dict.fromkeys(self._ready(one, product) for one in self.module.configs(self.problem(product))))
        except KernelError:
            return []

    def default(self, product: LinearProblem) -> Any:
        """The built-in choice among the family's configs. Raises KernelError where there is none."""
        reason = self.why_not(product)
        if reason is not None:
            raise KernelError(f"{self.name} cannot run {product}: {reason}")
        return self._ready(self.module.default(self.problem(product)), product)

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
            bitplane.multiply(x, weight, _OUTPUTS[y.dtype], bias=bias, y=y, config=config)
        elif self.module is sm90_packed_gemm:
            sm90_packed_gemm.multiply(x, weight, bias, y, config)
        else:
            rows, scale = (x.codes[:, : x.k], x.scale) if isinstance(x, Packed) else (x, None)
            self.module.launch(weight, rows, y, scale, bias, config, **more)

    def estimate(self, product: LinearProblem, config: Any) -> float | None:
        """About how many microseconds a config takes, by the family's own estimate; None where it has none."""
        if not hasattr(self.module, "estimate"):
            return None
        us: float = self.module.estimate(self.problem(product), config)
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
        idle = -(-product.m // _TILE) * -(-product.n // _TILE) <= product.device.sms // 2
        return bitplane_kinds.representatives(configs, self.problem(product), self.default(product), idle, rings)


@functools.cache
def _kinds(family: KernelFamily) -> dict[str, type]:
    """What a search may choose of a family's configs, by name: bool, int, or an enum whose members are named."""
    hints = typing.get_type_hints(family.module.Config)
    return {name: kind for name, kind in hints.items() if name not in _FACTS}


@functools.lru_cache(maxsize=4096)
def _base(family: KernelFamily, product: LinearProblem) -> Any:
    return family.default(product)


def bit_planes(p: LinearProblem) -> bitplane_problem.Problem:
    """The product as the kernels over bit planes see it."""
    return bitplane_problem.Problem(p.m, p.n, p.k, p.weights, p.activations, _OUTPUTS[p.dtype], p.device)


def few_tokens(p: LinearProblem) -> packed_problem.Problem:
    """The product as the kernels for few tokens see it."""
    aligned = p.aligned or p.activations.quantized
    return replace(_marlin(p), k=p.k, columns=p.tile_columns, act_order=p.act_order, aligned=aligned)


def _marlin(p: LinearProblem) -> packed_problem.Problem:
    operand = torch.int8 if p.activations.quantized else p.dtype
    return packed_problem.Problem(p.m, p.n, _ordered(p), p.weights, operand, p.dtype, p.device)


def _large(p: LinearProblem) -> sm90_packed_gemm.Problem:
    return sm90_packed_gemm.Problem(p.m, p.n, _ordered(p), p.weights, p.activations, p.dtype, p.device)


def _ordered(p: LinearProblem) -> int:
    """Columns of x that a kernel is given: gathered into the order of the tiles, where they have one."""
    return p.tile_columns if p.act_order else p.k


def _beside(family: KernelFamily, product: LinearProblem) -> str | None:
    """What a family's ``why_not`` cannot see: how its layout and the kernels around it limit a product."""
    if product.weights.sparse and product.act_order:
        return sparse_layout.ORDERED
    if product.dtype not in _OUTPUTS:
        return f"kernels take float16 and bfloat16, not {dtype_name(product.dtype)}"
    x = product.activations
    if family.target is Target.planes:
        if not x.quantized:
            return "bit planes need quantized activations, and these have 16 bits"
        if product.act_order:
            return "activation order needs groups, and bit planes need one scale a row"
    elif family.name != "sm90_packed_gemm" and x.quantized:
        if not x.integer:
            return f"{family.name} multiplies integers, and the activations are 8-bit floats"
        if x.code != "sym" or x.bits == 1:
            return f"bytes hold symmetric activations of 2 bits or more, not {x.bits}-bit {x.code} ones"
        if product.act_order and family.name == "sm80_packed_gemm":
            return "activation order is not supported with quantized activations"
    if family.name == "sm80_packed_gemm" and product.device.arch == "sm_90a":
        return f"{product.device.arch} has wgmma, which is 1.5 times as fast as this family's mma.sync"
    return None


_FACTS = {
    field.name for kind in (packed_problem.FewFacts, bitplane_problem.Facts) for field in dataclasses.fields(kind)
}
_FACTS |= {"wide_store", "bfloat_out", "tile_bytes", "aligned", "sparse"}
"""Fields by which configs repeat their problem: no search chooses them, and no map holds them."""

_PLANES = (
    sm90_bitplane_gemm, sm90_bitplane_skinny, sm90_bitplane_resident, sm90_bitplane_stacked, sm80_bitplane_gemm,
)  # fmt: skip
FAMILIES: dict[str, KernelFamily] = {
    name: KernelFamily(name, module, problem, target)
    for problem, target, modules in (
        (bit_planes, Target.planes, _PLANES),
        (few_tokens, Target.bytes, (sm90_packed_gemv, sm90_packed_skinny, sm90_packed_skinny_f16)),
        (_large, Target.bytes, (sm90_packed_gemm,)),
        (_marlin, Target.bytes, (sm80_packed_gemm,)),
    )
    for module in modules
    for name in (module.__name__.rpartition(".")[2],)
}


REVISIONS = dict.fromkeys((*FAMILIES, "quantize_activations"), 1)
"""Which device code a map was measured with. Raise a family's number by one, on purpose, when its kernels' machine code
changes: points of a map with another number are hints for searches, no more. Comments, names and host code leave it as
it is. tests/compile/test_revisions.py compares machine code and says when a number is due."""


def quantizer(product: LinearProblem, target: Target) -> quantize_activations.Config:
    """How activations are quantized: the built-in choice."""
    p = product
    return quantize_activations.default(
        quantize_activations.Problem(p.m, p.k, p.activations, p.dtype, target=target, aligned=p.aligned)
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
