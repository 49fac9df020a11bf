"""Rows of a pool that is not ours: a sequence's blocks, those of its 16-bit residual in front, then its pages.

A manager of blocks, such as vLLM's, hands out blocks of one size and a row of them for every sequence:

    [ residual block 0 .. front - 1 | page 0 | page 1 | ... ]

A block is a page of every KV head, [kv_heads, page_bytes] with ``kv_page``'s bytes, or a part of one sequence's
residual: then each head's bytes begin with the keys of ``slots`` tokens, and the values follow, sixteen tokens a run as
in ``kv_page.ring_places``. Token p is in slot p % ring, and slot s in residual block s // slots. Pages hold what is
full: the tokens before the last multiple of 128. A query reads its own page in 16 bits and those before packed, so that
what it sees depends on its position alone.

Where other layers need larger blocks (the state of a linear attention, in vLLM's pool), a block is several pages one
after another. A row is then made of them as if each were a block: kernels know no difference, but that the residual
takes whole blocks.
"""

from dataclasses import dataclass

from anybit.errors import LayerError
from anybit.kernels.attention.decode import residual_tokens
from anybit.kernels.attention.kv_page import PageLayout

PAGE = 128


@dataclass(frozen=True)
class RowLayout:
    """Sizes of rows.

    slack: how many tokens may be taken back after a step (drafts); a multiple of 32.  together: pages of a block.
    Raises LayerError where a page has no room for tokens in 16 bits.
    """

    layout: PageLayout
    slack: int = 0
    together: int = 1

    def __post_init__(self) -> None:
        if self.layout.page != PAGE:
            raise LayerError(f"a block of rows is a page of {PAGE} tokens, not of {self.layout.page}")
        if self.slack < 0 or self.slack % 32:
            raise LayerError(f"the slack of a residual is a multiple of 32 tokens, not {self.slack}")
        if self.layout.format.float4:
            raise LayerError("pages of 4-bit floats are not stored by any kernel yet: use kv4")
        if self.slots == 0:
            raise LayerError(f"a page of {self.layout.page_bytes} bytes holds no 16 tokens in 16 bits")

    @property
    def ring(self) -> int:
        """Tokens of a residual."""
        return PAGE + self.slack

    @property
    def slots(self) -> int:
        """Tokens that a page of the residual holds: whole chunks, as the attention reads them."""
        chunk = residual_tokens(self.layout)
        return self.layout.page_bytes // (4 * self.layout.head_dim) // chunk * chunk

    @property
    def front(self) -> int:
        """Pages of a row that are its residual."""
        return self._whole(-(-self.ring // self.slots))

    def _whole(self, pages: int) -> int:
        return -(-pages // self.together) * self.together

    def bytes_of(self, tokens: int) -> int:
        """Bytes of one KV head of a sequence of so many tokens."""
        residual = self.front if tokens >= PAGE else min(self.front, self._whole(-(-tokens // self.slots)))
        return (residual + self._whole(tokens // PAGE)) * self.layout.page_bytes

    @property
    def pays_from(self) -> int:
        """The length from which on a sequence takes no more than in 16 bits, whatever is added to it."""
        costs = [n for n in range(1, 32 * PAGE) if self.bytes_of(n) > 4 * self.layout.head_dim * n]
        return max(costs, default=0) + 1
