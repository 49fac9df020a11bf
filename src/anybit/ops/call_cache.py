"""Cached launches, keyed by operand signatures: a repeated call only patches addresses and launches."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from anybit import jit
from anybit.choose.dispatch import forget_with_maps
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.prologue import LinearInput, opened

_MOST = 4096
"""Most cached calls (kinds of layers x token counts). An entry takes a few kilobytes."""
_known: dict[Hashable, Callable[..., Any] | None] = {}
forget_with_maps(_known)


def signature(tensor: Tensor | None) -> Hashable:
    """What a launch depends on in a tensor: everything but its values and address (except 16-byte alignment)."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % 16 == 0


def address(tensor: Tensor | None) -> int:
    """A tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def weight_signature(tensors: list[Tensor]) -> Hashable:
    """The signature of a prepared weight, besides its spec."""
    return tensors[0].get_device(), tuple([tensor.shape for tensor in tensors])


def find(key: Hashable) -> Callable[..., Any] | None:
    """The cached call for a key; None if there is none, or while launches are being recorded."""
    return None if jit.watched() else _known.get(key)


def keep(key: Hashable, make: Callable[[], Callable[..., Any] | None]) -> Callable[..., Any] | None:
    """Cache the result of ``make`` (None included) under a key and return it; None while launches are recorded."""
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
    """A cached call of a backend's ``linear`` (silu: ``linear_silu``) for such operands; None if there is none.

    It takes x (or the prologue's rows), the weight, the bias and, with a residual, gamma and the residual.
    """
    rows, _ = opened(x)
    if rows.get_device() != weight[0].get_device() or rows.data_ptr() % 16:
        return None
    if bias is not None and (bias.dtype != rows.dtype or not bias.is_contiguous() or bias.data_ptr() % 16):
        return None
    return backends[spec.backend].cached_call(x, weight, bias, spec, silu)


def linear_key(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Hashable:
    """The cache key of a call of ``anybit::linear``."""
    return spec, signature(x), weight_signature(weight), signature(bias)


def linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """The op ``anybit::linear``, through the cache."""
    parsed = LinearSpec.parse(spec)
    call = _kept(linear_key(x, weight, bias, spec), x, weight, bias, parsed)
    y: Tensor = backends[parsed.backend].linear(x, weight, bias, parsed) if call is None else call(x, weight, bias)
    return y


def linear_silu(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor | None:
    """A backend's ``linear_silu``, through the cache; None is cached, too."""
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
    """The cached call of a backend without ``linear_silu``."""


def _kept(
    key: Hashable, x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: LinearSpec, silu: bool = False
) -> Callable[..., Any] | None:
    call = find(key)
    return keep(key, lambda: linear_call(x, weight, bias, spec, silu)) if call is None else call
