"""Decode attention over the quantized KV cache: BitDecoding's single, batch and page settings (Fig. 9 to 16).

    python benchmarks/attention.py            into results/h200/decode_attention.json, in a minute
    python benchmarks/attention.py --compile  only compile the kernels, which needs no GPU
    python benchmarks/attention.py --seconds 30       the most important rows first, as many as fit
    python benchmarks/attention.py --only 8x32768 --dry
    python benchmarks/attention.py --figure   only draw docs/kvcache.svg from the rows (needs matplotlib)

Times are of the attention kernel alone in a CUDA graph with programmatic dependent launch, over pages larger than L2,
with 64 tokens in the residual of every sequence. Each row is checked against attention over the dequantized cache, and
timed in the same run as PyTorch's fp16 backends.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybit import jit
from anybit.cache.attention import decode_kernel, decode_reference
from anybit.cache.kvcache import KVCache
from anybit.device import Device
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.decode import decode
from anybit.kernels.attention.kv_page import PageLayout
from anybit.kernels.attention.kv_quantize import kv_quantize
from anybit.scheme import KVFormat
from timing import RESULTS, merge_rows, read_floor_us, stamp, time_graph

SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 32768), (32, 8192), (64, 4096), (128, 2048))
FORMATS = ("kv4g128", "kv2g128", "kv4g128t", "kv2g128t", "kv8g128t", "kv8g128")
HEADS = ((32, 8), (64, 8), (32, 32))
KEY = ("case", "kv", "batch", "context", "heads_q", "heads_kv", "page", "residual", "how")
FIGURE = Path(__file__).parent.parent / "docs" / "kvcache.svg"
DIM = 128


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement."""

    case: str
    kv: str
    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    page: int = 128
    residual: int = 64
    how: str = ""

    @property
    def layout(self) -> kv_page.PageLayout:
        """The pages."""
        return kv_page.PageLayout(KVFormat.parse(self.kv), DIM, self.page)

    @property
    def bytes(self) -> int:
        """Bytes that one call must read."""
        pages = self.batch * self.context // self.page * self.kv_heads * self.layout.page_bytes
        return pages + self.batch * self.residual * self.kv_heads * DIM * 4

    def problem(self) -> decode.Problem:
        """The kernel's problem."""
        window = min(self.page, 128)
        sizes = (self.batch, self.heads, self.kv_heads)
        return decode.Problem(self.layout, *sizes, ring=window + 32, window=window, capacity=self.context + 256)


HOW = {
    "2 warps": {"warps": 2, "stages": 2, "paired": False},
    "4 warps": {"warps": 4, "stages": 2, "paired": False},
    "8 warps": {"warps": 8, "stages": 2, "paired": False},
    "float16 keys": {"paired": False},
    "no early start": {},
}
"""Steps of the breakdown and of the dequantization cost: what differs from the default kernel."""


def rows() -> list[Row]:
    """Every row of the table, most important first."""
    shapes = ((8, 32768), (1, 131072), (32, 8192), (64, 4096), (1, 32768), (128, 2048), (1, 4096))
    assert sorted(shapes) == sorted(SHAPES)
    first = [Row("main", kv, batch, context) for batch, context in shapes[:4] for kv in FORMATS[:2]]
    rest = [
        Row("main" if heads == HEADS[0] else "heads", kv, batch, context, *heads)
        for heads in HEADS
        for batch, context in shapes
        for kv in FORMATS
    ]
    how = [Row("breakdown", kv, 8, 32768, how=how) for kv in FORMATS[:2] for how in HOW]
    residual = [
        Row("residual", "kv4g128", 8, context, residual=residual)
        for context in (4096, 16384, 65536)
        for residual in (1, 64, 127)
    ]
    pages = [Row("page", kv, 8, 32768, page=page) for page in (64, 256) for kv in ("kv4", "kv2")]
    groups = [
        Row("groups", kv, 8, 32768) for kv in ("kv4", "kv2", "kv4g32", "kv2g32", "k4v2g128", "k8v4g128", "kv8g128")
    ]
    found = [*first, *rest[: len(rest) // 3], *how, *residual, *pages, *groups, *rest]
    return list(dict.fromkeys(found))


def config_of(row: Row, device: Device) -> decode.Config:
    """The kernel config of a row."""
    problem, wanted = row.problem(), dict(HOW.get(row.how, {}))
    chosen = decode.default(problem, device)
    if wanted:
        how = {"warps": chosen.warps, "stages": chosen.stages} | wanted
        return decode.make(problem, device, **how)
    return chosen


def fill(row: Row) -> tuple[KVCache, list[int]]:
    """The cache of a row, memoized for rows that use it differently."""
    return _fill(dataclasses.replace(row, case="", how="", heads=0))


@functools.lru_cache(1)
def _fill(row: Row) -> tuple[KVCache, list[int]]:
    """A cache of pages drawn from 64 encoded ones, scattered over the pool, with enough layers to exceed L2."""
    layers = max(1, min(8, math.ceil(300e6 / row.bytes)))
    cache = KVCache(
        row.kv, layers=layers, kv_heads=row.kv_heads, head_dim=DIM, sequences=row.batch,
        capacity=row.context + row.page, page=row.page, device="cuda",
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(64 * row.page, DIM, device="cuda", generator=generator).half() for _ in range(2))
    pages = kv_page.encode(cache.layout, k, v).reshape(64, -1)
    for layer in range(layers):
        for head in range(row.kv_heads):
            drawn = torch.randint(64, (cache.pages.shape[1],), device="cuda", generator=generator)
            cache.pages[layer, :, head] = pages[drawn]
    cache.residual.normal_(generator=generator)
    random.Random(1).shuffle(cache.ledger.pool._free)
    sequences = [cache.add() for _ in range(row.batch)]
    cache.extend(sequences, row.context + row.residual)
    cache.newest_are_few = True
    return cache, sequences


def measure(row: Row) -> dict[str, object]:
    """Check and time one row."""
    cache, sequences = fill(row)
    device = Device.of(cache.table)
    config = config_of(row, device)
    cache.newest_are_few = row.how != "no early start"
    q = torch.randn(row.batch, 1, row.heads, DIM, device="cuda").half()
    out = torch.empty_like(q)

    def call(i: int) -> object:
        return decode_kernel(q, cache, i % cache.layers, sequences, config=config, out=out)

    call(0)
    ends = sorted({0, row.batch - 1}) if row.context <= 8192 else [row.batch - 1]
    want, _ = decode_reference(q[ends], cache, 0, [sequences[i] for i in ends])
    error = float((out[ends].float() - want.float()).abs().mean() / want.float().abs().mean())
    if not error < 2e-3:
        raise AssertionError(f"{row}: mean relative error {error}")
    timing = time_graph(call, calls=24, replays=9)
    cache.newest_are_few = True
    return {
        "case": row.case, "kv": row.kv, "batch": row.batch, "context": row.context, "heads_q": row.heads,
        "heads_kv": row.kv_heads, "page": row.page, "residual": row.residual, "how": row.how,
        "us": round(timing.us, 2), "floor_us": round(read_floor_us(row.bytes), 2), "bytes": row.bytes,
        "error": error, "warps": config.warps, "stages": config.stages,
        "paired": config.paired, "checked": True,
    }  # fmt: skip


def baselines(batch: int, context: int, heads: int, kv_heads: int) -> dict[str, float]:
    """Microseconds of PyTorch's fp16 attention over as many keys, residual included, by each fast backend."""
    size = batch * kv_heads * context * DIM * 4
    copies = max(1, min(6, math.ceil(300e6 / size)))
    k, v = (
        torch.randn(copies, batch, kv_heads, context + 64, DIM, device="cuda", dtype=torch.float16) for _ in range(2)
    )
    q = torch.randn(batch, heads, 1, DIM, device="cuda", dtype=torch.float16)
    found = {}
    for name, backend in (("flash attention 2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def call(i: int) -> object:
            return torch.nn.functional.scaled_dot_product_attention(q, k[i % copies], v[i % copies], enable_gqa=True)

        try:
            with sdpa_kernel(backend):
                found[name] = round(time_graph(call, calls=6, replays=5).us, 2)
        except RuntimeError as error:
            print(name, "refused:", str(error)[:100])
    return found


def pack_prompt(kv: str) -> Iterator[Callable[[], dict[str, object]]]:
    """Quantize and pack a prompt of 128k tokens; its floor is reading it once."""

    def make() -> dict[str, object]:
        cache = KVCache(kv, layers=1, kv_heads=8, head_dim=DIM, sequences=1, capacity=131072 + 128, device="cuda")
        k, v = (torch.randn(1, 131072, 8, DIM, device="cuda").half() for _ in range(2))
        cache.add()
        cache.extend([0], 131072)
        cache.write(0, [0], k, v)
        expected = kv_page.encode(cache.layout, k[0, :128].transpose(0, 1), v[0, :128].transpose(0, 1)).flatten(1)
        if not torch.equal(cache.pages[0, cache.ledger.entry(0).pages[0]], expected):
            raise AssertionError(f"{kv}: the first page is not what the reference packs")
        us = time_graph(lambda i: cache.write(0, [0], k, v), calls=4, replays=5).us
        return _pack_row("pack prompt", kv, 1, 131072, us, read_floor_us(2 * k.numel() * 2))

    yield make


def pack_steps(kv: str, batch: int = 32) -> Iterator[Callable[[], dict[str, object]]]:
    """Decode steps of ``batch`` sequences in which every sequence completes a window, and none does."""
    cache = KVCache(kv, layers=1, kv_heads=8, head_dim=DIM, sequences=batch, capacity=512, device="cuda")
    cache.residual.normal_()
    k, v = (torch.randn(batch, 1, 8, DIM, device="cuda").half() for _ in range(2))
    every = [cache.add() for _ in range(batch)]
    for length, case in ((256, "append, windows full"), (300, "append")):

        def make(length: int = length, case: str = case) -> dict[str, object]:
            cache.extend(every, length - cache.length(0))
            cache.write(0, every, k, v)
            newest = cache.read_ring(0, every[-1], length - 1, length)
            if not all(torch.equal(x[:, 0], y[-1, 0]) for x, y in zip(newest, (k, v), strict=True)):
                raise AssertionError(f"{kv}, {case}: the newest token is not in the residual")
            if length % 128 == 0:
                window = cache.read_ring(0, every[-1], length - 128, length)
                page = cache.ledger.entry(every[-1]).pages[length // 128 - 1]
                if not torch.equal(cache.pages[0, page], kv_page.encode(cache.layout, *window).flatten(1)):
                    raise AssertionError(f"{kv}, {case}: the page is not what the reference packs")
            us = time_graph(lambda i: cache.write(0, every, k, v), calls=64, replays=5).us
            read = batch * 8 * 2 * DIM * 2 * (128 if length % 128 == 0 else 1)
            return _pack_row(case, kv, batch, length, us, read_floor_us(read))

        yield make


def _pack_row(case: str, kv: str, batch: int, context: int, us: float, floor: float) -> dict[str, object]:
    return {
        "case": case, "kv": kv, "batch": batch, "context": context, "heads_kv": 8, "page": 128, "us": round(us, 2),
        "floor_us": round(floor, 2), "residual": 0, "how": "",
    }  # fmt: skip


def kernels_of(wanted: list[Row], packs: Sequence[str]) -> list[tuple[jit.Kernel, str]]:
    """The kernels of these rows and their architectures: arguments of ``jit.cached``."""
    device = Device.named("sm_90a")
    stored = [PageLayout(KVFormat.parse(kv), DIM, 128) for kv in packs]
    kernels = [decode.kernel(config_of(row, device), row.layout) for row in wanted]
    kernels += [
        kv_quantize.kernel(kv_quantize.default(kv_quantize.Problem(layout, 1, 8, n)))
        for layout in stored
        for n in (1, 2)
    ]
    return [(kernel, device.arch) for kernel in dict.fromkeys(kernels)]


@functools.cache
def stamped() -> dict[str, str]:
    """Provenance of this run's rows."""
    return stamp()


def show(found: dict[str, object]) -> None:
    silent = ("gpu", "torch", "commit", "date", "bytes", "checked")
    print({name: value for name, value in found.items() if name not in silent}, flush=True)


def draw(found: list[dict[str, Any]]) -> None:
    """Plot residual overhead, dequantization cost and the breakdown, like the paper's Fig. 14 to 16."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "anybit"  # reproducible output
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    shape = {(row["case"], row["kv"], row.get("how", "")): row["us"] for row in found if row.get("batch") == 8}
    residual = [row for row in found if row["case"] == "residual"]
    for tokens in (64, 127):
        least = {row["context"]: row["us"] for row in residual if row["residual"] == 1}
        points = sorted((row["context"], row["us"]) for row in residual if row["residual"] == tokens)
        places = range(len(points))
        left.plot(places, [100 * (us / least[n] - 1) for n, us in points], marker="o", label=f"{tokens} tokens")
        left.set_xticks(places, [f"{n // 1024}k" for n, _ in points])
    left.set(title="Residual in 16 bits, batch 8, 4 bits", xlabel="context", ylabel="% more time than 1 token")
    left.legend()
    main = {row["kv"]: row["us"] for row in found if (row["case"], row["batch"], row["context"]) == ("main", 8, 32768)}
    steps = ("2 warps", "4 warps", "8 warps", "float16 keys", "no early start")
    names = {"float16 keys": "all warps", "no early start": "integer keys"}
    for index, kv in enumerate(FORMATS[:2]):
        parts = [shape.get(("breakdown", kv, how)) for how in ("copies alone", "nothing unpacked")]
        if None not in parts and kv in main:
            for bar, (us, name) in enumerate(
                zip([*parts, main[kv]], ("copies", "+ products", "+ unpacking"), strict=True)
            ):
                middle.bar(index * 4 + bar, us, color=f"C{bar}", label=None if index else name)
        times = [(names.get(how, how), shape.get(("breakdown", kv, how))) for how in steps]
        times = [(name, us) for name, us in [*times, ("early start", main.get(kv))] if us is not None]
        right.plot([name for name, _ in times], [us for _, us in times], marker="o", label=kv)
    middle.set(title="Where the time goes, 8 x 32k", ylabel="us")
    middle.set_xticks([1, 5], ["4 bits", "2 bits"])
    middle.legend()
    right.set(title="Step by step, 8 x 32k", ylabel="us", ylim=(0, None))
    right.tick_params(axis="x", rotation=25)
    right.legend()
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows of this batch x context (8x32768), or pack")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no row after this many seconds")
    parser.add_argument("--compile", action="store_true", help="compile the kernels of all rows, measure nothing")
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--figure", action="store_true", help="draw the figure from the rows, measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "decode_attention.json")
    options = parser.parse_args()
    if options.figure:
        draw(json.loads(options.out.read_text()))
        return
    begun = time.monotonic()
    wanted = [row for row in rows() if options.only in ("", f"{row.batch}x{row.context}")]
    base: dict[tuple[int, ...], dict[str, float]] = {}

    def add(make: Callable[[], dict[str, object]], **more: object) -> None:
        if time.monotonic() - begun > options.seconds:
            return
        try:
            found = {"checked": True} | make() | more | stamped()
        except AssertionError as wrong:  # skip a wrong row, still write the others
            print("WRONG", wrong, flush=True)
            return
        show(found)
        if not options.dry:
            merge_rows(options.out, [found], KEY)

    def attention(some: list[Row]) -> None:
        for row in some:
            shape = (row.batch, row.context, row.heads, row.kv_heads)
            if time.monotonic() - begun > options.seconds:
                print(f"no time for {row}", flush=True)
                continue
            if shape not in base:
                base[shape] = baselines(*shape)
                torch.cuda.empty_cache()
            add(lambda row=row: measure(row), baselines=base[shape])

    packs = FORMATS if options.only in ("", "pack") else ()
    if options.compile:
        with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 16)) as pool:
            pool.starmap(jit.cached, kernels_of(wanted, packs), chunksize=1)
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
        return
    first, rest = wanted[:12], wanted[12:]
    # Fork the compilers before this process has a CUDA context. Later kernels compile meanwhile.
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 16)) as pool:
        pool.starmap(jit.cached, kernels_of(first, packs), chunksize=1)
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
        others = pool.starmap_async(jit.cached, kernels_of(rest, ()), chunksize=1)
        attention(first)
        _fill.cache_clear()
        for kv in packs:
            for pack in (pack_prompt, pack_steps, *(functools.partial(pack_steps, batch=n) for n in (1, 8))):
                for make in pack(kv):
                    add(make)
        others.wait()
        attention(rest)
    print(f"{time.monotonic() - begun:.0f} s in total", flush=True)


if __name__ == "__main__":
    main()
