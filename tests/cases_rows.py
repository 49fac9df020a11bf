"""Rows of a pool: cases of all tests. A pool full of garbage, with sequences of any lengths in it."""

from dataclasses import dataclass

import torch

from anybit.cache.attention import attend
from anybit.cache.blocks import Pool, Row, step
from anybit.kernels.attention.kv_page import PageLayout
from anybit.ops import kv, kv_rows
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import PAGE, RowLayout
from anybit.scheme import KVFormat
from anybit.vllm.kv_step import Batch
from cases_decode import Attention


@dataclass(frozen=True)
class Case(Attention):
    """A format, each sequence's tokens before the step and new ones; 0 new ones: padding."""

    format: str
    before: tuple[int, ...] = (299, 0, 127, 1024)
    new: tuple[int, ...] = (1, 1, 1, 1)
    slack: int = 0
    together: int = 1
    gap: int = 256  # bytes between blocks of the pool

    def __str__(self):
        extra = [f"slack{self.slack}"] * bool(self.slack) + ["bf16"] * self.bf16
        extra += [f"together{self.together}"] * (self.together > 1)
        extra += [name for name in ("window", "softcap", "sinks", "alibi") if getattr(self, name)]
        return "-".join(
            (self.format, f"d{self.head_dim}", f"h{self.heads}x{self.kv_heads}", *extra, *map(str, self.new))
        )

    @property
    def rows(self):
        return RowLayout(PageLayout(KVFormat.parse(self.format), self.head_dim), self.slack, self.together)


class Step:
    """A pool after the tokens before a step, the step's tokens, and its rows for kernels and the reference."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cpu", layer: int = 0):
        """layer: selects other tokens in the same blocks."""
        self.case, rows = case, case.rows
        generator = torch.Generator().manual_seed(seed)
        lengths = [b + n if n else 0 for b, n in zip(case.before, case.new, strict=True)]
        width = rows.front + -(-max(lengths) // PAGE)
        blocks = sum(rows.front + n // PAGE for n in lengths if n) + 3
        size = rows.layout.page_bytes * case.kv_heads
        # Stale block contents read as NaN, in 16 bits and as scales.
        raw = torch.full((blocks, size + case.gap), 0xFF, dtype=torch.uint8)
        self.pages = raw.as_strided(
            (blocks, case.kv_heads, rows.layout.page_bytes), (size + case.gap, rows.layout.page_bytes, 1)
        )
        free = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
        self.table = torch.zeros(len(lengths), width, dtype=torch.int32)
        for row, length in zip(self.table, lengths, strict=True):
            for i in range(rows.front + length // PAGE if length else 0):
                row[i] = free.pop()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *case.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.most = max(case.new)
        self.pool = Pool(rows, self.pages, case.dtype)
        if layer:
            generator.manual_seed(1000 * seed + layer)
        tokens = [torch.randn(3, max(n, 1), case.heads, case.head_dim, generator=generator) for n in lengths]
        tokens = [x.to(case.dtype) for x in tokens]
        self.old = [Row(self.table[i], 0, b, 0) for i, b in enumerate(case.before)]
        for i, (row, n) in enumerate(zip(self.old, case.new, strict=True)):
            if n and row.end:
                step(self.pool, [row], *self.parts([tokens[i][:, : row.end]]))
        self.q, self.k, self.v = self.parts(
            [x[:, b : b + n] for x, b, n in zip(tokens, case.before, case.new, strict=True)]
        )
        self.batch = [
            Row(self.table[i], int(self.starts[i]), int(self.starts[i + 1]), b)
            for i, (b, n) in enumerate(zip(case.before, case.new, strict=True))
            if n
        ]
        if device != "cpu":
            raw = raw.to(device)
            self.pages = raw.as_strided(self.pages.shape, self.pages.stride())
            for name in ("table", "lengths", "starts", "q", "k", "v"):
                setattr(self, name, getattr(self, name).to(device))

    def parts(self, tokens):
        q, k, v = torch.cat(tokens, 1)
        return q, k[:, : self.case.kv_heads].contiguous(), v[:, : self.case.kv_heads].contiguous()

    def view(self):
        """The layer as kernels read it."""
        capacity = (self.table.shape[1] - self.case.rows.front) * PAGE + PAGE - 1
        return kv_rows.view(self.case.rows, self.pages, self.table, self.lengths, self.case.dtype, capacity)

    def jobs(self):
        """Every page that may be read: full ones packed, and those in the ring in 16 bits."""
        return [
            (i, 2 * page + exact)
            for i, (b, n) in enumerate(zip(self.case.before, self.case.new, strict=True))
            if n
            for page in range((b + n - 1) // PAGE + 1)
            for exact in (0, 1)
            if (page >= b // PAGE if exact else page < (b + n) // PAGE)
        ]


class Drafts:
    """Speculative decoding steps as a CUDA graph sees them: the same tensors every time, with room for all.

    Every sequence has one token and up to ``most`` - 1 drafts, some of which are rejected after the step; the
    last row is padding. Reference and kernels have a pool each.
    """

    def __init__(self, case: Case, longest: int, device: str = "cpu", seed: int = 0):
        self.case, self.draw, rows = case, torch.Generator().manual_seed(seed), case.rows
        count, self.most = len(case.before), max(case.new)
        each = rows.front + -(-longest // PAGE)
        pages = torch.full((1 + count * each, case.kv_heads, rows.layout.page_bytes), 0xFF, dtype=torch.uint8)
        free = (torch.randperm(count * each, generator=self.draw) + 1).to(torch.int32)
        table = torch.cat((free.view(count, each), torch.zeros(1, each, dtype=torch.int32)))
        self.rows, self.here = [Row(table[i], 0, 0, 0) for i in range(count)], Pool(rows, pages, case.dtype)
        self.have = list(case.before)
        for row, n in zip(self.rows, self.have, strict=True):
            if n:
                step(self.here, [Row(row.table, 0, n, 0)], *self.tokens(n))
        self.pages, self.table = pages.clone().to(device), table.to(device)
        self.lengths = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.starts = torch.zeros(count + 2, dtype=torch.int32, device=device)
        self.q, self.k, self.v = (x.to(device) for x in self.tokens((count + 1) * self.most))
        self.out = torch.empty_like(self.q)
        self.view = kv_rows.view(rows, self.pages, self.table, self.lengths, case.dtype, longest)

    def tokens(self, count: int):
        case = self.case
        heads = (case.heads, case.kv_heads, case.kv_heads)
        return [torch.randn(count, n, case.head_dim, generator=self.draw).to(case.dtype) for n in heads]

    def run(self):
        """One layer of a step: what a graph captures."""
        ragged = kv_rows.Ragged(self.starts, self.most)
        kv.run(kv_rows.store(self.view, self.k, self.v, ragged), 0)
        kv.run(
            kv_rows.decode(
                self.q, self.view, self.case.masks(self.q.device), out=self.out, overlaps=True, ragged=ragged
            ),
            0,
        )

    def advance(self, run) -> float:
        """Step by ``run`` and by the reference; returns the largest relative error of a query and head."""
        new = [int(torch.randint(1, self.most + 1, (), generator=self.draw)) for _ in self.rows]
        total = sum(new)
        ends = torch.tensor([0, *new, 0], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        given = self.tokens(total)
        for kept, x in zip((self.q, self.k, self.v), given, strict=True):
            kept[:total].copy_(x)
        self.starts.copy_(ends)
        self.lengths.copy_(torch.tensor([b + n for b, n in zip(self.have, new, strict=True)] + [0], dtype=torch.int32))
        run()
        batch = [Row(row.table, int(ends[i]), int(ends[i + 1]), self.have[i]) for i, row in enumerate(self.rows)]
        want = step(self.here, batch, *given, self.case.masks())
        for i, n in enumerate(new):
            self.have[i] += int(torch.randint(1, n + 1, (), generator=self.draw))
        error = (self.out[:total].cpu().double() - want.double()).abs().mean(-1) / want.double().abs().mean(-1)
        return float(error.max())


def unpacked(step: Step, pool: Pool, jobs):
    """The output of ``unpack``, in plain torch, starting before ``keep``."""
    out = torch.zeros(len(jobs), 2, step.case.kv_heads, PAGE, step.case.head_dim, dtype=step.case.dtype)
    rows = {int(row.begin): row for row in step.batch}
    for place, (i, asked) in enumerate(jobs):
        row, page = rows[int(step.starts[i])], asked // 2
        if asked % 2:  # in 16 bits
            new = (x[row.begin : row.end].transpose(0, 1) for x in (step.k, step.v))
            old = pool.read_ring(row.table, row.own, row.before)
            both, first = [torch.cat(parts, 1) for parts in zip(old, new, strict=True)], page * PAGE - row.own
        else:
            both, first = pool.read_pages(pool.pages_of(row, page + 1), (page + 1) * PAGE), page * PAGE
        for part, x in enumerate(both):
            found = x[:, first : first + PAGE]
            out[place, part, :, : found.shape[1]] = found.to(step.case.dtype)
    return out


DECODE = [
    Case("kv4g128", heads=32, kv_heads=8),
    Case("kv2g128"),
    Case("kv4", bf16=True),
    Case("kv8", heads=16),
    Case("kv4", head_dim=64, heads=9, kv_heads=3),
    Case("k8v4g32", head_dim=256, heads=2, kv_heads=1, slack=32),
    Case("kv2g32", bf16=True, heads=2, window=200),
    Case("kv4t", softcap=20.0, sinks=True),
    Case("kv4g128", alibi=True, heads=32, kv_heads=2, together=3),
    Case("kv4g128", before=(128, 255, 256, 383, 640, 0, 31, 32), new=(1, 1, 1, 1, 1, 0, 1, 1)),
]
RAGGED = [
    Case("kv4g128", before=(0, 0, 299, 128, 255, 5), new=(1, 400, 100, 128, 1, 0)),
    Case("kv2g128", bf16=True, before=(100, 0, 256), new=(28, 130, 300)),
    Case("kv8", before=(100, 0), new=(29, 129), head_dim=64),
    Case("kv4t", before=(130, 0), new=(5, 257), slack=32),
    Case("k16v4", before=(130, 60), new=(5, 100)),
    Case("kv16", before=(130, 255, 0), new=(5, 129, 257), head_dim=64, together=3),
    Case("kv4g128", before=(300, 0), new=(100, 130), together=3),
    Case("k2v16g32", before=(130, 0), new=(130, 257), bf16=True, head_dim=256, heads=2, kv_heads=1),
]
FEW = [
    Case("kv4g128", before=(299, 0, 126, 512, 124, 383, 0), new=(5, 5, 5, 5, 5, 2, 0), slack=32),
    Case("kv2g128", before=(127, 255, 300), new=(2, 1, 2), slack=32, heads=4, bf16=True),
    Case("kv4", before=(120, 250, 0, 383), new=(16, 3, 9, 16), slack=32, heads=2),
    Case("kv8", before=(127, 500), new=(3, 4), slack=32, head_dim=64, heads=3, kv_heads=1, sinks=True),
    Case("kv4t", before=(125, 300), new=(4, 4), slack=32, softcap=20.0, window=200),
    Case("k8v4g32", before=(126, 140), new=(3, 2), slack=32, head_dim=256, heads=2, kv_heads=1),
    Case("kv4g128", before=(254, 3), new=(4, 2), slack=32, alibi=True, heads=16, kv_heads=1),
]
"""A speculative step: few new tokens per sequence, in one page or two."""
DRAFTED = [
    Case("kv4g128", before=(100, 250, 0), new=(5, 5, 5), slack=32, heads=32, kv_heads=8),
    Case("kv2g128", before=(120, 5), new=(3, 3), slack=32, bf16=True),
    Case("kv8", before=(383, 127), new=(2, 2), slack=32, head_dim=64, heads=4),
]
"""Initial states of ``Drafts``."""


def paged_attention(masks: Masks):
    """FlashAttention over pages, slowly, with the interface of ``kv_step.run``."""

    def prompts(q, keys, values, starts, seen, table, most, out):
        assert most == int(seen.max())
        for i, n in enumerate(seen.tolist()):
            here = slice(int(starts[i]), int(starts[i + 1]))
            if table is None:
                assert here.stop - here.start == n
                k, v = (x[here].transpose(0, 1) for x in (keys, values))
            else:
                pages = table[i, : -(-n // PAGE)].long()
                k, v = (x[pages].flatten(0, 1)[:n].transpose(0, 1) for x in (keys, values))
            out[here] = attend(q[here].float(), k.float(), v.float(), masks)[0].to(q.dtype)

    return prompts


def batch_of(one: Step, room: int) -> Batch:
    """A step as vLLM's builder describes it: requests with few new tokens, then prompts."""
    new = one.case.new
    decodes = next((i for i, n in enumerate(new) if n > 1 + one.case.slack // 8), len(new))
    starts, lengths = one.starts.cpu(), one.lengths.cpu()
    batch = Batch(
        one.table, one.lengths, one.starts, one.q.shape[0], decodes, int(starts[decodes]), max(new[:decodes], default=1)
    )
    if decodes < len(new):
        batch.add_prompts(starts[decodes:].numpy().astype("int64"), lengths[decodes:].numpy().astype("int64"), room)
    return batch


STEPS = [
    Case("kv4g128", before=(299, 128, 125, 128, 0, 300), new=(5, 2, 4, 1, 400, 100), slack=32),
    Case("kv4g128", before=(299, 0, 300, 0, 255, 128), new=(1, 1, 100, 400, 129, 3)),
    Case(
        "kv2g128", before=(127, 128, 0, 0), new=(1, 1, 130, 5), bf16=True, window=150, heads=4, kv_heads=1, together=2
    ),
    Case("kv4", before=(511, 30), new=(1, 226), head_dim=64, softcap=20.0, sinks=True, heads=4, kv_heads=1),
    # Prompts that begin a page, one of them after a page that this step fills; and prompts of one page.
    Case("kv4g128", before=(300, PAGE, 0, 2 * PAGE, 0), new=(1, 1, 300, 130, 40), heads=4, kv_heads=1),
    Case("kv4t", before=(127, 300, 0, 0), new=(5, 1, PAGE, 100), slack=32, heads=4, kv_heads=1),
    Case("kv2g32", before=(0, 0), new=(20, PAGE), bf16=True, window=50, heads=4, kv_heads=1),
]
