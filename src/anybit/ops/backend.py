"""Backends of linear layers: the interface, and how one is chosen."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.errors import KernelError
from anybit.kernels.block.rope import RopeStoreArgs as RopeStoreArgs
from anybit.scheme import ActivationFormat, Scheme, WeightFormat


@dataclass(frozen=True)
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
        text = f"{self.backend}:{self.n}x{self.k}:{Scheme(self.weights, self.activations)}"
        return f"{text}:fused" if self.fused else text

    @staticmethod
    def parse(text: str) -> "LinearSpec":
        """The inverse of ``str``."""
        backend, shape, scheme, *rest = text.split(":")
        n, k = map(int, shape.split("x"))
        parsed = Scheme.parse(scheme)
        return LinearSpec(backend, n, k, parsed.weights, parsed.activations, rest == ["fused"])


class Backend(ABC):
    """One way to run linear layers. Other methods may assume that ``why_not`` returned None.

    unasked: device types on which it may be chosen without being named.
    codes: whether its layers are planned (``ops.product``), with work before them fused into their kernels.
    planes: whether it keeps weights in bit planes.
    norm_tokens: most tokens for which a norm may be fused into the GEMM (16-bit activations).
    """

    name: str
    unasked: tuple[str, ...] = ()
    codes: bool = False
    planes: bool = False
    norm_tokens: int = 0

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why this backend cannot run a layer on its device, as a sentence; None if it can."""
        return None

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """Rank: the backend with the lowest cost runs a layer; among equals, the first registered. 3: after kernels."""
        return 3

    @abstractmethod
    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The tensors that ``linear`` reads."""

    @abstractmethod
    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight: the bit-exact inverse of ``prepare``."""

    def restore_rows(self, tensors: list[Tensor], spec: LinearSpec, rows: slice) -> QuantizedWeight:
        """Some outputs of the packed weight, without restoring the others if those are many."""
        return self.restore(tensors, spec).rows(rows)

    def decoded(self, tensors: list[Tensor]) -> Tensor | None:
        """``reference.decode`` of the weight, if it is kept."""
        return None

    def linear(self, x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Y = x W^T + bias, [..., K] -> [..., N], in x's dtype, unless layers are planned (``codes``)."""
        raise NotImplementedError

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """Embedding lookup: dequantized weight rows ``ids``, int64 [...] -> [..., K] in a float dtype."""
        if not ids.numel():
            return ids.new_empty(*ids.shape, spec.k, dtype=dtype)
        if not ids.is_cuda and (least := int(ids.min())) < 0:  # torch would count from the end
            raise IndexError(f"index {least} is out of range: rows are numbered from 0 to {spec.n - 1}")
        weight = self.restore(tensors, spec).rows(ids.flatten())
        return weight.dequantize(dtype).view(*ids.shape, spec.k)

    def ends_with_silu(self, weight: QuantizedWeight) -> bool:
        """Whether GEMMs of quantized activations end with SiLU at every token count that matters."""
        return False


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
