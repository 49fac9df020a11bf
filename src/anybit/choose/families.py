"""The kernel families that run linear problems, behind one interface, and ``Candidate``: one way to run a problem.

A family is a ``GemmKernel`` as maps and searches see it, optionally with ``refit`` (a config of another problem for
this one) and ``estimate`` (relative time).
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
from anybit.jit import Config, Kernel
from anybit.kernels.bitplane import bitplane_problem
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
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import ActivationFormat

FieldValue = int | bool | str
GemmFamily = GemmKernel[Any]
"""A kernel, whatever its configs."""


_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
STRATEGIES = ("bitwise", "padding to int8", "padding to fp8", "dequantize", "split", "sparse")
"""Strategies to compute a product (ADAngel, section 4.3)."""


class Layout(Enum):
    """Memory layouts of a layer's weights; a candidate reads one of them."""

    planes = "bit planes"
    tiles_a16 = "tiles for 16-bit activations"
    tiles_a8 = "tiles for 8-bit activations"


def tiles_of(activations: ActivationFormat) -> Layout:
    """The tile layout for an activation format."""
    return Layout.tiles_a8 if activations.quantized else Layout.tiles_a16


def layouts(activations: ActivationFormat, only: Layout | None = None) -> tuple[Layout, ...]:
    """The weight layouts that kernels read, or ``only`` one."""
    return (Layout.planes, tiles_of(activations)) if only is None else (only,)


@dataclass(frozen=True)
class KernelFamily:
    """A family of kernels. beaten_on: architectures on which another family is faster, and why."""

    module: GemmFamily
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

    def why_not(self, product: LinearProblem, config: Config | None = None) -> str | None:
        """Why the family, or one of its configs, cannot run a product; None if it can."""
        if product.dtype not in _SIXTEEN_BITS:
            return f"kernels take float16 and bfloat16, not {dtype_name(product.dtype)}"
        if (beaten := dict(self.beaten_on).get(product.device.arch)) is not None:
            return beaten
        try:
            return self.module.why_not(product, config)
        except ZeroDivisionError:
            return f"one of the sizes in {config} is 0"

    def configs(self, product: LinearProblem) -> list[Config]:
        """Every legal config of a product, without duplicates; may be empty."""
        if self.why_not(product) is not None:
            return []
        try:
            return list(dict.fromkeys(self._ready(one, product) for one in self.module.configs(product)))
        except KernelError:
            return []

    def default(self, product: LinearProblem) -> Config:
        """The config where nothing was measured. Raises KernelError if there is none."""
        if (reason := self.why_not(product)) is not None:
            raise KernelError(f"{self.name} cannot run {product}: {reason}")
        return self._ready(self.module.default(product), product)

    def _ready(self, config: Config, product: LinearProblem) -> Config:
        """A config as a model's layers run it: with its occupancy limited."""
        return heuristics.limit_occupancy(config, product.device)

    def fields(self, config: Config) -> dict[str, FieldValue]:
        """The tunable fields of a config, by name; the inverse of ``rebuild``."""
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _FACTS}
        return {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}

    @functools.cached_property
    def tunable(self) -> Mapping[str, type]:
        """The types of a config's tunable fields, by name: bool, int, or an enum."""
        hints = typing.get_type_hints(self.module.Config)
        return {name: kind for name, kind in hints.items() if name not in _FACTS}

    def rebuild(self, product: LinearProblem, fields: Mapping[str, FieldValue]) -> Config:
        """The config with these fields, all that are tunable, for a product; not checked to be legal there.

        Raises KernelError as ``parsed``.
        """
        made: Config = self.module.Config(**_facts(self, product), **self.parsed(fields))
        return made

    def fit(self, product: LinearProblem, config: Config, there: LinearProblem) -> Config | None:
        """A config measured for another problem as it can run this one: as it is, refitted by the family, or None.

        Configs for few tokens follow a layer's shape, so those of other shapes are always refitted.
        """
        if self.why_not(product) is not None:
            return None
        found = replace(config, **_facts(self, product))
        few = isinstance(config, packed_problem.FewFacts)
        if few and product.act_order and product.activations.quantized:
            return None  # their activations are gathered before they are quantized
        same = not few or (there.n, there.k) == (product.n, product.k)
        if same and self.why_not(product, found) is None:
            return found
        if not hasattr(self.module, "refit"):
            return None
        tried = (self._ready(one, product) for one in self.module.refit(product, found))
        return next((one for one in tried if self.why_not(product, one) is None), None)

    def parsed(self, fields: Mapping[str, FieldValue]) -> dict[str, FieldValue | Enum]:
        """Fields as a config holds them. Raises KernelError for one that is unknown, missing, or of the wrong type."""
        kinds = self.tunable
        found: dict[str, FieldValue | Enum] = {}
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
        if missing := kinds.keys() - found.keys():
            raise KernelError(f"configs of {self.name} lack the field {min(missing)!r}")
        return found

    def promising(self, product: LinearProblem, count: int, like: Config | None = None) -> list[Config]:
        """The configs that a search times: ``like`` (default: the family's own), the ``count`` most like it, and as
        many more, spread over the better half by the estimate (families without one: over the whole space).
        """
        found = self.configs(product)
        if not found:
            return []
        own = like or self.default(product)
        known = vars(own).values()
        close = sorted(found, key=lambda config: sum(map(operator.ne, vars(config).values(), known)))[:count]
        estimate: Callable[[LinearProblem, Config], float] | None = getattr(self.module, "estimate", None)
        if estimate is not None:
            found = sorted(found, key=functools.partial(estimate, product))[: len(found) // 2 + 1]
        spread = found[:: max(1, len(found) // count)][:count] if count else []
        return list(dict.fromkeys([own, *close, *spread]))


def _facts(family: KernelFamily, product: LinearProblem) -> dict[str, object]:
    """The fields of a family's config that follow from the problem."""
    kind = family.module.Config
    if family.target is not Target.planes:
        return packed_problem.facts(product, kind)
    names = (field.name for field in dataclasses.fields(bitplane_problem.Facts))
    known = dict[str, object](zip(names, bitplane_problem.facts(product), strict=True))
    if "aligned" in {field.name for field in dataclasses.fields(kind)}:
        known |= {"aligned": product.n % 8 == 0 and product.y_aligned, "short_sums": False}
    return known


_FACTS = {
    field.name for kind in (packed_problem.FewFacts, bitplane_problem.Facts) for field in dataclasses.fields(kind)
}
_FACTS |= {"wide_store", "aligned", "sparse"}
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
        KernelFamily(sm80_packed_digits),
        KernelFamily(sm90_packed_gemm),
        KernelFamily(sm80_packed_gemm, beaten_on=(_WGMMA,)),
    )
}
"""All kernels. A new one is a module that implements ``GemmKernel``, and a line here."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a product: the kernel family, its config, and what activations are quantized to."""

    kernel: str
    config: Config
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


def strategy_of(kernel: str, activations: ActivationFormat, config: Config | None = None) -> str:
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
