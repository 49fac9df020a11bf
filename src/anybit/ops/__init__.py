"""The only door between Python and kernels: every torch.library op of anybit, and what prepares weights for it.

A linear layer is prepared once (``prepare``): a backend takes the packed weight and returns the tensors its kernels
read, in their own layout. From then on ``linear`` is one op, ``anybit::linear``, that torch.compile sees as one node.
"""

import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.hadamard import factor, transform
from anybit.kernels.elementwise import hadamard as hadamard_kernel
from anybit.kernels.gemm.families import Layout
from anybit.ops import bitwise, call_cache, packed
from anybit.ops.autocast import under_autocast
from anybit.ops.backend import Backend, LinearSpec, allow_fallback, backends, choose, register
from anybit.ops.bitwise import Bitwise
from anybit.ops.call_cache import linear as cached_linear
from anybit.ops.call_cache import linear_key
from anybit.ops.fused import hadamard_linear, norm_linear, norm_rotate_store, rotation_refused, silu_linear
from anybit.ops.layouts import MultiLayoutBackend
from anybit.ops.library import COMPLIANT, define
from anybit.ops.packed import PackedTiles
from anybit.ops.reference import ReferenceDecoded, ReferencePacked
from anybit.packing import QuantizedWeight
from anybit.scheme import ActivationFormat

__all__ = [
    "Backend",
    "LinearSpec",
    "Prepared",
    "allow_fallback",
    "backends",
    "choose",
    "ends_with_silu",
    "hadamard",
    "hadamard_linear",
    "linear",
    "norm_linear",
    "norm_rotate_store",
    "prepare",
    "refuse_tangents",
    "register",
    "rotation_refused",
    "rows",
    "silu_linear",
]

_planes, _tiles = Bitwise(), PackedTiles()
register(_planes)
register(_tiles)
# Twice the memory for a few percent: only where it is named.
register(MultiLayoutBackend("bitwise+packed", (_planes, _tiles), (Layout.planes, Layout.tiles_a8), bitwise.TENSORS))
register(
    MultiLayoutBackend("packed+a8", (_tiles, _tiles), (Layout.tiles_a16, Layout.tiles_a8), packed.TENSORS, ("cuda",))
)
register(ReferenceDecoded())
register(ReferencePacked())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight as one backend reads it: its tensors, and the static description that travels with every call.

    number: another for each, however soon after another one is gone.
    """

    tensors: list[Tensor]
    spec_text: str
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def spec(self) -> LinearSpec:
        """The one spec that there is for its text: plans go by its identity, which must not be another's later."""
        return LinearSpec.parse(self.spec_text)

    def __reduce__(self) -> tuple[type["Prepared"], tuple[list[Tensor], str]]:
        return Prepared, (self.tensors, self.spec_text)  # a copy is another one, and has its own number

    def restore(self) -> QuantizedWeight:
        """The packed weight again, exactly as it was before it was prepared."""
        return backends[self.spec.backend].restore(self.tensors, self.spec)

    def in_fused(self, fused: bool) -> "Prepared":
        """The same weight as a product of a fused layer, or not of one."""
        return Prepared(self.tensors, str(replace(self.spec, fused=fused)))


def prepare(
    weight: QuantizedWeight, activations: ActivationFormat, backend: str | None = None, fused: bool = False
) -> Prepared:
    """Put a weight into the layout of a backend, on the device it is on.

    backend: a name out of ``backends``; None takes the first that can run this layer on this device. fused: it is a
    product of a fused layer.
    Raises KernelError, with the reasons of all, if none can; LayerError for an activation order of other groups.
    """
    name = choose(weight, activations, backend)
    n, k = weight.shape
    _check_groups(weight)
    spec = LinearSpec(name, n, k, weight.format, activations, fused)
    return Prepared(backends[name].prepare(weight, activations), str(spec))


def ends_with_silu(weight: QuantizedWeight, activations: ActivationFormat, backend: str | None = None) -> bool:
    """Whether products of a layer with coded activations may end with SiLU, so that rows of gate and up lie in turn."""
    try:
        return activations.quantized and backends[choose(weight, activations, backend)].ends_with_silu(weight)
    except KernelError:  # which ``prepare`` raises, too
        return False


def prepare_rotation(k: int, device: torch.device) -> Tensor | None:
    """Put what rotations of k values read onto a GPU: in a CUDA graph that is being captured nothing can be copied.

    Returns it: it is kept, and read wherever such inputs are rotated. None where nothing is needed.
    """
    return hadamard_kernel.signs(factor(k)[0], device) if device.type == "cuda" else None


def _check_groups(weight: QuantizedWeight) -> None:
    """Raise LayerError where an activation order names a group that is not there: kernels would read beyond scales."""
    if weight.group_index is None or weight.group_index.is_meta:
        return
    groups = weight.scale.shape[1]
    least, most = (int(end) for end in weight.group_index.aminmax())
    if least < 0 or most >= groups:
        raise LayerError(f"group_index holds groups {least} to {most}, and the layer has 0 to {groups - 1}")


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
    """Y = x W^T + bias, through the op ``anybit::linear``: x float [..., K], bias float [N] -> y [..., N] in x's dtype.

    Where nothing but this call looks at the op, a call like an earlier one launches at once. Kernels take
    float16 and bfloat16. Raises KernelError (LayerError on the reference) before anything is launched for
    an x of another dtype, width or device than the prepared weight takes; kernels also for such a bias.
    """
    if _alone(x):
        call = call_cache.find(linear_key(x, prepared.tensors, bias, prepared.spec_text))
        if call is not None:
            found: Tensor = call(x, prepared.tensors, bias)
            return found
    y: Tensor = torch.ops.anybit.linear(x, prepared.tensors, bias, prepared.spec_text)
    return y


def refuse_tangents(x: Tensor) -> None:
    """Raise LayerError for an x that forward-mode derivatives (``torch.func.jvp``) go through: ops would drop them."""
    if forward_ad._current_level >= 0 and isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
        raise LayerError(
            "forward-mode derivatives of x would be lost here: call a QuantLinear, which has them, of a model that is "
            "not fused"
        )


def _alone(x: Tensor) -> bool:
    """Whether the op would go to its kernels at once: no compiler, mode, transform, autocast, profiler or gradient."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.requires_grad:
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or torch._C._is_tracing()
        or torch.autograd.profiler._is_profiler_enabled
        or jit.watched()
    )


def _linear_fake(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], LinearSpec.parse(spec).n)


def rows(ids: Tensor, prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """The weights of outputs ``ids``, int64 [...] -> [..., K] in a float dtype: what an embedding gives.

    On a GPU dtype is float16 or bfloat16, and a row that is not there is NaN; on a CPU IndexError says so.
    """
    found: Tensor = torch.ops.anybit.rows(ids, prepared.tensors, dtype, prepared.spec_text)
    return found


def _rows(ids: Tensor, weight: list[Tensor], dtype: torch.dtype, spec: str) -> Tensor:
    if ids.device != weight[0].device:
        raise KernelError(f"ids are on {ids.device}, and the table of rows on {weight[0].device}: move one of them")
    parsed = LinearSpec.parse(spec)
    return backends[parsed.backend].rows(ids, weight, parsed, dtype)


def _rows_fake(ids: Tensor, weight: list[Tensor], dtype: torch.dtype, spec: str) -> Tensor:
    return ids.new_empty(*ids.shape, LinearSpec.parse(spec).k, dtype=dtype)


def hadamard(x: Tensor) -> Tensor:
    """Rotate vectors [..., K] by the orthogonal Hadamard matrix of their size, in x's dtype (``anybit.hadamard``)."""
    y: Tensor = torch.ops.anybit.hadamard(x)
    return y


def _hadamard_cuda(x: Tensor) -> Tensor:
    # Without a kernel for the size, the type or the device: the same in torch's operations.
    problem = hadamard_kernel.Problem(1, x.shape[-1], x.dtype, Device.of(x))
    return transform(x) if hadamard_kernel.why_not(problem) else hadamard_kernel.transform(x)


# A Library rather than custom_op: its calls cost a few microseconds less, and decoding makes hundreds of them a token.
_library = torch.library.Library("anybit", "DEF")
define(
    _library, "linear(Tensor x, Tensor[] weight, Tensor? bias, str spec) -> Tensor", _linear_fake, cached_linear,
    tags=COMPLIANT,
)  # fmt: skip
define(
    _library, "rows(Tensor ids, Tensor[] weight, ScalarType dtype, str spec) -> Tensor", _rows_fake, _rows,
    tags=COMPLIANT,
)  # fmt: skip
define(_library, "hadamard(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape), transform, _hadamard_cuda, COMPLIANT)
under_autocast(_library, "linear", "hadamard")
