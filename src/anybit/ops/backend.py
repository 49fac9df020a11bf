"""Backends of linear layers: the interface, and how one is chosen."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.errors import KernelError
from anybit.kernels.block.rope import RopeStoreArgs as RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs as RopePagesArgs
from anybit.ops.prologue import LinearInput
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

CachedCall = Callable[..., Any]
"""(x, a prepared weight's tensors, bias) -> y; for a prologue with a residual (..., gamma, residual) -> (y, sum)."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Everything static about a prepared linear layer; ops take it as a string, since they cannot take objects.

    fused: part of a fused layer (``anybit.fuse``), whose GEMMs run between small kernels.
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
    if found is None:  # one object per text, even with several threads: plans are cached by its identity
        found = _specs.setdefault(text, _parsed_spec(text))
    return found


def _parsed_spec(text: str) -> LinearSpec:
    backend, shape, scheme, *rest = text.split(":")
    n, k = map(int, shape.split("x"))
    parsed = Scheme.parse(scheme)
    return LinearSpec(backend, n, k, parsed.weights, parsed.activations, rest == ["fused"])


class Backend(ABC):
    """One way to run linear layers. Other methods may assume that ``why_not`` returned None.

    unasked: device types on which it may be chosen without being named.
    codes: whether ``linear`` takes an ``ActivationPrologue`` (work fused into its quantize-and-pack kernel).
    norm_tokens: most tokens for which ``norm_linear`` may fuse the norm into the GEMM (16-bit activations).
    """

    name: str
    unasked: tuple[str, ...] = ()
    codes: bool = False
    norm_tokens: int = 0

    @abstractmethod
    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why this backend cannot run a layer on its device, as a sentence; None if it can."""

    @abstractmethod
    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """Rank: the backend with the lowest cost runs a layer; among equals, the first registered."""

    @abstractmethod
    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The tensors that ``linear`` reads."""

    @abstractmethod
    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight: the bit-exact inverse of ``prepare``."""

    @abstractmethod
    def linear(self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Y = x W^T + bias, [..., K] -> [..., N], in x's dtype.

        x: may be an ``ActivationPrologue`` that makes [M, K], if ``codes``.
        """

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """Embedding lookup: dequantized weight rows ``ids``, int64 [...] -> [..., K] in a float dtype."""
        if not ids.numel():
            return ids.new_empty(*ids.shape, spec.k, dtype=dtype)
        if not ids.is_cuda and (least := int(ids.min())) < 0:  # torch would count from the end
            raise IndexError(f"index {least} is out of range: rows are numbered from 0 to {spec.n - 1}")
        weight = self.restore(tensors, spec).rows(ids.flatten())
        return weight.dequantize(dtype).view(*ids.shape, spec.k)

    def ends_with_silu(self, weight: QuantizedWeight) -> bool:
        """Whether ``linear_silu`` works for quantized activations at every token count that matters."""
        return False

    def linear_silu(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor | None:
        """``linear`` with a SiLU epilogue: silu(gate) * up [..., N / 2], outputs interleaved eight by eight.

        None, without any launch, if the kernel has no such epilogue.
        """
        return None

    def cached_call(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
    ) -> CachedCall | None:
        """A fast, unchecked ``linear`` (silu: ``linear_silu``) for operands like these; None if there is none.

        Checks these operands as ``linear`` does. The result takes operands of the same ``call_cache.signature`` and any
        weight of the same spec.
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
        """(linear of RMSNorm(x + residual), x + residual) in one launch; None if this backend has no such kernel.

        silu: the first is silu(gate) * up [..., N / 2], of outputs interleaved eight by eight.
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
        """(queries after RoPE, x + residual) of ``norm_linear`` as QKV, storing K and V as ``step`` says; or None."""
        return None


backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend; among equal costs the first registered wins. Raises KernelError for a name already taken."""
    if backend.name in backends:
        raise KernelError(f"a backend named {backend.name!r} is already registered")
    backends[backend.name] = backend


_fallback = False
_told: set[str] = set()


def allow_fallback(allowed: bool = True) -> None:
    """Allow layers that no kernel supports to run on the slow, exact reference instead of raising KernelError.

    Off by default. Warns once per scheme.
    """
    global _fallback
    _fallback = allowed


def choose(weight: QuantizedWeight, activations: ActivationFormat, wanted: str | None = None) -> str:
    """The name of the backend for a layer: the one wanted, else the cheapest that can run it.

    Raises KernelError for an unknown name, and if none can, with the reason of each; after ``allow_fallback``, returns
    "reference-packed" instead unless a backend was named.
    """
    if wanted is not None and wanted not in backends:
        raise KernelError(f"backend {wanted!r} is unknown; there are {', '.join(backends)}")
    reasons = []
    candidates = backends.items() if wanted is None else [(wanted, backends[wanted])]
    for name, backend in sorted(candidates, key=lambda item: item[1].cost(weight, activations)):
        if wanted is None and weight.device.type not in backend.unasked:
            reason: str | None = f"on {weight.device.type} it runs only if named (backend={name!r})"
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
