"""Compile what runs at every step: fused kernels move a fraction of the memory that single operations do."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anybit.errors import one_line
from anybit.layers.experts import Experts
from anybit.models.blocks import find_blocks
from anybit.quantization.learn.student import attend_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Most versions of a function: parts of banks have many shapes.
_MOST = 64

Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function that does the same in fewer kernels."""


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return function


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled by torch.compile, for each of its shapes; as it is if that fails, of which torch warns."""
    compiled = torch.compile(function, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MOST, suppress_errors=True):
            return compiled(*args, **kwargs)

    return call


def can_capture(model: "PreTrainedModel") -> bool:
    """Whether a student's launches are the same at every call: experts read on the host which tokens they get."""
    return not any(isinstance(module, Experts) for module in model.modules())


def compile_blocks(model: "PreTrainedModel") -> None:
    """Compile a model's blocks, all by the same graphs; not their attention, with which capturing a step failed."""
    attend_by(model, "uncompiled", torch.compiler.disable)
    # The first block's input has no gradient, and would need a graph of its own.
    model.get_input_embeddings().register_forward_hook(lambda module, args, found: _with_gradient(found))
    for block in find_blocks(model)[1]:
        block.forward = fused(block.forward)


def _with_gradient(x: Tensor) -> Tensor:
    return x.requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x


def fuser(device: torch.device) -> Fuse:
    """``fused`` on a GPU where torch.compile works (it needs Triton and a C compiler), else ``unfused``."""
    if device.type != "cuda":
        return unfused
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:  # compilers fail in many ways
        warnings.warn(f"torch.compile fails here, so that learning takes longer: {one_line(error)}", stacklevel=2)
        return unfused
    return fused
