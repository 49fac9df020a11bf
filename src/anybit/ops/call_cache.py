"""Calls that are kept by what their operands look like: a later one launches at once, with other addresses alone."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from anybit import jit
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.prologue import LinearInput, opened
from anybit.tune.dispatch import forget_with_maps

_MOST = 4096
"""Calls that are kept: of so many kinds of layers and token counts. An entry is a few kilobytes."""
_known: dict[Hashable, Callable[..., Any] | None] = {}
forget_with_maps(_known)


def signature(tensor: Tensor | None) -> Hashable:
    """What a call's launches depend on in a tensor; not its values, nor where it lies."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % 16 == 0


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def weight_signature(tensors: list[Tensor]) -> Hashable:
    """The same for a prepared weight, whose spec says the rest."""
    return tensors[0].get_device(), tuple([tensor.shape for tensor in tensors])


def find(key: Hashable) -> Callable[..., Any] | None:
    """What runs a call that was made before; None where there is no such call, or somebody listens to launches."""
    return None if jit.watched() else _known.get(key)


def keep(key: Hashable, make: Callable[[], Callable[..., Any] | None]) -> Callable[..., Any] | None:
    """What ``make`` gives, asked once for calls that are alike, and kept; None where somebody listens to launches."""
    if jit.watched():
        return None
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = make()
    return _known.get(key)


def linear_call(
    x: LinearInput, weight: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
) -> Callable[..., Any] | None:
    """What runs a backend's ``linear`` of operands of these signatures; None where it has to itself.

    silu: what runs ``linear_silu``.
    Call it with x (or the prologue's rows), the weight, the bias and, with a residual, gamma and the residual.
    """
    rows, _ = opened(x)
    if rows.get_device() != weight[0].get_device() or rows.data_ptr() % 16:
        return None
    if bias is not None and (bias.dtype != rows.dtype or not bias.is_contiguous() or bias.data_ptr() % 16):
        return None
    return backends[spec.backend].cached_call(x, weight, bias, spec, silu)


def linear_key(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Hashable:
    """What a call of ``anybit::linear`` goes by."""
    return spec, signature(x), weight_signature(weight), signature(bias)


def linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """The op ``anybit::linear``: a call like an earlier one launches at once."""
    parsed = LinearSpec.parse(spec)
    call = _kept(linear_key(x, weight, bias, spec), x, weight, bias, parsed)
    y: Tensor = backends[parsed.backend].linear(x, weight, bias, parsed) if call is None else call(x, weight, bias)
    return y


def linear_silu(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor | None:
    """A backend's ``linear_silu``, the same way; that it gives None is remembered, too."""
    key, parsed = ("silu", linear_key(x, weight, bias, spec)), LinearSpec.parse(spec)
    call = _kept(key, x, weight, bias, parsed, silu=True)
    if call is not None:
        known: Tensor | None = call(x, weight, bias)
        return known
    y = backends[parsed.backend].linear_silu(x, weight, bias, parsed)
    if y is None and not jit.watched():
        _known[key] = _nothing
    return y


def _nothing(*_: Any) -> None:
    """What ``linear_silu`` runs of a backend that has none."""


def _kept(
    key: Hashable, x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
) -> Callable[..., Any] | None:
    call = find(key)
    return keep(key, lambda: linear_call(x, weight, bias, spec, silu)) if call is None else call
