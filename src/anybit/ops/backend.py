"""What a backend of linear layers is, and how one is chosen."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.kernels.elementwise.rope import RopeStoreArgs as RopeStoreArgs
from anybit.kernels.elementwise.rope_pages import RopePagesArgs as RopePagesArgs
from anybit.ops.prologue import LinearInput
from anybit.packing import QuantizedWeight
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

CachedCall = Callable[..., Any]
"""(x, a prepared weight's tensors, bias) -> y; of a prologue that has a residual also gamma and it -> (y, sum)."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """All that is static about a prepared linear layer. It goes through a string, since an op takes no objects.

    fused: it is a product of a fused layer (``anybit.fuse``), between whose products small kernels stand.
    """

    backend: str
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat
    fused: bool = False

    def __str__(self) -> str:
        return _spec_text(self)

    @staticmethod
    def parse(text: str) -> "LinearSpec":
        """The inverse of ``str``."""
        return _parse_spec(text)


@cache
def _spec_text(spec: LinearSpec) -> str:
    text = f"{spec.backend}:{spec.n}x{spec.k}:{Scheme(spec.weights, spec.activations)}"
    return f"{text}:fused" if spec.fused else text


_specs: dict[str, LinearSpec] = {}


def _parse_spec(text: str) -> LinearSpec:
    found = _specs.get(text)
    if found is None:  # one object a text, whichever thread comes first: plans go by its identity
        found = _specs.setdefault(text, _parsed_spec(text))
    return found


def _parsed_spec(text: str) -> LinearSpec:
    backend, shape, scheme, *rest = text.split(":")
    n, k = map(int, shape.split("x"))
    parsed = Scheme.parse(scheme)
    return LinearSpec(backend, n, k, parsed.weights, parsed.activations, rest == ["fused"])


class Backend(ABC):
    """One way to run linear layers. ``why_not`` decides; the other methods may assume that it said yes.

    unasked: the device types on which it may be chosen without being named.
    codes: whether ``linear`` takes an ``ActivationPrologue``, work that its quantize-and-pack kernel does on the way.
    norm_tokens: to so many tokens of 16-bit activations it may norm them inside the product (``norm_linear``).
    """

    name: str
    unasked: tuple[str, ...] = ()
    codes: bool = False
    norm_tokens: int = 0

    @abstractmethod
    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why this backend cannot run a layer where it is, in a sentence, or None if it can."""

    @abstractmethod
    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """Of the backends that can run a layer, the one of the lowest cost does; of equals, the first registered."""

    @abstractmethod
    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The tensors that ``linear`` reads."""

    @abstractmethod
    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight again; the inverse of ``prepare``, bit for bit."""

    @abstractmethod
    def linear(self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Y = x W^T + bias, [..., K] -> [..., N], in x's dtype.

        x: an ``ActivationPrologue``, which makes [M, K], only for backends that say ``codes``.
        """

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """The weights of outputs ``ids``, int64 [...] -> [..., K] in a float dtype: what an embedding gives."""
        if not ids.numel():
            return ids.new_empty(*ids.shape, spec.k, dtype=dtype)
        if not ids.is_cuda and (least := int(ids.min())) < 0:  # torch would count from the end
            raise IndexError(f"index {least} is out of range: rows are counted from 0 to {spec.n - 1}")
        weight = self.restore(tensors, spec).rows(ids.flatten())
        return weight.dequantize(dtype).view(*ids.shape, spec.k)

    def ends_with_silu(self, weight: QuantizedWeight) -> bool:
        """Whether ``linear_silu`` of a layer with coded activations is one for every token count that matters."""
        return False

    def linear_silu(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor | None:
        """silu(gate) * up [..., N / 2] of ``linear``, whose outputs are eight of gate and eight of up in turn.

        None where no kernel of this backend ends so; nothing has run then.
        """
        return None

    def cached_call(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
    ) -> CachedCall | None:
        """``linear`` for operands that are like these in all but address and values; None where there is none.

        silu: ``linear_silu``.

        These are checked as ``linear`` checks them; what it returns takes operands of the same ``call_cache.signature``
        and any weight of the same spec, and checks nothing.
        """
        return None

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        epsilon: float,
        tensors: list[Tensor],
        bias: Tensor | None,
        spec: LinearSpec,
        silu: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """(linear of RMSNorm(x + residual), x + residual) in one launch; None where this backend has no such kernel.

        silu: the first is silu(gate) * up [..., N / 2] of outputs that are eight of gate and eight of up in turn.
        """
        return None

    def norm_rotate_store(
        self,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        epsilon: float,
        tensors: list[Tensor],
        bias: Tensor | None,
        spec: LinearSpec,
        step: RopeStoreArgs | RopePagesArgs,
    ) -> tuple[Tensor, Tensor] | None:
        """(rotated queries of the norm's linear, x + residual), keys and values stored as ``step`` says; or None."""
        return None


backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend; of those at the same cost the first registered is preferred. KernelError for a name twice."""
    if backend.name in backends:
        raise KernelError(f"a backend named {backend.name!r} is registered already")
    backends[backend.name] = backend


_fallback = False
_told: set[str] = set()


def allow_fallback(allowed: bool = True) -> None:
    """Whether a layer that no kernel runs is computed by the reference, exactly and slowly, instead of raising
    KernelError. Off at first. A warning says so once for each scheme.
    """
    global _fallback
    _fallback = allowed


def choose(weight: QuantizedWeight, activations: ActivationFormat, wanted: str | None = None) -> str:
    """The name of the backend that runs a layer: the one wanted, else the cheapest that can.

    Raises KernelError for a name that is unknown, and, with the reasons of all that were asked, where none can; after
    ``allow_fallback`` that is "reference-packed", unless another was wanted.
    """
    if wanted is not None and wanted not in backends:
        raise KernelError(f"backend {wanted!r} is unknown; there are {', '.join(backends)}")
    reasons = []
    candidates = backends.items() if wanted is None else [(wanted, backends[wanted])]
    for name, backend in sorted(candidates, key=lambda item: item[1].cost(weight, activations)):
        if wanted is None and weight.device.type not in backend.unasked:
            reason: str | None = f"on {weight.device.type} it runs only when it is named (backend={name!r})"
        else:
            reason = backend.why_not(weight, activations)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    n, k = weight.shape
    scheme = Scheme(weight.format, activations)
    message = f"no backend runs a {n} x {k} layer in {scheme} on {weight.device} ({'; '.join(reasons)})"
    if not _fallback or wanted is not None:
        raise KernelError(message)
    told = f"{scheme} on {weight.device.type}"
    if told not in _told:
        _told.add(told)
        warnings.warn(f"{message}: falling back to reference-packed, which is slow", stacklevel=3)
    return "reference-packed"
