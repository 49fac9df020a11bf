"""The parts of fused layers: computed without being called, they refuse hooks, replacements and gradients."""

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from anybit.errors import LayerError

UNFUSE = "call anybit.unfuse(model) first; anybit.accelerate leaves layers that already have hooks unfused"


class Bypassed(nn.Module):
    """Mixed into the class of a fused layer's parts; refuses, at once, what would have no effect."""

    of: type[nn.Module]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" or isinstance(value, nn.Module):
            raise LayerError(f"a fused layer would not use another {name} of {self.of.__name__}: {UNFUSE}")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _again, (self.of,), self.__dict__

    def _refuse_hook(self, *_: object, **__: object) -> NoReturn:
        raise LayerError(f"hooks of {self.of.__name__} in a fused layer would not be called as before: {UNFUSE}")

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


@functools.cache
def _bypassed(kind: type) -> type:
    return type(f"Fused{kind.__name__}", (Bypassed, kind), {"of": kind})


def _again(kind: type) -> object:
    return nn.Module.__new__(_bypassed(kind))


def bypass(module: nn.Module) -> nn.Module:
    """Let a module and its children refuse what would have no effect, until ``restore``. Returns the module."""
    for part in module.modules():
        if not isinstance(part, Bypassed):
            part.__class__ = _bypassed(type(part))  # type: ignore[arg-type]
    return module


def restore(module: nn.Module) -> nn.Module:
    """Undo ``bypass``. Returns the module."""
    for part in module.modules():
        if isinstance(part, Bypassed):
            part.__class__ = part.of  # type: ignore[assignment]
    return module


def hooked(root: nn.Module, name: str = "the layer") -> str | None:
    """The first hooks, or forward set on an instance, of a module and its children, as a phrase; None without any.

    The hooks that transformers installs to record outputs, and this module's, do not count. name: of the root.
    """
    if _global_hooks():
        return "global module hooks"
    for child, module in root.named_modules():
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        homes = [str(getattr(hook, "__module__", "")) for kind in kinds for hook in kind.values()]
        if not all(home.startswith(("transformers.", __name__)) for home in homes):
            return f"hooks of {child or name}"
        if "forward" in module.__dict__:
            return f"the forward set on {child or name}"
    return None


def _global_hooks() -> bool:
    forward = every._global_forward_hooks or every._global_forward_pre_hooks
    return bool(forward or every._global_backward_hooks or every._global_backward_pre_hooks)


def refuse_records(body: PreTrainedModel, _: object, kwargs: Mapping[str, object]) -> None:
    """Raise LayerError, before a fused model runs, for hooks and records of modules that it does not call."""
    if _global_hooks():
        raise LayerError(f"global module hooks would not see the parts of fused layers: {UNFUSE}")
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        asked = kwargs.get(name)
        if asked if asked is not None else getattr(body.config, name, False):
            what = name.removeprefix("output_")
            raise LayerError(f"a fused model has no {what} to record: call anybit.unfuse(model)")


def refuse_gradients(body: nn.Module, _: object, output: ModelOutput) -> ModelOutput | None:
    """A fused model's output, with a gradient that raises LayerError if one would be wanted by anything before it."""
    if not torch.is_grad_enabled():
        return None
    hidden = output[0]
    wanting = next((tensor for tensor in (hidden, *body.parameters()) if tensor.requires_grad), None)
    if wanting is None:
        return None
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="a fused model has no gradients: compile it under torch.no_grad()")
    hidden = torch.compiler.disable(_NoGradient.apply)(hidden, wanting)
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    output["last_hidden_state"] = hidden
    return output


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, wanting: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, _: Tensor) -> NoReturn:
        raise LayerError("a fused model is for inference, and has no gradients: call anybit.unfuse(model) to train")
