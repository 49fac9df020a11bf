"""Definition of torch.library ops: schema, fake, an implementation per device, and casts under autocast."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
COMPLIANT = (torch.Tag.pt2_compliant_tag,)
_PASSED_ON = frozenset((Tensor, torch.nn.Parameter, list, bool, int, float, str, torch.dtype, type(None)))
"""Types of arguments that the dispatcher passes on as they are: it converts others, or asks a subclass of tensors."""
calls = SimpleNamespace()
"""Every op by its name, as ``torch.ops.anybit``; in plain eager mode on a GPU, a call is one of the implementation."""


def define(
    library: torch.library.Library, signature: str, fake: Function, cpu: Function, cuda: Function | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:  # fmt: skip
    """Define an op of anybit. fake: the meta implementation.  cuda: the implementation on GPUs; None: ``cpu``."""
    library.define(signature, tags=tags)
    name, on_gpu = signature.partition("(")[0], cuda or cpu
    library.impl(name, cpu, "CPU")
    library.impl(name, on_gpu, "CUDA")
    torch.library.register_fake(f"anybit::{name}", fake)
    op = getattr(torch.ops.anybit, name)

    def call(x: Tensor, *rest: Any) -> Any:
        return on_gpu(x, *rest) if x.is_cuda and alone(x, *rest) else op(x, *rest)

    setattr(calls, name, call)


def alone(x: Tensor, *rest: Any) -> bool:
    """Whether torch's dispatcher can be bypassed: no compiler, mode, transform, autocast, profiler or gradient, and no
    argument that it would change.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or not _PASSED_ON.issuperset(map(type, rest)):
        return False
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in (x, *rest)):
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or torch._C._is_tracing()
        or torch.autograd.profiler._is_profiler_enabled
    )


def under_autocast(library: torch.library.Library, *names: str) -> None:
    """Register autocast kernels for ops of a library, by name; their first argument must be the activations.

    Float32 activations are cast to autocast's dtype, as for ``nn.Linear``. Autocast is disabled inside the op: the
    reference must not have its sums rounded.
    """

    def outside(op: Function, device: str) -> Function:
        def run(x: Tensor, *rest: object) -> object:
            wanted = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return op(x.to(wanted) if x.dtype == torch.float32 else x, *rest)

        return run

    for name in names:
        for device in ("cpu", "cuda"):
            library.impl(name, outside(getattr(torch.ops.anybit, name), device), f"Autocast{device.upper()}")
