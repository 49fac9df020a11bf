"""One layer of one step over a low-bit KV cache in vLLM's blocks.

Requests with few new tokens run anybit's decode kernel over packed pages. Prompts attend over unpacked pages through a
function that the caller passes in (vLLM's FlashAttention); nothing here imports vLLM. The first layer of a step plans
what to launch, and later layers with the same shapes run its plans (``ops.kv_rows.plan``).

A query reads its own page in 16 bits and earlier pages as they were packed, so its answer depends on its position
alone, not on how the prompt was split into chunks. To a varlen attention kernel the queries of one page are a sequence
with a page table of its own: the unpacked earlier pages, then their own page in 16 bits, with a causal mask at the end.
Prompts of a single page need no page table: they attend over the new keys and values where these lie.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybit.cache.blocks import Row
from anybit.ops import kv, kv_rows
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import PAGE, RowLayout


@dataclass(frozen=True)
class Group:
    """Prompts whose pages are unpacked together, as arrays of int32.

    begin, end: the group's slice of the step's new tokens.  jobs [pages, 2]: as ``kv_rows.unpack`` takes them; none if
    every prompt is new and fits one page.  table [query pages, most pages]: the unpacked pages that each page of
    queries reads, padded with zeros.  starts [query pages + 1]: where its queries begin, counted from ``begin``.
    seen [query pages]: how many tokens it reads.
    """

    begin: int
    end: int
    jobs: np.ndarray
    table: np.ndarray
    starts: np.ndarray
    seen: np.ndarray


def most_pages(longest: int, tokens: int) -> int:
    """The most pages that a group unpacks: the longest sequence's packed pages, and a step's tokens in 16 bits."""
    return -(-longest // PAGE) + -(-tokens // PAGE) + 2


def plan(starts: np.ndarray, lengths: np.ndarray, room: int) -> list[Group]:
    """Groups of prompts that unpack at most ``room`` pages each, or hold a single prompt.

    starts: int [prompts + 1], where the new tokens of each prompt begin.  lengths: int [prompts], new tokens included.
    """
    new = np.diff(starts)
    before = lengths - new
    first, last = before // PAGE, (lengths - 1) // PAGE
    pages = last + (last - first + 1)  # packed, and in 16 bits
    groups, prompts = list[Group](), list[int]()
    for prompt in np.flatnonzero(new).tolist():  # those without new tokens are padding
        if prompts and pages[[*prompts, prompt]].sum() > room:
            groups.append(_group(prompts, starts, before, lengths, first, last))
            prompts = []
        prompts.append(prompt)
    return [*groups, _group(prompts, starts, before, lengths, first, last)] if prompts else groups


def _group(
    prompts: list[int], starts: np.ndarray, before: np.ndarray, lengths: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Group:
    jobs, tables, counts, seen = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    base = 0
    for prompt in prompts:
        packed, own = np.arange(last[prompt]), np.arange(first[prompt], last[prompt] + 1)
        asked = np.concatenate((2 * packed, 2 * own + 1))
        jobs.append(np.stack((np.full_like(asked, prompt), asked), 1))
        reads = np.arange(last[prompt] + 1)[None] < own[:, None]
        places = np.where(reads, base + np.arange(last[prompt] + 1)[None], 0)
        places[np.arange(len(own)), own] = base + len(packed) + np.arange(len(own))
        tables.append(places)
        high = np.minimum(lengths[prompt], (own + 1) * PAGE)
        counts.append(high - np.maximum(before[prompt], own * PAGE))
        seen.append(high)
        base += len(asked)
    if all(before[prompt] == last[prompt] == 0 for prompt in prompts):
        jobs = [np.empty((0, 2))]
    width = max(table.shape[1] for table in tables)
    table = np.concatenate([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])
    ends = np.concatenate((np.zeros(1, np.int64), np.concatenate(counts).cumsum()))
    arrays = (np.concatenate(jobs), table, ends, np.concatenate(seen))
    return Group(int(starts[prompts[0]]), int(starts[prompts[-1] + 1]), *(x.astype(np.int32) for x in arrays))


Prompts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, int, Tensor], None]
"""Causal attention of ragged queries: (q [tokens, heads, dim], keys and values [pages, 128, kv_heads, dim], starts
[sequences + 1], seen [sequences], table [sequences, pages], the largest of seen, out), all int32. Without a table, keys
and values are [tokens, kv_heads, dim], and those of a sequence begin where its queries do."""


class Asked(NamedTuple):
    """The arguments of ``Prompts`` for a slice of a step's tokens, the same for every layer.

    paged: unpacked keys and values, and the table; None where the slice attends over its own new keys and values.
    """

    here: slice
    paged: tuple[Tensor, Tensor, Tensor] | None
    starts: Tensor
    seen: Tensor
    most: int


Part = kv_rows.Plan | list[kv_rows.Launch] | Asked
"""What a layer does next; launches are a list where other layers cannot run them."""


@dataclass
class Batch:
    """What all layers of a step share.

    table [requests, front + pages], lengths [requests], starts [requests + 1]: int32 on the device.  tokens: new tokens
    in all.  decodes: how many requests, the first ones, have few new tokens: at most ``queries`` each,
    ``decode_tokens`` in all.  The rest are prompts.  most: the most new tokens of a prompt.  aligned: whether the new
    tokens of every prompt begin a page.  groups: of prompts, with their arrays on the device.  rows: all requests, on a
    CPU, where plain torch runs them.  plans: of layers so far, by ``kv_rows.key_of``.
    """

    table: Tensor
    lengths: Tensor
    starts: Tensor
    tokens: int
    decodes: int
    decode_tokens: int
    queries: int = 1
    most: int = 0
    aligned: bool = False
    groups: list[tuple[Group, tuple[Tensor, ...]]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    plans: dict[Hashable, Sequence[Part]] = field(default_factory=dict, init=False)

    def in_rows(self) -> None:
        """Describe all requests for plain torch (``kvrows.step``) to run; reads the device."""
        starts, known = self.starts.tolist(), self.lengths.tolist()
        ends = zip(starts, starts[1:], known, strict=False)
        self.rows = [Row(self.table[i], a, z, n - (z - a)) for i, (a, z, n) in enumerate(ends) if z > a]

    def add_prompts(self, starts: np.ndarray, lengths: np.ndarray, room: int) -> None:
        """Plan the prompts from their starts and lengths on the host; arguments as in ``plan``."""
        new = np.diff(starts)
        self.most, self.aligned = int(new.max()), not ((lengths - new)[new > 0] % PAGE).any()
        device = self.table.device
        for group in plan(starts, lengths, room):
            arrays = [torch.from_numpy(x) for x in (group.jobs, group.table, group.starts, group.seen)]
            if device.type == "cuda":
                arrays = [x.pin_memory() for x in arrays]
            self.groups.append((group, tuple(x.to(device, non_blocking=True) for x in arrays)))


def run(
    batch: Batch, rows: RowLayout, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: Masks, out: Tensor,
    *, capacity: int, space: Callable[[int], Tensor], prompts: Prompts,
) -> None:  # fmt: skip
    """Store a batch's new tokens and write its attention to ``out``, which has q's shape and dtype.

    pages: uint8 [blocks, kv_heads, page_bytes].  q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; float16 or
    bfloat16.  capacity: the most tokens of a request.  space: returns a tensor [pages, 2, kv_heads, 128, dim] for at
    least so many pages.
    """
    key = kv_rows.key_of(rows, pages, q, k, v, out, masks, capacity)
    sinks = None if key is None or masks.sinks is None else kv.in_log2(masks.sinks, q)
    places = [0 if x is None else x.data_ptr() for x in (pages, pages, q, k, v, out, sinks)]
    device = q.get_device()
    parts = batch.plans.get(key)
    if parts is None:
        made = list(_parts(batch, rows, pages, q, k, v, masks, out, capacity, space))
        plans = [one if isinstance(one, Asked) else kv_rows.plan(one, places, device) for one in made]
        whole = [one for one in plans if one is not None]
        if key is not None and len(whole) == len(made):
            batch.plans[key] = parts = whole
        else:
            parts = [*made]
    for part in parts:
        if isinstance(part, Asked):
            keys, values, table = part.paged or (k[part.here], v[part.here], None)
            prompts(q[part.here], keys, values, part.starts, part.seen, table, part.most, out[part.here])
        elif isinstance(part, list):
            kv.run(part, device)
        else:
            part.run(places)


def _parts(
    batch: Batch, rows: RowLayout, pages: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: Masks, out: Tensor,
    capacity: int, space: Callable[[int], Tensor],
) -> Iterator[list[kv_rows.Launch] | Asked]:  # fmt: skip
    """The launches of a layer and calls of ``Prompts``, in order."""
    d, total = batch.decodes, batch.starts.shape[0] - 1
    starts = batch.starts[d:]
    new = kv_rows.Ragged(starts, batch.most)
    others = kv_rows.view(rows, pages, batch.table[d:total], batch.lengths[d:total], q.dtype, capacity)
    if batch.groups:  # pack all pages that become full before anyone reads them
        if batch.aligned:
            yield kv_rows.store(others, k, v, new)
        else:
            yield kv_rows.store(others, k, v, new, keeps=False)
    if d:
        few = kv_rows.view(rows, pages, batch.table[:d], batch.lengths[:d], q.dtype, capacity)
        ragged = kv_rows.Ragged(batch.starts[: d + 1], batch.queries) if batch.queries > 1 else None
        here = slice(0, batch.decode_tokens)
        yield kv_rows.store(few, k[here], v[here], ragged)
        yield kv_rows.decode(q[here], few, masks, out=out[here], overlaps=True, ragged=ragged)
    for group, (jobs, table, begins, seen) in batch.groups:
        paged = None
        if jobs.shape[0]:
            plain = space(jobs.shape[0])[: jobs.shape[0]]
            yield kv_rows.unpack(others, k, v, starts, jobs, plain)
            paged = plain[:, 0].transpose(1, 2), plain[:, 1].transpose(1, 2), table
        yield Asked(slice(group.begin, group.end), paged, begins, seen, int(group.seen.max()))
    if batch.groups and not batch.aligned:
        yield kv_rows.store(others, k, v, new, packs=False)
