"""A KV cache in an external block pool: a sequence's row of blocks holds first its 16-bit residual, then its pages.

A block manager, such as vLLM's, allocates blocks of one size, and a block table row for each sequence:

    [ residual block 0 .. front - 1 | page 0 | page 1 | ... ]

A block is a page of every KV head, [kv_heads, page_bytes] in ``kv_page``'s format, or part of a sequence's residual:
then each head's bytes are the keys of ``slots`` tokens followed by the values, in runs of sixteen tokens as in
``kv_page.ring_places``. Token p is in slot p % ring, and slot s in residual block s // slots. Full groups of 128 tokens
are in pages. A query reads its own page in 16 bits and earlier ones quantized, so that what it sees depends only on its
position.

If other layers need larger blocks (linear-attention state in vLLM's pool), a block is several consecutive pages.
Kernels see a row of pages either way; only the residual is rounded up to whole blocks.
"""

from dataclasses import dataclass

from anybit.errors import LayerError
from anybit.kernels.attention.decode.decode import residual_tokens
from anybit.kernels.attention.kv_page import PageLayout

PAGE = 128


@dataclass(frozen=True)
class RowLayout:
    """Sizes of rows.

    slack: tokens that may be rolled back after a step (speculative drafts); a multiple of 32.  together: pages per
    block. Raises LayerError if a page is too small for residual tokens, or for another unsupported size.
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
        """Tokens of the residual's ring buffer."""
        return PAGE + self.slack

    @property
    def slots(self) -> int:
        """Tokens per page of the residual: a multiple of the chunk that attention reads."""
        chunk = residual_tokens(self.layout)
        return self.layout.page_bytes // (4 * self.layout.head_dim) // chunk * chunk

    @property
    def front(self) -> int:
        """Pages of a row that hold its residual."""
        return self._whole(-(-self.ring // self.slots))

    def _whole(self, pages: int) -> int:
        return -(-pages // self.together) * self.together

    def bytes_of(self, tokens: int) -> int:
        """Bytes per KV head of a sequence of ``tokens`` tokens."""
        residual = self.front if tokens >= PAGE else min(self.front, self._whole(-(-tokens // self.slots)))
        return (residual + self._whole(tokens // PAGE)) * self.layout.page_bytes

    @property
    def pays_from(self) -> int:
        """The length from which on a sequence never takes more memory than in 16 bits."""
        costs = [n for n in range(1, 32 * PAGE) if self.bytes_of(n) > 4 * self.layout.head_dim * n]
        return max(costs, default=0) + 1
