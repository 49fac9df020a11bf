"""Kernels over a low-bit KV cache in blocks that somebody else hands out (vLLM); see ``kernels.attention.kv_rows``.

All functions return launches, for ``kv.run`` or a ``plan``. A layer of a step, in this order: ``store`` packs the pages
that become full, of all sequences; ``decode`` sequences with few new tokens and ``unpack`` what prompts attend over;
then ``store`` keeps the newest tokens, with the first launch where that overwrites no token that is still to be read.
Nothing here waits for the device.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Launch as Launch
from anybit.jit import Plan as Plan
from anybit.jit import Slot
from anybit.kernels.attention.decode import decode as kernels
from anybit.kernels.attention.kv_page import PageLayout
from anybit.kernels.attention.kv_quantize import kv_quantize
from anybit.kernels.attention.kv_rows import PAGE as PAGE
from anybit.kernels.attention.kv_rows import RowLayout as RowLayout
from anybit.kernels.attention.kv_unpack import kv_unpack
from anybit.ops import kv
from anybit.ops.kv import MOST_QUERIES as MOST_QUERIES
from anybit.ops.kv import NO_MASKS, LayerView, Masks
from anybit.ops.kv import Ragged as Ragged
from anybit.ops.plans import key_of as plan_key
from anybit.scheme import KVFormat


@cache
def layout(format: KVFormat, head_dim: int, slack: int = 0, together: int = 1) -> RowLayout:
    """The layout of a format's rows of blocks; slack: the most tokens that a step may reject.

    together: pages in a block.  Raises LayerError for formats that rows cannot hold.
    """
    return RowLayout(PageLayout(format, head_dim), slack, together)


def view(
    rows: RowLayout, pages: Tensor, table: Tensor, lengths: Tensor, dtype: torch.dtype, capacity: int
) -> LayerView:
    """One layer's cache, as the kernels take it.

    pages: uint8 [blocks, kv_heads, page_bytes]; any stride between blocks.  table: int32 [sequences, front + pages].
    lengths: int32 [sequences], new tokens included; 0 for padding.  dtype: of 16-bit tokens.  capacity: the most tokens
    of a sequence.
    """
    return LayerView(
        rows.layout, pages, pages.view(dtype), table, lengths, rows.ring, PAGE, capacity, rows.front, rows.slots
    )


def store(
    of: LayerView, k: Tensor, v: Tensor, ragged: Ragged | None = None, *, packs: bool = True, keeps: bool = True
) -> list[Launch]:
    """Pack the pages that become full, and keep the newest tokens in 16 bits (the ring), or one of these.

    k, v: [tokens, kv_heads, head_dim].  ragged: how many tokens each sequence has; None: one each.  Doing both at once
    takes any number if they begin a page, else at most 1 + the row's slack (and ``MOST_QUERIES`` if ``decode``
    attends): otherwise a slot of the ring may be overwritten before it is read.
    """
    return [kv.stored(of, k, v, ragged, packs=packs, keeps=keeps)]


def decode(
    q: Tensor, of: LayerView, masks: Masks = NO_MASKS, *, out: Tensor, overlaps: bool, ragged: Ragged | None = None
) -> list[Launch]:
    """Attention of new tokens that are already stored; q, out: [tokens, heads, head_dim]; ragged: as in ``store``.

    overlaps: start before the previous kernel has ended, which must then be ``store`` of the same step.
    """
    axis = 1 if ragged is None else 0
    q, out, gpu = q.unsqueeze(axis), out.unsqueeze(axis), Device.of(q)
    return [kv.prepare(q, of, None, masks, gpu, out=out, ragged=ragged, overlaps=overlaps)]


def unpack(of: LayerView, k: Tensor, v: Tensor, starts: Tensor, jobs: Tensor, out: Tensor) -> list[Launch]:
    """Write pages as 16-bit K and V to out [jobs, 2, kv_heads, 128, head_dim].

    jobs: int32 [jobs, 2], a sequence and 2 * page for the packed page, or 2 * page + 1 for its tokens in 16 bits,
    padded with zeros. The latter come before the newest are kept, which may overwrite them.  k, v: as in ``store``.
    starts: int32 [sequences + 1], where the new tokens of each sequence begin.
    """
    problem = kv_unpack.Problem(of.layout, of.front, of.slots, of.kv_heads, jobs.shape[0], of.bf16)
    config, device = kv_unpack.default(problem), Device.of(of.pages)
    if (reason := kv_unpack.why_not(problem, config, device)) is not None:
        raise KernelError(reason)
    params = kv_unpack.Params(
        **of.params(),
        starts=starts,
        jobs=jobs,
        k=k,
        v=v,
        out=out,
        k_token_stride=k.stride(0),
        k_head_stride=k.stride(1),
        v_token_stride=v.stride(0),
        v_head_stride=v.stride(1),
    )
    return [Launch(kv_unpack.kernel(config), params, kv_unpack.grid(problem))]


# -------- the layers of a step

SLOTS = ("pages", "residual", "q", "k", "v", "out", "sinks")
"""The tensors of a layer, by their names in kernel parameters; ``residual`` is ``pages`` in 16 bits."""
_CHANGING: dict[type, tuple[str, ...]] = {
    kv_quantize.Params: ("pages", "residual", "k", "v"),
    kernels.Params: ("pages", "residual", "q", "out", "sinks"),
    kv_unpack.Params: ("pages", "k", "v"),
}
"""The parameters that differ between the layers of a step."""


def key_of(
    rows: RowLayout, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, masks: Masks, capacity: int
) -> Hashable:
    """Everything that a layer's launches depend on besides the step; None if each layer has to launch by itself.

    That is so in graph captures, which have a workspace of their own, and with ALiBi.
    """
    stream, capture = kv.stream_of(q.device)
    if capture or masks.alibi is not None:
        return None
    how = masks.scale, masks.window, masks.softcap, masks.sinks is None, capacity, stream
    return plan_key((rows, how), (pages, q, k, v, out))


def plan(launches: Sequence[Launch], places: Sequence[int], device: int) -> Plan | None:
    """A plan of a layer's launches for all layers like it, good for one step: it holds the step's tensors.

    places: the addresses of the layer's ``SLOTS``.  None if other layers cannot run it: where kernels read copies of
    the layer's tensors, or check them.
    """
    own, found = dict(zip(SLOTS, places, strict=True)), list[Launch]()
    for launch in launches:
        params: Any = launch.params
        tensors = {name: getattr(params, name) for name in _CHANGING[type(params)]}
        copied = any(x.data_ptr() != own[name] for name, x in tensors.items() if x is not None and name != "sinks")
        if copied or (isinstance(params, kv_quantize.Params) and params.errors is not None):
            return None
        slots: dict[str, Any] = {name: Slot(name) for name, x in tensors.items() if x is not None}
        found.append(Launch(launch.kernel, replace(params, **slots), launch.grid, launch.pdl))
    return Plan(found, SLOTS, device)


def kernels_for(
    rows: RowLayout, heads: int, kv_heads: int, masks: Masks, dtype: torch.dtype, capacity: int, sequences: int,
    device: Device, most: int = 1,
) -> list[jit.Kernel]:  # fmt: skip
    """All kernels that steps of up to ``sequences`` sequences launch, to be compiled before the first step.

    capacity: the most tokens of a sequence.  most: the most new tokens of a decode.  Raises KernelError, with the
    reason, if no kernel fits.
    """
    pages = torch.empty(1, kv_heads, rows.layout.page_bytes, dtype=torch.uint8, device="meta")
    none = torch.empty(0, 0, dtype=torch.int32, device="meta")
    of = view(rows, pages, none, none, dtype, capacity)
    quantizers = [kv.quantizer(of, 1, 1, ragged, device)[1] for ragged in (False, True)]
    unpacked = kv_unpack.Problem(rows.layout, rows.front, rows.slots, kv_heads, 1, of.bf16)
    found = [*map(kv_quantize.kernel, quantizers), kv_unpack.kernel(kv_unpack.default(unpacked))]
    for batch, queries in product(range(1, sequences + 1), sorted({1, most})):
        q = torch.empty(batch, queries, heads, rows.layout.head_dim, dtype=dtype, device="meta")
        found.append(kernels.kernel(kernels.default(kv.problem_of(q, of, masks), device), rows.layout))
    return list(dict.fromkeys(found))
