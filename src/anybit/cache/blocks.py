"""A KV cache in an external block pool, such as vLLM's, in plain torch: the kernels' oracle and the CPU path.

``kernels.attention.kv_rows`` describes the layout of a sequence's row of blocks. ``step`` runs one layer for a batch of
sequences with any numbers of new tokens; ``ops.kv_rows`` does the same on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.cache.attention import attend
from anybit.cache.kvcache import Tokens
from anybit.kernels.attention import kv_page
from anybit.ops.kv import NO_MASKS, Masks
from anybit.ops.kv_rows import PAGE, RowLayout


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of a batch: its row of the block table, its range of new tokens, and how many it had before."""

    table: Tensor
    begin: int
    end: int
    before: int

    @property
    def length(self) -> int:
        """Tokens, including the new ones."""
        return self.before + self.end - self.begin

    @property
    def own(self) -> int:
        """First token of the first new token's page."""
        return self.before // PAGE * PAGE


class Pool(Tokens):
    """A layer's blocks: uint8 [blocks, kv_heads, page_bytes], and the dtype of their 16-bit values."""

    def __init__(self, rows: RowLayout, pages: Tensor, dtype: torch.dtype) -> None:
        size, places = rows.slots * rows.layout.head_dim, kv_page.ring_places(rows.slots, rows.layout.head_dim)
        halves = pages[..., : 4 * size].view(dtype).split(size, -1)  # residual blocks: keys, then values
        super().__init__(rows.layout, halves, pages, places.to(pages.device), rows.ring)
        self.front = rows.front

    def pages_of(self, row: Row, count: int) -> list[int]:
        """The blocks that hold the first ``count`` pages."""
        return row.table[self.front : self.front + count].tolist()


def step(
    pool: Pool, batch: list[Row], q: Tensor, k: Tensor, v: Tensor, masks: Masks = NO_MASKS, *, packs: bool = True
) -> Tensor:
    """Store the new tokens of a batch and attend.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; already rotated if the format is.
    packs: False skips packing, for a test that must notice.  Returns the output in q's shape and dtype.
    """
    new = [x.to(pool.dtype).transpose(0, 1) for x in (k, v)]
    out, near = torch.zeros_like(q), []
    for row in batch:  # pack first: another sequence may read a page completed in this step
        old = pool.read_ring(row.table, row.own, row.before)
        both = [torch.cat((before, x[:, row.begin : row.end]), 1) for before, x in zip(old, new, strict=True)]
        for page in range(row.own // PAGE, row.length // PAGE) if packs else ():
            first = page * PAGE - row.own
            full = kv_page.encode(pool.layout, *(x[:, first : first + PAGE] for x in both))
            pool.pages[pool.pages_of(row, page + 1)[-1]] = full.flatten(1)
        near.append(both)
    for row, both in zip(batch, near, strict=True):
        last = (row.length - 1) // PAGE
        packed = pool.read_pages(pool.pages_of(row, last), last * PAGE)
        for page in range(row.own // PAGE, last + 1):
            low, high = max(row.before, page * PAGE), min(row.length, (page + 1) * PAGE)
            keys, values = (
                torch.cat((far[:, : page * PAGE], x[:, page * PAGE - row.own : high - row.own].float()), 1)
                for far, x in zip(packed, both, strict=True)
            )
            here = slice(row.begin + low - row.before, row.begin + high - row.before)
            out[here] = attend(q[here].float(), keys, values, masks)[0].to(q.dtype)
    for row in batch:
        first = max(row.before, row.length - pool.ring)
        pool.write_ring(row.table, first, *(x[:, row.end - (row.length - first) : row.end] for x in new))
    return out
