"""How prompts attend over a packed cache: which pages are unpacked, and which of them each page of queries reads.

A query reads its own page in 16 bits and earlier pages as they were packed, so its answer depends on its position
alone, not on how the prompt was split into chunks. To a varlen attention kernel the queries of one page are a sequence
with a page table of its own: the unpacked earlier pages, then their own page in 16 bits, with a causal mask at the end.
Prompts of a single page need no page table: they attend over the new keys and values where these lie.
"""

from dataclasses import dataclass

import numpy as np

from anybit.ops.kv_rows import PAGE


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
