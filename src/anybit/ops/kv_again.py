"""Launches of one layer of a step over rows, made again for another layer with its tensors.

Layers that look alike launch the same, but for where a few tensors lie. So the first finds out what it launches (view,
problem, config, parameters), and the others only fill in addresses. Whoever keeps launches keeps them for one step: its
table, lengths and tokens are in them, and so is scratch memory.
"""

from collections.abc import Callable, Hashable
from functools import partial

from torch import Tensor

from anybit import jit
from anybit.kernels.attention import decode, kv_page, kv_quantize, kv_unpack
from anybit.ops import kv
from anybit.ops.call_cache import address, signature
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import RowLayout

Places = dict[str, int]
"""Where a layer's tensors lie, by the names that kernels have for them."""
Again = Callable[[Places], None]
_MOVES: dict[type, tuple[str, ...]] = {
    kv_quantize.Params: ("pages", "residual", "k", "v"),
    decode.Params: ("pages", "residual", "q", "out", "sinks"),
    kv_unpack.Params: ("pages", "k", "v"),
}
"""What of a launch's parameters lies elsewhere in another layer."""


def key_of(
    rows: RowLayout, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, masks: Masks, capacity: int
) -> Hashable:
    """What a layer's launches depend on beside the step; None where each layer has to launch for itself.

    That is in a capture, whose workspace is its own, with ALiBi, and where somebody listens to launches.
    """
    stream, capture = kv.stream_of(q.device)
    if capture or masks.alibi is not None or jit.watched():
        return None
    how = masks.scale, masks.window, masks.softcap, masks.sinks is None, capacity, stream
    return rows, how, *[signature(x) for x in (pages, q, k, v, out)]


def places_of(pages: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None) -> Places:
    """Where the tensors of a layer lie; sinks: as ``kv.in_log2`` gives them, to be kept until all is launched."""
    tensors = {"pages": pages, "residual": pages, "q": q, "k": k, "v": v, "out": out}
    return {name: x.data_ptr() for name, x in tensors.items()} | {"sinks": address(sinks)}


def first(call: Callable[[], object], places: Places) -> list[Again] | None:
    """Run a call of ``ops.kv_rows``, and return its launches for other places; None where they have to be found anew.

    That is where kernels read copies of the layer's tensors, or are checked.
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
