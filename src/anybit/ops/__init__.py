"""The only interface between Python and kernels: anybit's torch.library ops, and the preparation of weights for them.

A linear layer is prepared once (``prepare``): a backend converts the packed weight to the layout its kernels read.
After that ``linear`` is one op, ``anybit::linear``, a single node for torch.compile.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anybit.codes.hadamard import factor, transform
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.kernels.block import hadamard as hadamard_kernel
from anybit.ops import product
from anybit.ops.backend import LinearSpec, register
from anybit.ops.backend import allow_fallback as allow_fallback
from anybit.ops.backend import backends as backends
from anybit.ops.backend import choose as choose
from anybit.ops.bitwise import Bitwise
from anybit.ops.fused import hadamard_linear as hadamard_linear
from anybit.ops.fused import norm_linear as norm_linear
from anybit.ops.fused import norm_rotate_store as norm_rotate_store
from anybit.ops.fused import rotation_refused as rotation_refused
from anybit.ops.fused import silu_linear as silu_linear
from anybit.ops.library import COMPLIANT, calls, define, under_autocast
from anybit.ops.packed import PackedTiles
from anybit.ops.reference import ReferenceDecoded, ReferencePacked
from anybit.scheme import ActivationFormat

register(Bitwise())
register(PackedTiles())
register(ReferenceDecoded())
register(ReferencePacked())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight in a backend's layout: its tensors, and its spec, whose text is passed to every op call.

    number: unique for the life of the process (an ``id`` may be reused).  alone: ``linear`` can run it.
    """

    alone: ClassVar[bool] = True
    tensors: list[Tensor]
    spec: LinearSpec
    spec_text: str = field(init=False)
    number: int = field(init=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec_text", str(self.spec))

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, (self.tensors, self.spec)  # a copy gets its own number

    def restore(self) -> QuantizedWeight:
        """The packed weight, exactly as it was before ``prepare``."""
        return backends[self.spec.backend].restore(self.tensors, self.spec)

    def leave(self) -> None:
        """Called when a layer no longer runs by this, or by its own forward and bias."""

    def in_fused(self, fused: bool) -> "Prepared":
        """The same weight, marked as part of a fused layer or not."""
        return Prepared(self.tensors, replace(self.spec, fused=fused))


def prepare(
    weight: QuantizedWeight, activations: ActivationFormat, backend: str | None = None, fused: bool = False
) -> Prepared:
    """Convert a weight to the layout of a backend, on the weight's device.

    backend: a name from ``backends``; None takes the cheapest that can run this layer on this device.
    fused: the layer is part of a fused layer.
    Raises KernelError, with every backend's reason, if none can; LayerError for an activation order of missing groups.
    """
    name = choose(weight, activations, backend)
    n, k = weight.shape
    if weight.group_index is not None and not weight.group_index.is_meta:  # else kernels would read out of bounds
        groups, (least, most) = weight.scale.shape[1], map(int, weight.group_index.aminmax())
        if least < 0 or most >= groups:
            raise LayerError(f"group_index holds groups {least} to {most}, and the layer has 0 to {groups - 1}")
    spec = LinearSpec(name, n, k, weight.format, activations, fused)
    return Prepared(backends[name].prepare(weight, activations), spec)


def ends_with_silu(weight: QuantizedWeight, activations: ActivationFormat, backend: str | None = None) -> bool:
    """Whether GEMMs of a layer with quantized activations have a SiLU epilogue, for interleaved gate and up rows."""
    try:
        return activations.quantized and backends[choose(weight, activations, backend)].ends_with_silu(weight)
    except KernelError:  # ``prepare`` will raise it again
        return False


def prepare_rotation(k: int, device: torch.device) -> Tensor | None:
    """Copy the constants of rotations of k values to a GPU before a CUDA graph is captured, which cannot copy them.

    Returns them (they are cached and used by all such rotations); None if there are none.
    """
    return hadamard_kernel.signs(factor(k)[0], device) if device.type == "cuda" else None


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
    """Y = x W^T + bias, through the op ``anybit::linear``: x float [..., K], bias float [N] -> y [..., N] in x's dtype.

    Kernels take float16 and bfloat16. Raises KernelError (LayerError on the reference), before any launch, for an x
    whose dtype, width or device does not fit the prepared weight; on a GPU, also for such a bias.
    """
    y: Tensor = calls.linear(x, prepared.tensors, bias, prepared.spec_text)
    return y


def refuse_tangents(x: Tensor) -> None:
    """Raise LayerError for an x that forward-mode derivatives (``torch.func.jvp``) go through: ops would drop them."""
    if forward_ad._current_level >= 0 and isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
        raise LayerError(
            "forward-mode derivatives of x would be lost here: call a QuantLinear, which has them, of a model that is "
            "not fused"
        )


def rows(ids: Tensor, prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """Embedding lookup: dequantized weight rows ``ids``, int64 [...] -> [..., K] in a float dtype.

    On a GPU dtype must be float16 or bfloat16, and an id out of range gives NaN; on a CPU it raises IndexError.
    """
    found: Tensor = calls.rows(ids, prepared.tensors, dtype, prepared.spec_text)
    return found


def _rows(ids: Tensor, weight: list[Tensor], dtype: torch.dtype, spec: str) -> Tensor:
    if ids.device != weight[0].device:
        raise KernelError(f"ids are on {ids.device}, and the embedding is on {weight[0].device}: move one of them")
    parsed = LinearSpec.parse(spec)
    return backends[parsed.backend].rows(ids, weight, parsed, dtype)


def hadamard(x: Tensor) -> Tensor:
    """Rotate vectors [..., K] by the orthogonal Hadamard matrix of their size, in x's dtype (``codes.hadamard``)."""
    y: Tensor = calls.hadamard(x)
    return y


def _hadamard_cuda(x: Tensor) -> Tensor:
    # Without a kernel for the size, dtype or device: the same in torch ops.
    problem = hadamard_kernel.Problem(1, x.shape[-1], x.dtype, Device.of(x))
    return transform(x) if hadamard_kernel.why_not(problem) else hadamard_kernel.transform(x)


# A Library rather than custom_op: calls cost a few microseconds less, and decoding makes hundreds of them per token.
_library = torch.library.Library("anybit", "DEF")
define(
    _library, "linear(Tensor x, Tensor[] weight, Tensor? bias, str spec) -> Tensor",
    lambda x, weight, bias, spec: x.new_empty(*x.shape[:-1], LinearSpec.parse(spec).n), product.linear, tags=COMPLIANT,
)  # fmt: skip
define(
    _library, "rows(Tensor ids, Tensor[] weight, ScalarType dtype, str spec) -> Tensor",
    lambda ids, weight, dtype, spec: ids.new_empty(*ids.shape, LinearSpec.parse(spec).k, dtype=dtype), _rows,
    tags=COMPLIANT,
)  # fmt: skip
define(_library, "hadamard(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape), transform, _hadamard_cuda, COMPLIANT)
under_autocast(_library, "linear", "hadamard")
