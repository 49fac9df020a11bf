"""Fake quantization of activations during training: rounded as at inference, with straight-through gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.codes.reference import _steps
from anybit.scheme import ActivationFormat

Hook = Callable[..., Any]


class RoundedThrough(torch.autograd.Function):
    """Quantize and dequantize activations [..., K]; gradients pass straight through, plus a term for the range.

    Rounding errors are proportional to the step size, and so to the token's range: this term shrinks ranges that cost
    more than they are worth.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: ActivationFormat) -> Tensor:
        """The dequantized activations, in x's dtype."""
        rows = x.reshape(-1, x.shape[-1]).float()
        steps, scale, _ = _steps(rows, format)
        rounded = steps.mul_(scale[:, None])
        if format.code == "asym":
            (high, top), (low, bottom) = rows.max(1), rows.min(1)
            signs = torch.stack([(high > 0).float(), -(low < 0).float()], dim=1)
            reach = high.clamp(min=0) - low.clamp(max=0)
            places = torch.stack([top, bottom], dim=1)
        else:
            reach, top = rows.abs().max(1)
            places = top[:, None]
            signs = rows.gather(1, places).sign()
        lost = (rounded - rows).to(torch.bfloat16 if rows.is_cuda else torch.float32)
        ctx.save_for_backward(lost, signs / reach.clamp(min=torch.finfo(torch.float32).tiny)[:, None], places)
        return rounded.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of the activations."""
        lost, weights, places = ctx.saved_tensors
        rows = gradient.reshape(lost.shape)
        cost = (rows * lost).sum(1, dtype=torch.float32)
        found = rows.scatter_add(1, places, (weights * cost[:, None]).to(rows.dtype))
        return found.view(gradient.shape), None


def rounded_through(format: ActivationFormat) -> Hook:
    """A forward pre-hook that fake-quantizes a layer's input (``RoundedThrough``)."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rounded: Tensor = RoundedThrough.apply(args[0], format)  # type: ignore[no-untyped-call]
        return (rounded, *args[1:])

    return hook


class Shared:
    """A chain of forward pre-hooks, run once for all layers that read the same input."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = hooks
        self._seen: Tensor | None = None
        self._made: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The args after all hooks; reuses the last result for the same input."""
        if self._seen is not args[0] or self._made is None:
            made = args
            for hook in self.hooks:
                made = hook(module, made)
            self._seen, self._made = args[0], made[0]
        return (self._made, *args[1:])
