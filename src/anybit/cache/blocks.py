"""A KV cache in an external block pool, such as vLLM's, in plain torch: the kernels' oracle and the CPU path.

``kernels.attention.kv_rows`` describes the layout of a sequence's row of blocks. ``step`` runs one layer for a batch of
sequences with any numbers of new tokens; ``ops.kv_rows`` does the same on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.cache.attention import attend
from anybit.cache.kvcache import dequantize
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


class Pool:
    """A layer's blocks: uint8 [blocks, kv_heads, page_bytes], and the dtype of their 16-bit values."""

    def __init__(self, rows: RowLayout, pages: Tensor, dtype: torch.dtype) -> None:
        self.rows, self.pages, self.dtype = rows, pages, dtype
        size = rows.slots * rows.layout.head_dim
        halves = pages[..., : 4 * size].view(dtype)  # residual blocks: keys, then values
        self.halves = (halves[..., :size], halves[..., size:])
        self.places = kv_page.ring_places(rows.slots, rows.layout.head_dim).to(pages.device)

    def ring(self, row: Row, begin: int, end: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Where K and V of the tokens begin .. end - 1 are in ``halves``: block, head, places."""
        at = torch.arange(begin, end, device=self.pages.device) % self.rows.ring
        blocks, slots = row.table[at // self.rows.slots].long(), at % self.rows.slots
        heads = torch.arange(self.pages.shape[1], device=self.pages.device)[:, None, None]
        return [(blocks[None, :, None], heads, self.places[part, slots][None]) for part in (0, 1)]

    def read_ring(self, row: Row, begin: int, end: int) -> list[Tensor]:
        """K and V [kv_heads, end - begin, head_dim] of the tokens in the residual, in 16 bits."""
        return [half[at] for half, at in zip(self.halves, self.ring(row, begin, end), strict=True)]

    def write_ring(self, row: Row, begin: int, end: int, k: Tensor, v: Tensor) -> None:
        """Write K and V [kv_heads, end - begin, head_dim] into their residual slots."""
        for half, at, new in zip(self.halves, self.ring(row, begin, end), (k, v), strict=True):
            half[at] = new

    def page(self, row: Row, index: int) -> int:
        """The block that holds a page."""
        return int(row.table[self.rows.front + index])

    def write_page(self, row: Row, index: int, k: Tensor, v: Tensor) -> None:
        """Quantize K and V [kv_heads, 128, head_dim] into a page."""
        self.pages[self.page(row, index)] = kv_page.encode(self.rows.layout, k, v).flatten(1)

    def read_pages(self, row: Row, count: int) -> list[Tensor]:
        """Dequantize the first ``count`` pages: K and V float32 [kv_heads, 128 * count, head_dim]."""
        layout = self.rows.layout
        owned = row.table[self.rows.front : self.rows.front + count].long()
        blocks = (
            self.pages[owned].transpose(0, 1).reshape(self.pages.shape[1], count * layout.blocks, layout.block_bytes)
        )
        return dequantize(layout, blocks, self.dtype)


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
        old = pool.read_ring(row, row.own, row.before)
        both = [torch.cat((before, x[:, row.begin : row.end]), 1) for before, x in zip(old, new, strict=True)]
        for page in range(row.own // PAGE, row.length // PAGE) if packs else ():
            first = page * PAGE - row.own
            pool.write_page(row, page, *(x[:, first : first + PAGE] for x in both))
        near.append(both)
    for row, both in zip(batch, near, strict=True):
        last = (row.length - 1) // PAGE
        packed = pool.read_pages(row, last)
        for page in range(row.own // PAGE, last + 1):
            low, high = max(row.before, page * PAGE), min(row.length, (page + 1) * PAGE)
            keys, values = (
                torch.cat((far[:, : page * PAGE], x[:, page * PAGE - row.own : high - row.own].float()), 1)
                for far, x in zip(packed, both, strict=True)
            )
            here = slice(row.begin + low - row.before, row.begin + high - row.before)
            out[here] = attend(q[here].float(), keys, values, masks)[0].to(q.dtype)
    for row in batch:
        first = max(row.before, row.length - pool.rows.ring)
        end = row.end
        pool.write_ring(row, first, row.length, *(x[:, end - (row.length - first) : end] for x in new))
    return out
