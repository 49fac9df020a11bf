"""What was aimed at on an H200, beside what the rows in results/ say: the tables of docs/results.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cases import LLAMA3_8B
from rows import Row, find, rows, table

LARGE = {"w1a1": 8500, "w1a2": 5000, "w2a2": 3000, "w3a4": 1150, "w4a4": 870}
"""TOPS at M = 4096, N = 28672, K = 4096, with the whole epilogue."""
SMALL = {"w1a1": 2.5, "w1a2": 2.6, "w2a2": 3.1, "w3a4": 4.5, "w4a4": 5.2}
"""Microseconds at M = 64, N = K = 4096."""
PACKED = {
    "qkv": {1: 3.9, 16: 5.8, 64: 8.5, 256: 20},
    "o": {1: 3.2, 16: 4.6, 64: 6.7, 256: 15},
    "gate_up": {1: 14.8, 16: 16.5, 64: 25, 256: 85},
    "down": {1: 8.4, 16: 11, 64: 15, 256: 45},
}
"""Microseconds in w4a16g128 by layer and tokens; at M = 4096 0.97 times cuBLAS fp16's speed."""
WIDTHS = {"w1a16g128": 0.5, "w2a16g128": 0.64, "w3a16g128": 0.83, "w8a16g128": 2.0}
"""The time of gate_up for one token, over w4a16g128's."""
DECODE = {
    (8, 32768, 8): {"kv4g128": (68, 3.5), "kv2g128": (41, 5.9)},
    (1, 131072, 8): {"kv4g128": (36.5, 3.5), "kv2g128": (25, 5.1)},
    (32, 8192, 8): {"kv4g128": (70, 3.4), "kv2g128": (43, 5.5)},
    (64, 4096, 8): {"kv4g128": (73, 3.3), "kv2g128": (46, 5.2)},
    (8, 32768, 32): {"kv4g128": (262, None), "kv2g128": (146, None)},
}
"""(batch, context, KV heads): microseconds, and times as fast as the faster fp16 backend."""
PERPLEXITY = {
    "w4a16g64asym": 26.5, "w3a16g128asym": 36, "w3a16g64asym": 34, "w2a16g64asym": 90, "w2a16g32asym": 70,
}  # fmt: skip
"""SmolLM2-135M on the Wikipedia sample, by the best method; 23.94 (23.79 here) unquantized."""
PLAIN_GPTQ = {
    "w4a16g64asym": 28.11, "w3a16g128asym": 45.77, "w3a16g64asym": 46.32, "w2a16g64asym": 239, "w2a16g32asym": 155.6,
}  # fmt: skip
"""The same by a plain GPTQ: clip search, act-order, 24 thousand tokens."""


COMPILED_MS = 5.98
"""A step of a Llama-3-8B-shaped fp16 model at batch 1, as torch.compile makes transformers' own."""


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, what was aimed at, what was measured (None: nothing). more: more of it is better."""

    what: str
    aim: float
    measured: float | None
    unit: str = ""
    more: bool = False

    def line(self) -> list[str]:
        """A line of a table."""
        sign = "at least" if self.more else "at most"
        if self.measured is None:
            return [self.what, f"{sign} {self.aim:g}{self.unit}", "not measured", ""]
        apart = 1 - self.measured / self.aim if self.more else self.measured / self.aim - 1
        words = f"{100 * apart:.1f}" if apart >= 0.0005 else "< 0.1"
        verdict = "met" if apart <= 0 else f"{words} % {'short' if self.more else 'over'}"
        return [self.what, f"{sign} {self.aim:g}{self.unit}", f"{_number(self.measured)}{self.unit}", verdict]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _lines(figures: Iterable[Figure]) -> str:
    return table(["", "aimed at", "measured", ""], [figure.line() for figure in figures])


def _of(row: Row | None, name: str = "us") -> float | None:
    return None if row is None else row.get(name)


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _times(row: Row | None, baseline: str, name: str = "us") -> float | None:
    """How many times as fast as a baseline of the same row."""
    return None if row is None else _over(row["baselines"].get(baseline), row.get(name))


def aims_bitwise() -> str:
    """Products of bit planes."""

    def figures() -> Iterator[Figure]:
        found = [row for row in rows("gemm_bitwise") if row.get("kernel", "wgmma") == "wgmma"]
        for scheme, aim in LARGE.items():
            row = find(found, case="llama-3-8b gate_up", m=4096, scheme=scheme)
            yield Figure(f"{scheme}, 4096 x 28672 x 4096", aim, _of(row, "tops"), " TOPS", more=True)
        for scheme in LARGE:
            row = find(found, case="llama-3-8b gate_up", m=4096, scheme=scheme)
            kept = _over(_of(row), _of(row, "us_with_pack"))
            yield Figure(f"{scheme}, of which with quantize-and-pack", 0.9, kept, "", more=True)
        for scheme in ("w1a1", "w1a2", "w2a2"):  # where planes are no more than four products
            row = find(found, case="llama-3-8b gate_up", m=4096, scheme=scheme)
            yield Figure(f"{scheme}, 4096 x 28672 x 4096, over fp8", 1, _times(row, "fp8"), "x", more=True)
        for scheme, aim in SMALL.items():
            row = find(found, case="llama-3-8b o", m=64, scheme=scheme)
            yield Figure(f"{scheme}, 64 x 4096 x 4096", aim, _of(row), " us")
        for scheme, aim in (("w1a2", 3.5), ("w2a2", 3.0)):
            row = find(found, case="llama-3-8b o", m=64, scheme=scheme)
            words = f"{scheme}, the same with quantize-and-pack, over cuBLAS fp16"
            yield Figure(words, aim, _times(row, "cublas fp16", "us_with_pack"), "x", more=True)
        for scheme, aim in (("w1a2", 8.0), ("w2a2", 13.5)):
            row = find(found, case="llama-3-8b o", m=1024, scheme=scheme)
            yield Figure(f"{scheme}, 1024 x 4096 x 4096", aim, _of(row), " us")
        for layer in ("down", "gate_up"):
            for scheme in LARGE:
                row = find(found, case=f"llama-3-8b {layer}", m=1, scheme=scheme)
                share = _over(_of(row, "floor_us"), _of(row))
                yield Figure(f"{scheme}, one token, {layer}, of the read floor", 0.6, share, "", more=True)

    return _lines(figures())


def aims_launch() -> str:
    """What comes before a product: its kernel compiled and launched, a layer's weights put into tiles."""

    def figures() -> Iterator[Figure]:
        found = rows("launch")
        for words, name, aim, unit in (
            ("first use of a kernel, compiled", "first_use_s", 3, " s"),
            ("first use of a kernel, from disk", "from_disk_ms", 20, " ms"),
            ("host time of a launch", "launch_host_us", 10, " us"),
        ):
            yield Figure(words, aim, max((row[name] for row in found), default=None), unit)
        layers = [row for row in rows("gemm_packed") if row["case"].startswith("llama-3-8b") and row["m"] == 1]
        for scheme in ("w4a16g128", "w4a8"):
            mine = [row for row in layers if row["scheme"] == scheme]
            size = sum(row["n"] * row["k"] for row in mine)
            seconds = sum(row["n"] * row["k"] / row["prepare_gb_s"] for row in mine)
            words = f"{scheme}, weights of a layer of Llama-3-8B into tiles"
            yield Figure(words, 20, _over(size, seconds), " GB/s", more=True)
            most = max((row["prepare_layers"] for row in mine), default=None)
            yield Figure(f"{scheme}, memory beside the weights meanwhile, in layers", 1, most)

    return _lines(figures())


def aims_packed() -> str:
    """Packed weights: the layers of Llama-3-8B in w4a16g128, microseconds with what was aimed at in brackets."""
    found = rows("gemm_packed")
    body = []
    for layer, aims in PACKED.items():
        cells = []
        for m, aim in aims.items():
            us = _of(find(found, case=f"llama-3-8b {layer}", m=m, scheme="w4a16g128"))
            cells.append("" if us is None else f"{us:.2f} [{aim:g}]{'' if us > aim else ' met'}")
        large = _times(find(found, case=f"llama-3-8b {layer}", m=4096, scheme="w4a16g128"), "cublas fp16")
        cells.append("" if large is None else f"{large:.3f}x [0.97x]{' met' if large >= 0.97 else ''}")
        n, k = LLAMA3_8B[layer]
        body.append([f"{layer} {n} x {k}", *cells])
    return table(["us [aimed at]", *(f"M = {m}" for m in (1, 16, 64, 256)), "M = 4096, over cuBLAS fp16"], body)


def aims_widths() -> str:
    """Packed weights of other widths, 8-bit activations, and whether more tokens ever take less time."""

    def figures() -> Iterator[Figure]:
        found = rows("gemm_packed")
        base = find(found, case="llama-3-8b gate_up", m=1, scheme="w4a16g128")
        for scheme, aim in WIDTHS.items():
            row = find(found, case="llama-3-8b gate_up", m=1, scheme=scheme)
            runs = " (rows of two runs)" if row and base and row["commit"] != base["commit"] else ""
            yield Figure(f"{scheme} over w4a16g128, gate_up, one token{runs}", aim, _over(_of(row), _of(base)))
        for m in (1024, 4096):
            of_layer = {
                layer: times
                for layer in LLAMA3_8B
                if (times := _times(find(found, case=f"llama-3-8b {layer}", m=m, scheme="w4a8"), "cublas fp16"))
            }
            slowest = min(of_layer, key=of_layer.__getitem__, default="no layer")
            words = (
                f"w4a8 with quantization, M = {m}, over cuBLAS fp16, the least of the layers of Llama-3-8B ({slowest})"
            )
            yield Figure(words, 1.9, of_layer.get(slowest), "x", more=True)
        pairs = [
            (_of(find(found, scheme="w2a8", **{name: row[name] for name in ("case", "m", "commit")})), row["us"])
            for row in found
            if row["scheme"] == "w4a8"
        ]
        ratios = [ratio for two, four in pairs if (ratio := _over(two, four))]
        words = f"w2a8 over w4a8, the worst of {len(ratios)} products, each pair of one run"
        yield Figure(words, 1.0, max(ratios, default=None))
        sweep = rows("gemm_packed_sweep")
        for scheme in dict.fromkeys(["w4a16g128", *(row["scheme"] for row in sweep)]):
            words = f"{scheme}, time(M) over time(M') for any M' > M, M to 4096"
            yield Figure(words, 1.1, cliff([row for row in sweep if row["scheme"] == scheme]))

    return _lines(figures())


def cliff(sweep: list[Row]) -> float | None:
    """The most that fewer tokens of a layer take over more of them."""
    worst = None
    for case in {row["case"] for row in sweep}:
        least = None
        for row in sorted((row for row in sweep if row["case"] == case), key=lambda row: -row["m"]):
            if least is not None:
                worst = max(worst or 0.0, row["us"] / least)
            least = row["us"] if least is None else min(least, row["us"])
    return worst


def aims_decode() -> str:
    """Decode attention over a quantized cache, and storing into it."""

    def figures() -> Iterator[Figure]:
        found = rows("decode_attention")
        main = [row for row in found if row["case"] in ("main", "heads") and row["page"] == 128]
        for (batch, context, heads), formats in DECODE.items():
            for kv, (aim, speed) in formats.items():
                row = find(main, batch=batch, context=context, heads_q=32, heads_kv=heads, kv=kv)
                words = f"{kv}, {batch} x {context}, 32/{heads}"
                yield Figure(words, aim, _of(row), " us")
                faster = None if row is None else min(row["baselines"][n] for n in ("cudnn", "flash attention 2"))
                if speed is not None:
                    yield Figure(
                        f"{words}, over the faster fp16 backend", speed, _over(faster, _of(row)), "x", more=True
                    )
        for kv, aim in (("kv4g128", 5.7), ("kv2g128", 9.0)):
            row = find(main, batch=32, context=8192, heads_q=32, heads_kv=8, kv=kv)
            words = f"{kv}, 32 x 8192, 32/8, over FlashAttention-2"
            yield Figure(words, aim, _times(row, "flash attention 2"), "x", more=True)
        shape = {"batch": 8, "context": 32768, "heads_kv": 8, "page": 128}
        for kv in ("kv4g128", "kv2g128"):
            base = _of(find(found, case="main", kv=kv, **shape))
            paged = _over(base, _of(find(found, case="contiguous", kv=kv, **shape)))
            yield Figure(f"{kv}, pages anywhere over pages in order", 1.05, paged)
            residual = _over(base, _of(find(found, case="least residual", kv=kv, **shape)))
            yield Figure(f"{kv}, 64 tokens of residual over one", 1.05, residual)
            yield Figure(
                f"{kv}, keys by token over by channel",
                1.15,
                _over(_of(find(found, case="main", kv=f"{kv}t", **shape)), base),
            )
            row = find(found, case="pack prompt", kv=kv)
            packing = _over(_of(row), _of(row, "floor_us"))
            yield Figure(f"{kv}, packing a prompt of 131072 over reading it", 2.0, packing)
            full = _of(find(found, case="append, windows full", batch=32, kv=kv))
            yield Figure(f"{kv}, 32 windows that become full at once", 5.0, full, " us")

    return _lines(figures())


def aims_models() -> str:
    """Whole models."""

    def figures() -> Iterator[Figure]:
        found = [row for row in rows("generate") if row["case"] == "Llama-3-8B shape" and row["batch"] == 1]
        for scheme, context in (("w4a16g128", 512), ("w4a16g128-kv4g128", 131072)):
            plain = _of(find(found, scheme="fp16", context=context), "ms")
            ours = _of(find(found, scheme=scheme, context=context), "ms")
            words = f"{scheme} over fp16 at its best, Llama-3-8B shape, batch 1, {context} tokens"
            yield Figure(words, 2.8, _over(plain, ours), "x", more=True)
        ours = _of(find(found, scheme="w4a16g128", context=512), "ms")
        words = f"w4a16g128 over transformers' fp16 model compiled whole ({COMPILED_MS} ms, an earlier run)"
        yield Figure(words, 2.8, _over(COMPILED_MS, ours), "x", more=True)

    return _lines(figures())


def aims_quantizers() -> str:
    """Perplexity by the best method, with the shipped defaults from folder to folder on any machine."""

    def figures() -> Iterator[Figure]:
        both = [*rows("quantizers"), *rows("quantizers", "cpu")]
        mine = [
            row for row in both if row["case"].endswith("first half") and not row["options"] and "perplexity" in row
        ]
        for scheme, aim in PERPLEXITY.items():
            best = min(
                (row for row in mine if row["scheme"] == scheme), key=lambda row: row["perplexity"], default=None
            )
            words = f"{scheme}" + (f", `{best['method']}`" if best else "")
            yield Figure(words, aim, _of(best, "perplexity"))
        for scheme, aim in PLAIN_GPTQ.items():
            worst = max((r["perplexity"] for r in mine if (r["scheme"], r["method"]) == (scheme, "gptq")), default=None)
            yield Figure(f"{scheme}, `gptq`, beside plain GPTQ", aim, worst)
        for row in (*rows("peers"), *rows("peers", "cpu")):
            best = min((r["perplexity"] for r in mine if r["scheme"] == row["scheme"]), default=None)
            yield Figure(f"{row['scheme']}, best method beside {row['method']}", round(row["perplexity"], 2), best)
        plain = _of(next((row for row in mine if row["scheme"] == "float32"), None), "perplexity")
        for scheme, method, aim in (("w4a4g64asym-xasym", "spread", 1.25), ("w6a6g64asym-xasym", "smooth", 1.03)):
            row = find((row for row in mine if "quantize_seconds" in row), scheme=scheme, method=method)
            yield Figure(f"{scheme}, `{method}`, over float32", aim, _over(_of(row, "perplexity"), plain))
        apart = [abs(r["perplexity_kernels"] - r["perplexity_dequantized"]) for r in mine if "perplexity_kernels" in r]
        words = f"perplexity through the kernels and dequantized, {len(apart)} schemes, thousandths apart"
        yield Figure(words, 10, 1000 * max(apart) if apart else None)
        large = find(rows("quantize_large"), case="gptq llama-8b")
        yield Figure(f"GPTQ of an 8B model, minutes{_timed(large)}", 15, _of(large, "minutes_whole_model"))
        yield Figure("GPTQ of an 8B model, GiB of the GPU", 40, _of(large, "peak_gib"))
        small = find(rows("quantize_large"), case="gptq smollm2-135m on two cores")
        words = f"GPTQ of a model of SmolLM2's size on two cores, minutes{_timed(small)}"
        yield Figure(words, 6, _of(small, "minutes_whole_model"))

    return _lines(figures())


def _timed(row: Row | None) -> str:
    """Of how many blocks a whole model's time was worked out, where not all were timed."""
    if row is None or len(row["seconds_a_block"]) == row["blocks"]:
        return ""
    return f" ({len(row['seconds_a_block'])} of {row['blocks']} blocks timed)"


def aims_dispatch() -> str:
    """Choices beside the best there is, variants in whole models, and a look-up."""
    found = rows("dispatch_check")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in found))
    figures = []
    for name, words, middle, worst in (
        ("tuned", "after a search", 1.03, 1.10),
        ("map", "by the map alone", 1.10, 1.25),
    ):
        ratios = sorted(row["ratios"][name] for row in found)
        count = f"of {len(ratios)} random problems (commit {commits})"
        figures.append(Figure(f"{words}, over the best: the median {count}", middle, _at(ratios, 0.5), "x"))
        figures.append(Figure(f"{words}, over the best: the worst {count}", worst, _at(ratios, 1.0), "x"))
    models = [row["variants"] for row in rows("dispatch") if row["case"].startswith("llama-3-8b whole")]
    static = [row["dispatch"] / min(us for name, us in row.items() if name.startswith("static")) for row in models]
    what = f"whole models, over the faster static strategy: the worst of {len(static)} points"
    figures.append(Figure(what, 1.02, max(static, default=None), "x"))
    looked = [row["us"] for row in rows("dispatch") if row["case"] == "look-up"]
    tuned = [row["seconds"] for row in rows("dispatch") if row["case"].startswith("anybit tune")]
    what = "`anybit tune` of a model of Llama-3-8B's shape, all token counts"
    figures.append(Figure(what, 300, max(tuned, default=None), " s"))
    figures.append(Figure("a look-up's host time", 1.0, max(looked, default=None), " us"))
    return _lines(figures)


def _at(ordered: list[float], part: float) -> float | None:
    return ordered[round(part * (len(ordered) - 1))] if ordered else None


MAKERS = (
    aims_bitwise,
    aims_launch,
    aims_packed,
    aims_widths,
    aims_decode,
    aims_models,
    aims_dispatch,
    aims_quantizers,
)
