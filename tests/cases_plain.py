"""Attention over plain 16-bit pages: cases of all tests. Pages are in random order, with NaN where no token is."""

from dataclasses import dataclass

import torch

from anybit.cache.attention import attend
from anybit.ops import kv_plain
from cases_decode import Attention


@dataclass(frozen=True)
class Case(Attention):
    """Tokens per sequence (0: padding) and per page."""

    lengths: tuple[int, ...] = (300, 1, 0, 128, 513)
    page: int = 16
    apart: bool = False  # separate key and value tensors, as in older versions of vLLM

    def __str__(self):
        names = ("bf16", "window", "softcap", "sinks", "alibi", "apart")
        shape = (f"d{self.head_dim}", f"h{self.heads}x{self.kv_heads}", f"p{self.page}", f"n{len(self.lengths)}")
        return "-".join((*shape, *(name for name in names if getattr(self, name))))

    @property
    def capacity(self):
        return max(self.lengths) + 7

    @property
    def problem(self):
        """The kernel's problem."""
        return kv_plain.problem(
            self.page, self.heads, self.kv_heads, self.head_dim, self.dtype, self.masks(), self.capacity,
            len(self.lengths),
        )  # fmt: skip


class Pool:
    """Pages with the tokens of all sequences, and queries; ``want``: the answer in float64."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cpu"):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        width = -(-max(case.lengths) // case.page) + 2
        used = [-(-n // case.page) for n in case.lengths]
        pages = sum(used) + 3
        pool = torch.full((pages, case.page, case.kv_heads, 2, case.head_dim), torch.nan, dtype=case.dtype)
        if case.apart:
            pool = torch.full((2, pages, case.page, case.kv_heads, case.head_dim), torch.nan, dtype=case.dtype)
        pool = pool.to(device)
        self.keys, self.values = pool if case.apart else (pool[:, :, :, 0], pool[:, :, :, 1])
        free = torch.randperm(pages, generator=generator).tolist()
        table = torch.full(
            (len(case.lengths), width), 1 << 30, dtype=torch.int32
        )  # beyond a sequence, contents are arbitrary
        want = torch.zeros(len(case.lengths), case.heads, case.head_dim, dtype=torch.float64)
        q = draw(len(case.lengths), case.heads, case.head_dim).to(case.dtype)
        for row, n in enumerate(case.lengths):
            k, v = (draw(n, case.kv_heads, case.head_dim).to(case.dtype) for _ in range(2))
            for page in range(used[row]):
                table[row, page] = free.pop()
                here = slice(page * case.page, min((page + 1) * case.page, n))
                self.keys[table[row, page], : here.stop - here.start] = k[here].to(device)
                self.values[table[row, page], : here.stop - here.start] = v[here].to(device)
            if n:
                want[row] = attention(case, q[row].double(), k.double(), v.double())
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        self.q, self.table, self.lengths, self.want = q.to(device), table.to(device), lengths.to(device), want
        self.out = torch.full_like(self.q, torch.nan)

    def error(self):
        """Largest relative error of a sequence and head; checks that all is finite and padding zero."""
        out, there = self.out.cpu().double(), self.lengths.cpu() > 0
        assert out.isfinite().all() and not out[~there].any()
        return float(((out - self.want).abs().mean(-1) / self.want.abs().mean(-1))[there].max())


def attention(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query [heads, dim] over tokens [n, kv_heads, dim]."""
    return attend(q[None], k.transpose(0, 1), v.transpose(0, 1), case.masks())[0][0]


CASES = [
    Case(heads=8, kv_heads=2),
    Case(heads=4, kv_heads=4, lengths=(64, 33, 32, 31, 17, 16, 15, 1)),
    Case(heads=32, kv_heads=8, bf16=True, lengths=(129, 250)),
    Case(head_dim=64, heads=9, kv_heads=3, page=32),
    Case(head_dim=96, heads=6, kv_heads=2, page=48, bf16=True),
    Case(head_dim=256, heads=4, kv_heads=1, lengths=(70, 0, 301)),
    Case(heads=24, kv_heads=1, lengths=(300, 5)),
    Case(window=100, sinks=True),
    Case(softcap=20.0, page=128, apart=True),
    Case(alibi=True, bf16=True, apart=True),
    Case(heads=2, kv_heads=1, lengths=(1, 40, 3, 70, 17) * 7),
]
TOLERANCE = {False: 2e-3, True: 1.2e-2}
