"""Fake quantization of activations, keys and values: rounded as at inference, with straight-through gradients."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from anybit.cache.kvcache import hadamard as head_rotation
from anybit.codes import hadamard
from anybit.codes.reference import _steps
from anybit.kernels.attention import kv_page
from anybit.scheme import ActivationFormat, KVFormat

Hook = Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A forward pre-hook."""


class RoundedThrough(torch.autograd.Function):
    """Quantize and dequantize activations [..., K]; gradients pass straight through, plus a term for the range.

    Rounding errors are proportional to the step size, and so to the token's range: this term shrinks ranges that cost
    more than they are worth.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, format: ActivationFormat) -> Tensor:
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
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of the activations."""
        lost, weights, places = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = gradient.reshape(lost.shape)
        cost = (rows * lost).sum(1, dtype=torch.float32)
        # Compared, not scattered: compilers fuse it with what is around it.
        at = torch.arange(rows.shape[1], device=rows.device)
        for place, part in zip(places.unbind(1), (weights * cost[:, None]).to(rows.dtype).unbind(1), strict=True):
            rows = rows + torch.where(at == place[:, None], part[:, None], 0)
        return rows.view(gradient.shape), None


def rounded_through(format: ActivationFormat) -> Hook:
    """A forward pre-hook that fake-quantizes a layer's input (``RoundedThrough``)."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rounded: Tensor = RoundedThrough.apply(args[0], format)  # type: ignore[no-untyped-call]
        return (rounded, *args[1:])

    return hook


class Rotation:
    """A forward pre-hook that rotates a layer's input, as ``hadamard.transform``, by a GEMM with its own matrix.

    torch.compile would make constants of matrices that a function caches.
    """

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.signs = (hadamard.transform(torch.eye(size)) * size**0.5).round().to(device, dtype)
        self.scale = size**-0.5

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The rotated input, and the other args."""
        return ((args[0] @ self.signs.to(args[0].dtype) * self.scale).to(args[0].dtype), *args[1:])


class Shared:
    """A chain of forward pre-hooks, run once for all layers that read the same input."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = hooks
        self._seen: Tensor | None = None
        self._made: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The args after all hooks; reuses the last result for the same input."""
        if torch.compiler.is_compiling():  # which finds the repeats itself
            return self._run(module, args)
        if self._seen is not args[0] or self._made is None:
            self._seen, self._made = args[0], self._run(module, args)[0]
        return (self._made, *args[1:])

    def _run(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for hook in self.hooks:
            args = hook(module, args)
        return args


_rotation = cache(head_rotation)


def keys_and_values_through(key: Tensor, value: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Fake-quantize keys and values [B, heads, L, dim], all but the newest tokens, if they do not fill a group."""
    rotation = _rotation(key.shape[-1], key.dtype, key.device) if format.rotate else None
    by_channel = format.key_axis == "channel"

    def through(x: Tensor, bits: int, by_channel: bool) -> Tensor:
        if bits == 16:
            return x
        y = x.detach() if rotation is None else x.detach() @ rotation
        group = format.group if by_channel else min(format.group, y.shape[-1])
        whole = y.shape[-2] // group * group if by_channel else y.shape[-2]
        runs = y[..., :whole, :].unflatten(-2, (-1, group)) if by_channel else y.unflatten(-1, (-1, group))
        codes, scale, zero = kv_page.quantize(runs, bits, -2 if by_channel else -1)
        stored = (codes * scale + zero).to(y.dtype).reshape(*y.shape[:-2], whole, y.shape[-1])
        rounded = torch.cat([stored, y[..., whole:, :]], dim=-2)
        if rotation is not None:
            rounded = rounded @ rotation.T
        return x + (rounded - x).detach()

    return through(key, format.key_bits, by_channel), through(value, format.value_bits, False)
