"""Repeat the launches of one layer for the other layers of a step, with their tensors' addresses.

Layers with the same shapes launch the same kernels on the same grids; only a few addresses differ. So the first layer
works out its launches (view, problem, config, parameters), and the others fill in addresses. Launches are good for one
step: they hold its table, lengths, token counts and scratch memory.
"""

from collections.abc import Callable, Hashable
from functools import partial

from torch import Tensor

from anybit import jit
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.decode import decode
from anybit.kernels.attention.kv_quantize import kv_quantize
from anybit.kernels.attention.kv_unpack import kv_unpack
from anybit.ops import kv
from anybit.ops.call_cache import address, signature
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import RowLayout

Places = dict[str, int]
"""The addresses of a layer's tensors, by their names in kernel parameters."""
Again = Callable[[Places], None]
_MOVES: dict[type, tuple[str, ...]] = {
    kv_quantize.Params: ("pages", "residual", "k", "v"),
    decode.Params: ("pages", "residual", "q", "out", "sinks"),
    kv_unpack.Params: ("pages", "k", "v"),
}
"""The parameters that differ from layer to layer."""


def key_of(
    rows: RowLayout, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, masks: Masks, capacity: int
) -> Hashable:
    """Everything that a layer's launches depend on besides the step; None if each layer has to launch by itself.

    That is so in graph captures, which have a workspace of their own, with ALiBi, and while launches are recorded.
    """
    stream, capture = kv.stream_of(q.device)
    if capture or masks.alibi is not None or jit.watched():
        return None
    how = masks.scale, masks.window, masks.softcap, masks.sinks is None, capacity, stream
    return rows, how, *[signature(x) for x in (pages, q, k, v, out)]


def places_of(pages: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None) -> Places:
    """The addresses of a layer's tensors; sinks: from ``kv.in_log2``, to be kept alive until all is launched."""
    tensors = {"pages": pages, "residual": pages, "q": q, "k": k, "v": v, "out": out}
    return {name: x.data_ptr() for name, x in tensors.items()} | {"sinks": address(sinks)}


def first(call: Callable[[], object], places: Places) -> list[Again] | None:
    """Run a call of ``ops.kv_rows`` and return its launches, to be repeated at other addresses.

    None if other layers cannot repeat them: where kernels read copies of the layer's tensors, or check them.
    """
    if kv_page.debugging():
        call()
        return None
    found, own = list[Again](), True
    for launch in jit.record(call):
        params, names = vars(launch.params), _MOVES[type(launch.params)]
        own &= all(address(params[x]) == places[x] for x in names if x != "sinks")
        scratch = [params[x] for x in params.keys() - names]
        found.append(partial(_again, launch.changing(*names), names, scratch))
    return found if own else None


def _again(start: Callable[..., None], names: tuple[str, ...], _scratch: list[object], places: Places) -> None:
    start(*[places[name] for name in names])
