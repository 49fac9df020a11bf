"""The KV cache's kernels: launches on one layer's tensors, and the torch.library ops for torch.compile.

Kernels take a layer as a ``LayerView`` (tensors and sizes; ``kvcache`` documents their contents). Ops take only tensors
and numbers, so ``anybit::kv_write`` and ``anybit::kv_decode`` name the cache by its number (``live``), next to the
tensors they read and write. ``anybit.cache.attention`` registers what decodes (``implement``). Lengths are counted
beforehand, outside compiled code (``KVCache.extend``).
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.jit import Slot
from anybit.jit.driver import capture_of
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.decode import decode as kernels
from anybit.kernels.attention.decode.decode import MOST_QUERIES as MOST_QUERIES
from anybit.kernels.attention.decode.decode import Config as Config
from anybit.kernels.attention.decode.decode import Problem as Problem
from anybit.kernels.attention.decode.decode import default as default
from anybit.kernels.attention.kv_page import PageLayout
from anybit.kernels.attention.kv_quantize import kv_quantize
from anybit.ops.checks import copy_of
from anybit.ops.library import calls, define
from anybit.ops.plans import PLANS, key_of, new_plan


@dataclass(frozen=True)
class Masks:
    """Modifications of attention logits, all off by default; applied in the order scale, softcap, alibi, mask, sink.

    scale: factor of q.k (default 1 / sqrt(head_dim)).  window: each token sees itself and the ``window - 1`` before it.
    softcap: logits become softcap * tanh(logit / softcap).  sinks: float32 [heads], one logit per head that only adds
    to the denominator.  alibi: float32 [heads], slopes: logit += slope * (key position - query position).
    Raises LayerError for a window below 1 or a softcap that is not positive.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise LayerError(f"a sliding window must have at least 1 token, not {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise LayerError(f"softcap must be positive, not {self.softcap}")


NO_MASKS = Masks()


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of a KV cache, as kernels read it.

    pages: uint8 [pages, kv_heads, page_bytes].  residual: 16-bit [sequences, kv_heads, 2, ring * head_dim].
    table: int32 [sequences, pages per sequence].  lengths: int32 [sequences].  ring, window, capacity: tokens.
    front, slots: if the residual is stored in ``front`` blocks of the pool before a sequence's pages, ``slots`` tokens
    each (``kernels.attention.kv_rows``); ``residual`` then is a 16-bit view of the pool.
    values: of a plain cache, whose pages are keys and values, 16-bit [pages, page tokens, kv_heads, head_dim] with
    equal strides; it has no residual.
    """

    layout: PageLayout
    pages: Tensor
    residual: Tensor | None
    table: Tensor
    lengths: Tensor
    ring: int
    window: int
    capacity: int
    front: int = 0
    slots: int = 0
    values: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.pages.shape[-2]

    @property
    def bf16(self) -> bool:
        """Whether 16-bit tokens are bfloat16 rather than float16."""
        return (self.pages if self.residual is None else self.residual).dtype == torch.bfloat16

    def params(self) -> dict[str, Any]:
        """The parameters that all kernels have of a layer."""
        return {
            "pages": self.pages, "table": self.table, "lengths": self.lengths, "kv_heads": self.kv_heads,
            "table_width": self.table.stride(0), "ring": self.ring, "pages_count": self.pages.shape[0],
            "page_stride": self.pages.stride(0) * self.pages.element_size(),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ragged:
    """New tokens, a different number per sequence: those of sequence i are starts[i] .. starts[i + 1] - 1.

    starts: int32 [sequences + 1].  most: upper bound of new tokens per sequence.
    """

    starts: Tensor
    most: int


# -------- storing tokens


_STORED = ("v", "pages", "residual", "table", "lengths", "sequences")


def store(view: LayerView, rows: Tensor | None, k: Tensor, v: Tensor, layer: int = 0) -> None:
    """Store the newest tokens (already counted in ``lengths``) in the residual, and pack full windows into pages.

    k, v: [batch, tokens, kv_heads, head_dim] in the residual's dtype.  rows: int32 [batch], sequence indices; None for
    0, 1, 2 ...  layer: for errors.  One launch (two for a prompt), at fixed addresses and without synchronization.
    Raises KernelError if no kernel supports the layout.
    """
    if kv_page.debugging():
        run(storing(view, rows, k, v), view.pages.get_device(), layer)
        return
    tensors = v, view.pages, view.residual, view.table, view.lengths, rows
    cache = view.layout, view.ring, view.window, view.pages.shape, view.table.shape  # its tensors are dense
    key = key_of(("kv_store", *cache), (k, v, rows))
    plan = PLANS.get(key)
    if plan is None:
        dense = _aligned(k, 8), _aligned(v, 8)
        if dense[0] is not k or dense[1] is not v:
            store(view, rows, *dense, layer)
            return
        plan = PLANS[key] = new_plan((), k.device, *_STORED)
        slots: dict[str, Any] = {
            name: Slot(name) for name, one in zip(_STORED, tensors, strict=True) if one is not None
        }
        for one in storing(view, rows, k, v):
            assert isinstance(one.params, kv_quantize.Params)
            plan.launches.append(replace(one, params=replace(one.params, k=Slot("x"), **slots)))
    plan.run([0, 0, k.data_ptr(), 0, *[0 if one is None else one.data_ptr() for one in tensors]])


def storing(view: LayerView, rows: Tensor | None, k: Tensor, v: Tensor) -> list[jit.Launch]:
    """The launches of ``store``."""
    step = k.shape[1] <= view.ring - view.window + 1
    return [
        _quantize(view, rows, k.shape[0], k.shape[1], (k, v), packs=packs, keeps=keeps)
        for packs, keeps in (((True, True),) if step else ((True, False), (False, True)))
    ]


def stored(
    view: LayerView, k: Tensor, v: Tensor, new: Ragged | None = None, *, packs: bool = True, keeps: bool = True
) -> jit.Launch:
    """The launch of ``kv_rows.store``: k, v [tokens, kv_heads, head_dim]; new: None for one of each sequence."""
    if new is None:
        return _quantize(view, None, len(k), 1, (k[:, None], v[:, None]))
    batch = len(new.starts) - 1
    return _quantize(view, None, batch, new.most, (k[None], v[None]), new.starts, packs=packs, keeps=keeps)


def pack(view: LayerView, rows: Tensor | None, batch: int, tokens: int, layer: int = 0) -> None:
    """Pack the windows that the newest ``tokens`` tokens completed; all their tokens are already in the residual."""
    run([_quantize(view, rows, batch, tokens, None, keeps=False)], view.pages.get_device(), layer)


def run(launches: Sequence[jit.Launch], device: int, layer: int = 0) -> None:
    """Launch on the device's current stream. Raises what checked kernels find in a ``layer``."""
    for one in launches:
        jit.launch(one.kernel, one.params, one.grid, pdl=one.pdl, device=device)
        if isinstance(one.params, kv_quantize.Params) and isinstance(one.params.errors, Tensor):
            kv_page.report(int(one.params.errors), layer)


def quantizer(
    view: LayerView, batch: int, tokens: int, ragged: bool, device: Device
) -> tuple[kv_quantize.Problem, kv_quantize.Config]:
    """The problem of storing up to ``tokens`` tokens of each sequence, and the config for it. KernelError for none."""
    problem = kv_quantize.Problem(
        view.layout, batch, view.kv_heads, tokens, view.ring, view.window, view.bf16, view.front, view.slots, ragged
    )
    config = kv_quantize.default(problem, checked=kv_page.debugging())
    if (reason := kv_quantize.why_not(problem, config, device)) is not None:
        raise KernelError(reason)
    return problem, config


def _quantize(
    view: LayerView, rows: Tensor | None, batch: int, tokens: int, new: tuple[Tensor, Tensor] | None,
    starts: Tensor | None = None, *, packs: bool = True, keeps: bool = True,
) -> jit.Launch:  # fmt: skip
    """new: K and V, of all sequences in a row if there are ``starts``; None if they are in the residual already."""
    device = Device.of(view.pages)
    problem, config = quantizer(view, batch, tokens, starts is not None, device)
    k, v = (None, None) if new is None else (_aligned(x, 8) for x in new)
    strides = [(0, 0, 0) if x is None else (x.stride(0) * (starts is None), x.stride(1), x.stride(2)) for x in (k, v)]
    params = kv_quantize.Params(
        **view.params(),
        k=k,
        v=v,
        residual=view.residual,
        sequences=rows,
        k_batch_stride=strides[0][0],
        v_batch_stride=strides[1][0],
        k_token_stride=strides[0][1],
        k_head_stride=strides[0][2],
        v_token_stride=strides[1][1],
        v_head_stride=strides[1][2],
        tokens=tokens,
        window=view.window,
        packs=packs,
        keeps=keeps,
        sequences_count=view.table.shape[0],
        errors=torch.zeros(1, dtype=torch.int32, device=view.pages.device) if config.checked else None,
        stored=new is None,
        starts=starts,
    )
    overlaps = device.capability >= 90 and problem.step and (starts is None or (packs and keeps))
    return jit.Launch(kv_quantize.kernel(config), params, kv_quantize.grid(problem, packs), overlaps)


def _aligned(x: Tensor, unit: int) -> Tensor:
    """X [..., head_dim] itself if its rows allow vector loads of ``unit`` 16-bit values, else a copy."""
    fits = x.stride(-1) == 1 and x.data_ptr() % (2 * unit) == 0 and all(s % unit == 0 for s in x.stride()[:-1])
    return x if fits else copy_of(x)


# -------- attention


def problem_of(
    q: Tensor, view: LayerView, masks: Masks = NO_MASKS, split: int = 0, ragged: Ragged | None = None
) -> Problem:
    """The kernel's problem for a call of ``prepare``."""
    return Problem(
        layout=view.layout,
        batch=q.shape[0] if ragged is None else ragged.starts.shape[0] - 1,
        heads=q.shape[2],
        kv_heads=view.kv_heads,
        queries=q.shape[1] if ragged is None else ragged.most,
        ring=view.ring,
        window=view.window,
        capacity=view.capacity,
        bf16=view.bf16,
        sliding=masks.window is not None,
        softcap=masks.softcap is not None,
        alibi=masks.alibi is not None,
        split=split,
        front=view.front,
        slots=view.slots,
        plain=0 if view.values is None else view.pages.shape[1],
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch(jit.Launch):
    """A launch of attention, and its outputs: ``lse`` is None for plain caches."""

    out: Tensor
    lse: Tensor | None


def prepare(
    q: Tensor,
    view: LayerView,
    rows: Tensor | None,
    masks: Masks,
    device: Device,
    config: Config | None = None,
    out: Tensor | None = None,
    errors: Tensor | None = None,
    split: int = 0,
    ragged: Ragged | None = None,
    overlaps: bool = False,
) -> Launch:
    """The launch of causal attention of the newest tokens to their whole sequences, on ``device``.

    q: [batch, tokens, heads, head_dim], checked and rotated already.
    rows: int32 [batch], sequence indices of the queries; None for 0, 1, 2 ...  config: kernel config (default: the
    heuristic's).  out: output buffer, contiguous, in q's shape and dtype.  errors: int32 [1], for checked kernels'
    error codes.  ragged: then q is [1, tokens, heads, head_dim], for sequences in rows of a pool; ``most`` must be at
    least 2.  overlaps: pages may be read before the previous kernel ends (programmatic dependent launch), so that
    kernel must not write a prompt's pages.  Raises KernelError, with the reason, if no kernel fits.
    """
    problem = problem_of(q, view, masks, split, ragged)
    if config is None:
        config = default(problem, device)
    elif (reason := kernels.why_not(problem, config, device)) is not None:
        raise KernelError(reason)
    q = _aligned(q, 4)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if view.values is None else None
    of_page = [0, 0] if view.values is None else [x * view.pages.element_size() for x in view.pages.stride()[1:3]]
    space = workspace(q.device, *kernels.workspace(problem, config, device))
    params = kernels.Params(
        **view.params(),
        residual=view.residual,
        sequences=rows,
        q=q,
        out=out,
        lse=lse,
        partial=space[0],
        partial_state=space[1],
        arrivals=space[2],
        errors=space[3] if errors is None else errors,
        q_batch_stride=q.stride(0 if ragged is None else 1),
        q_token_stride=q.stride(1),
        q_head_stride=q.stride(2),
        batch=problem.batch,
        window=view.window,
        sequences_count=view.table.shape[0],
        starts=None if ragged is None else ragged.starts,
        values=view.values,
        token_stride=of_page[0],
        head_stride=of_page[1],
        sinks=None if masks.sinks is None else in_log2(masks.sinks, q),
        slopes=None if masks.alibi is None else in_log2(masks.alibi, q),
        sliding=masks.window or 0,
        scale=kernels.log2_scale(1.0 / math.sqrt(q.shape[-1]) if masks.scale is None else masks.scale),
        cap=kernels.log2_scale(masks.softcap or 0.0),
        uncap=2.0 / masks.softcap if masks.softcap else 0.0,
    )
    return Launch(
        kernel=kernels.kernel(config, view.layout), params=params, grid=kernels.grid(problem, config, device),
        pdl=overlaps and device.capability >= 90, out=out, lse=lse,
    )  # fmt: skip


def in_log2(values: Tensor, like: Tensor) -> Tensor:
    """Logits times log2(e), for exp2, as contiguous float32 on the device of ``like``."""
    return (values.to(like.device, torch.float32) * math.log2(math.e)).contiguous()


Space = tuple[Tensor, Tensor, Tensor, Tensor]
_spaces: dict[tuple[object, ...], tuple[int, Space]] = {}


def workspace(device: torch.device, partial: int, states: int, arrivals: int) -> Space:
    """Split-KV workspace (partials, softmax states, arrival counters, error), cached per stream and size.

    Each graph capture gets one of its own, whose zeroing is part of the graph: vLLM captures on another stream than it
    warms up on.
    """
    stream, capture = stream_of(device)
    key = (device, stream, bool(capture), partial, states, arrivals)
    known = _spaces.get(key)
    if known is not None and known[0] == capture:
        return known[1]
    space = (
        torch.empty(partial, dtype=torch.float32, device=device),
        torch.empty(states, dtype=torch.float32, device=device),
        torch.zeros(arrivals, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    _spaces[key] = capture, space
    return space


def stream_of(device: torch.device) -> tuple[int, int]:
    """(a device's current stream, id of the graph capture it is part of); 0 for none."""
    if device.type != "cuda":
        return 0, 0
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream, capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0


# -------- ops


class Cache(Protocol):
    """What ops need of a cache."""

    number: int
    pages: Tensor
    residual: Tensor
    lengths: Tensor

    def write(self, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Store new tokens of a layer."""


_numbers = itertools.count(1)
_live: "weakref.WeakValueDictionary[int, Cache]" = weakref.WeakValueDictionary()


def register(cache: Cache) -> int:
    """Register a cache (weakly). Returns its number for ``live``."""
    number = next(_numbers)
    _live[number] = cache
    return number


def live(number: int) -> Cache:
    """The cache with this number. Raises LayerError if it no longer exists."""
    found = _live.get(number)
    if found is None:
        raise LayerError(f"KV cache {number} no longer exists: an op ran after its cache was deleted")
    return found


def write(cache: Cache, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
    """``KVCache.write`` as the op ``anybit::kv_write``."""
    calls.kv_write(k, v, cache.pages, cache.residual, cache.lengths, cache.number, layer, list(sequences))


def attend(q: Tensor, cache: Cache, layer: int, sequences: Sequence[int], masks: Masks = NO_MASKS) -> Tensor:
    """``attention.decode`` as the op ``anybit::kv_decode``; returns only the output."""
    out: Tensor = calls.kv_decode(
        q, cache.pages, cache.residual, cache.lengths, cache.number, layer, list(sequences),
        masks.scale, masks.window, masks.softcap, masks.sinks, masks.alibi,
    )  # fmt: skip
    return out


@contextmanager
def _over(number: int, pages: Tensor, residual: Tensor) -> Iterator[Cache]:
    """The cache, temporarily on the op's own arguments: a compiler may pass copies and copy them back."""
    cache = live(number)
    own = cache.pages, cache.residual
    cache.pages, cache.residual = pages, residual
    try:
        yield cache
    finally:
        cache.pages, cache.residual = own


_decode_of: Callable[..., tuple[Tensor, Tensor]] | None = None


def implement(decode: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Register the function behind ``anybit::kv_decode``, on any device: decode(q, cache, layer, sequences, masks)."""
    global _decode_of
    _decode_of = decode


def _write(
    k: Tensor, v: Tensor, pages: Tensor, residual: Tensor, lengths: Tensor, number: int, layer: int, rows: list[int]
) -> None:
    with _over(number, pages, residual) as cache:
        cache.write(layer, rows, k, v)


def _decode(
    q: Tensor, pages: Tensor, residual: Tensor, lengths: Tensor, number: int, layer: int, rows: list[int],
    scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None, alibi: Tensor | None,
) -> Tensor:  # fmt: skip
    assert _decode_of is not None, "anybit.cache.attention has not called implement"
    with _over(number, pages, residual) as cache:
        return _decode_of(q, cache, layer, rows, Masks(scale, window, softcap, sinks, alibi))[0]


_library = torch.library.Library("anybit", "FRAGMENT")
define(
    _library,
    "kv_write(Tensor k, Tensor v, Tensor(a!) pages, Tensor(b!) residual, Tensor lengths, int store, int layer, "
    "int[] rows) -> ()",
    lambda *_: None,
    _write,
)
define(
    _library,
    "kv_decode(Tensor q, Tensor pages, Tensor residual, Tensor lengths, int store, int layer, int[] rows, "
    "float? scale, int? window, float? softcap, Tensor? sinks, Tensor? alibi) -> Tensor",
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    _decode,
)
