"""The kernel families that run linear problems, behind one interface, and ``Candidate``: one way to run a problem.

A family is a ``GemmKernel`` as maps and searches see it, optionally with an ``estimate`` (microseconds).
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from anybit.choose import heuristics
from anybit.errors import KernelError, dtype_name
from anybit.jit import Kernel
from anybit.kernels.bitplane import bitplane_kinds, bitplane_problem
from anybit.kernels.bitplane.bitplane_problem import ROWS
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem
from anybit.kernels.packed.repack import repack
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import ActivationFormat

FieldValue = int | bool | str
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
EVERY_KIND, EVERY_RING = 4, 12
"""From these counts per family on, a search also tries every kind of bit-plane tile, and several depths of each."""


class Layout(Enum):
    """Memory layouts of a layer's weights; a candidate reads one of them."""

    planes = "bit planes"
    tiles_a16 = "tiles for 16-bit activations"
    tiles_a8 = "tiles for 8-bit activations"


def tiles_of(activations: ActivationFormat) -> Layout:
    """The tile layout for an activation format."""
    return Layout.tiles_a8 if activations.quantized else Layout.tiles_a16


@dataclass(frozen=True)
class KernelFamily:
    """A family of kernels. beaten_on: architectures on which another family is faster, and why."""

    module: GemmKernel[Any]
    beaten_on: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Its name in maps."""
        return self.module.traits.name

    @property
    def target(self) -> Target:
        """The layout of quantized activations."""
        return self.module.traits.target

    def layout(self, activations: ActivationFormat) -> Layout:
        """The weight layout that the family reads."""
        return Layout.planes if self.target is Target.planes else tiles_of(activations)

    def why_not(self, product: LinearProblem, config: Any = None) -> str | None:
        """Why the family, or one of its configs, cannot run a product; None if it can."""
        if product.dtype not in _SIXTEEN_BITS:
            return f"kernels take float16 and bfloat16, not {dtype_name(product.dtype)}"
        if (beaten := dict(self.beaten_on).get(product.device.arch)) is not None:
            return beaten
        try:
            return self.module.why_not(product, config)
        except ZeroDivisionError:
            return f"one of the sizes in {config} is 0"

    def configs(self, product: LinearProblem) -> list[Any]:
        """Every legal config of a product, without duplicates; may be empty."""
        if self.why_not(product) is not None:
            return []
        try:
            return list(dict.fromkeys(self._ready(one, product) for one in self.module.configs(product)))
        except KernelError:
            return []

    def default(self, product: LinearProblem) -> Any:
        """The built-in choice among the family's configs. Raises KernelError if there is none."""
        if (reason := self.why_not(product)) is not None:
            raise KernelError(f"{self.name} cannot run {product}: {reason}")
        return self._ready(self.module.default(product), product)

    def _ready(self, config: Any, product: LinearProblem) -> Any:
        """A config as a model's layers run it: with its occupancy limited."""
        return heuristics.limit_occupancy(config, product.device)

    def fields(self, config: Any) -> dict[str, FieldValue]:
        """The tunable fields of a config, by name; the inverse of ``rebuild``."""
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _FACTS}
        return {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}

    def rebuild(self, product: LinearProblem, fields: dict[str, FieldValue]) -> Any:
        """The config with these fields for a product; not checked to be legal there.

        Missing fields come from the default. Raises KernelError for a field that is unknown or of the wrong type, and
        if the family has no default for the product.
        """
        try:  # the fields that follow from the problem do not depend on m
            base = _base(self, replace(product, m=1))
        except KernelError:  # a family for many tokens only
            base = _base(self, product)
        return replace(base, **self.parsed(fields))

    def parsed(self, fields: Mapping[str, FieldValue]) -> dict[str, Any]:
        """Fields as a config holds them. Raises KernelError for one that is unknown or of the wrong type."""
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
            elif type(value) is not kind or not 0 <= int(value) < 2**31:
                what = "bool" if kind is bool else "int from 0 to 2^31 - 1"
                raise KernelError(f"{name} of {self.name} is of type {what}, not {value!r}")
            else:
                found[name] = value
        return found

    def estimate(self, product: LinearProblem, config: Any) -> float | None:
        """A config's estimated time in microseconds, by the family's model; None if it has none."""
        estimate: Callable[[LinearProblem, Any], float] | None = getattr(self.module, "estimate", None)
        return None if estimate is None else estimate(product, config)

    def promising(self, product: LinearProblem, count: int) -> list[Any]:
        """The configs that a search times: the default; the best ``count`` by the estimate, or without one those most
        like the default; and, from ``EVERY_KIND`` on, one of each kind of bit-plane tile.
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
        """A representative of each kind of bit-plane tile (rings: several pipeline depths of small ones), else none."""
        configs = self.configs(product)
        if self.target is not Target.planes or not configs:
            return []
        idle = -(-product.m // ROWS) * -(-product.n // ROWS) <= product.device.sms // 2
        return bitplane_kinds.representatives(configs, product, self.default(product), idle, rings)


@functools.cache
def _kinds(family: KernelFamily) -> dict[str, type]:
    """The types of a family's tunable fields, by name: bool, int, or an enum."""
    hints = typing.get_type_hints(family.module.Config)
    return {name: kind for name, kind in hints.items() if name not in _FACTS}


@functools.lru_cache(maxsize=4096)
def _base(family: KernelFamily, product: LinearProblem) -> Any:
    return family.default(product)


_FACTS = {
    field.name for kind in (packed_problem.FewFacts, bitplane_problem.Facts) for field in dataclasses.fields(kind)
}
_FACTS |= {"wide_store", "bfloat_out", "tile_bytes", "aligned", "sparse"}
"""Fields that follow from the problem: not tunable, and not stored in maps."""

_WGMMA = ("sm_90a", "sm_90a has wgmma, which is 1.5 times as fast as this family's mma.sync")
FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        KernelFamily(sm90_bitplane_gemm),
        KernelFamily(sm90_bitplane_skinny),
        KernelFamily(sm90_bitplane_resident),
        KernelFamily(sm90_bitplane_stacked),
        KernelFamily(sm80_bitplane_gemm),
        KernelFamily(sm90_packed_gemv),
        KernelFamily(sm90_packed_skinny),
        KernelFamily(sm90_packed_skinny_f16),
        KernelFamily(sm90_packed_gemm),
        KernelFamily(sm80_packed_gemm, beaten_on=(_WGMMA,)),
    )
}
"""All kernels. A new one is a module that implements ``GemmKernel``, and a line here."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a product: the kernel family, its config, and what activations are quantized to."""

    kernel: str
    config: Any
    activations: ActivationFormat

    @property
    def strategy(self) -> str:
        """What the family does with activations: see ``strategy_of``."""
        return strategy_of(self.kernel, self.activations, self.config)

    @property
    def layout(self) -> Layout:
        """The weight layout that it reads."""
        return FAMILIES[self.kernel].layout(self.activations)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block, in bytes."""
        return FAMILIES[self.kernel].module.shared_bytes(self.config)

    @property
    def fields(self) -> dict[str, FieldValue]:
        """The config's tunable fields, by name."""
        return FAMILIES[self.kernel].fields(self.config)

    @property
    def name(self) -> str:
        """Its name in maps, reports and exclusions."""
        return f"{self.kernel}({', '.join(f'{key}={value}' for key, value in self.fields.items())})"

    def why_not(self, product: LinearProblem) -> str | None:
        """Why it cannot run a product; None if it can."""
        return FAMILIES[self.kernel].why_not(replace(product, activations=self.activations), self.config)

    def kernels(self, product: LinearProblem) -> Iterator[Kernel]:
        """The kernels to compile before it can run."""
        family = FAMILIES[self.kernel]
        if family.target is Target.bytes and not product.weights.sparse:
            yield repack.kernel(repack.config_of(product.weights, "a8" if self.activations.quantized else "a16"))
        if self.activations.quantized:
            yield quantize_activations.kernel(quantizer(replace(product, activations=self.activations), family.target))
        yield family.module.kernel(self.config)


def strategy_of(kernel: str, activations: ActivationFormat, config: Any = None) -> str:
    """The name of what a family does with activations."""
    if FAMILIES[kernel].target is Target.planes:
        return "bitwise"
    if getattr(config, "nibbles", False):
        return "split"
    if getattr(config, "sparse", False):
        return "sparse"
    if not activations.quantized:
        return "dequantize"
    return "padding to int8" if activations.integer else "padding to fp8"


def quantizer(product: LinearProblem, target: Target, aligned: bool = True) -> quantize_activations.Config:
    """The built-in config that quantizes activations. aligned: rows of x are 16-byte aligned, and k % 8 == 0."""
    p = product
    return quantize_activations.default(
        quantize_activations.Problem(p.m, p.k, p.activations, p.dtype, target=target, aligned=aligned)
    )
