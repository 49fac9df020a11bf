"""Decode attention cases of all tests."""

import zlib
from dataclasses import dataclass

import torch

from anybit.cache.attention import Masks
from anybit.cache.kvcache import KVCache
from anybit.kernels.attention.decode import decode
from anybit.kernels.attention.kv_page import PageLayout
from anybit.scheme import KVFormat


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What cases of attention have in common: a model's shape and attention features."""

    head_dim: int = 128
    heads: int = 8
    kv_heads: int = 2
    bf16: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    @property
    def dtype(self):
        return torch.bfloat16 if self.bf16 else torch.float16

    def masks(self, device="cpu"):
        generator = torch.Generator().manual_seed(7)
        sinks = torch.randn(self.heads, generator=generator).to(device) if self.sinks else None
        alibi = (2.0 ** -torch.arange(1, self.heads + 1).float()).to(device) if self.alibi else None
        return Masks(window=self.window, softcap=self.softcap, sinks=sinks, alibi=alibi)


@dataclass(frozen=True)
class Case(Attention):
    """A format, and sequence lengths (new tokens included)."""

    format: str
    queries: int = 1
    lengths: tuple[int, ...] = (300, 1, 128, 1025)
    page: int = 128
    data: str = "normal"

    def __str__(self):
        extra = "".join(
            f"-{name}{value if value is not True else ''}"
            for name in ("queries", "page", "bf16", "window", "softcap", "sinks", "alibi", "data")
            if (value := getattr(self, name)) is not None
            and value is not False
            and value not in ((1, 128, "normal") if value is not True else ())
        )
        return f"{self.format}-d{self.head_dim}-h{self.heads}x{self.kv_heads}{extra}"

    def build(self, device="cpu"):
        """A cache filled as by a model, its sequences, and the queries of the newest tokens."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        cache = KVCache(
            self.format,
            layers=2,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            sequences=len(self.lengths) + 1,
            capacity=-(-max(self.lengths) // self.page) * self.page,
            page=self.page,
            dtype=self.dtype,
            device=device,
        )
        cache.add()  # an empty sequence, so that rows and sequences differ
        sequences = [cache.add() for _ in self.lengths]
        for sequence, length in zip(sequences, self.lengths, strict=True):
            k, v = self.tokens(length - self.queries, generator)
            if length > self.queries:
                cache.extend([sequence], length - self.queries)
                cache.write(1, [sequence], k.to(device), v.to(device))
        if min(self.lengths) >= self.queries:
            cache.extend(sequences, self.queries)
            both = [torch.cat(x) for x in zip(*(self.tokens(self.queries, generator) for _ in sequences), strict=True)]
            cache.write(1, sequences, *(x.to(device) for x in both))
        q = torch.randn(len(sequences), self.queries, self.heads, self.head_dim, generator=generator)
        if self.data == "spiky":  # logits that grow along the sequence, in jumps
            q = q * 4
        if self.data == "sink":
            q = q + 1
        return cache, sequences, q.to(self.dtype).to(device)

    def tokens(self, n, generator):
        shape = (1, max(n, 0), self.kv_heads, self.head_dim)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        if self.data == "outliers":  # a few channels of keys far from zero, as in real models
            k[..., ::17] = k[..., ::17] * 6 + 9
        if self.data == "spiky":
            k = k * (1 + torch.arange(shape[1])[None, :, None, None] / 60)
        if self.data == "huge values":
            v = v * 3000
        if self.data == "sink" and n > 100:  # attention sink: most attention goes to a meaningless token
            k[:, 0], v[:, 0] = 1.0, v[:, 0] / 100
        if self.data == "edges" and n > 100:  # for packing only: NaN, overflow, tiny ranges
            k[:, 3, :, 5], k[:, 9, :, 6], v[:, 7, :, 8], v[:, 70, :, 9] = torch.nan, -torch.inf, torch.inf, torch.nan
            k[..., 16:20], v[:, 20:24] = k[..., 16:20] * 3e-7, v[:, 20:24] * 3e-7
            k[..., 21], v[:, 30] = 2.5, -1.5
            if self.bf16:
                k[:, 11, :, 30], v[:, 40, :, 31] = 1e9, -1e9
            else:  # both ends of float16 in one group, and one end
                k[:, 11, :, 30], k[:, 12, :, 30], k[:, 13, :, 31] = 65504, -65504, 65440
                v[:, 40, :, 31], v[:, 40, :, 32], v[:, 41, :, 33] = -65504, 65504, 65504
        return k.to(self.dtype), v.to(self.dtype)


FORMATS = (
    "kv4g128", "kv2g128", "kv4", "kv2", "kv4g32", "kv2g32", "kv8", "kv8g128", "kv16", "kv4g128t", "kv2g128t", "kv4t",
    "kv2g32t", "k4v2", "k2v4g128", "k8v4g32", "k16v4", "k4v16g128", "kv8t",
)  # fmt: skip
CASES = [
    *(Case(format) for format in FORMATS),
    *(Case(format, bf16=True) for format in ("kv4g128", "kv2", "kv16", "kv4t", "k16v2", "k2v16")),
    *(Case(format, head_dim=64) for format in ("kv4", "kv2", "kv8t", "kv2g32t")),
    *(Case(format, head_dim=96) for format in ("kv4g32", "kv2g128", "kv4g32t")),
    *(Case(format, head_dim=256) for format in ("kv4g128", "kv2g64", "kv4g64t", "kv16")),
    *(Case("kv4g128", heads=h, kv_heads=k) for h, k in ((4, 4), (16, 2), (24, 1), (6, 2), (32, 4))),
    *(Case(format, queries=n, lengths=(300, 16, 128, 1025, 133)) for format in ("kv4g128", "kv2t") for n in (2, 5, 16)),
    *(Case("kv4g128", page=256), Case("kv2", page=64), Case("kv4t", page=256, bf16=True)),
    *(Case(format, window=w) for format in ("kv4g128", "kv2t") for w in (1, 100, 600)),
    Case("kv4g128", queries=9, window=130, lengths=(300, 20, 128, 1025)),
    *(Case(format, softcap=20.0) for format in ("kv4g128", "kv4t")),
    *(Case(format, sinks=True) for format in ("kv4g128", "kv2g128")),
    *(
        Case(format, alibi=True, queries=n, lengths=(300, 3, 128, 1025))
        for format in ("kv4g128", "kv16")
        for n in (1, 3)
    ),
    *(
        Case(format, data=data)
        for format in ("kv4g128", "kv2g128", "kv4t", "kv8")
        for data in ("outliers", "spiky", "huge values")
    ),
    *(Case(format, data="sink", lengths=(300, 640, 1025)) for format in ("kv8g128", "kv8t", "kv4g128")),
    Case("kv4g128", data="spiky", queries=4, bf16=True, lengths=(300, 40, 128, 1025)),
    *(Case(format, heads=32, kv_heads=8, lengths=(640,)) for format in ("kv16", "kv4g128", "kv8")),  # clusters
    Case("kv4g128", lengths=(5000, 17, 129, 2047, 2048, 2049, 1, 640) * 6),
]


def relative_error(got, want):
    """Mean absolute error over mean magnitude."""
    return float((got.double() - want.double()).abs().mean() / want.double().abs().mean().clamp(min=1e-12))


def problem(case: Case) -> decode.Problem:
    """The kernel's problem of a case."""
    capacity = -(-max(case.lengths) // case.page) * case.page
    return decode.Problem(
        PageLayout(KVFormat.parse(case.format), case.head_dim, case.page),
        len(case.lengths),
        case.heads,
        case.kv_heads,
        case.queries,
        ring=min(case.page, 128) + 32,
        window=min(case.page, 128),
        capacity=capacity,
        bf16=case.bf16,
        sliding=case.window is not None,
        softcap=case.softcap is not None,
        alibi=case.alibi,
    )
