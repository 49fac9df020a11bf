"""Write the tables of README.md and docs/ from the rows in results/.

    python benchmarks/tables.py              write them into the pages
    python benchmarks/tables.py --check      exit with 1 if a page is out of date
    python benchmarks/tables.py gemm_packed  print tables by name; --list names them

A table stands between `<!-- table NAME -->` and `<!-- end -->`; the output of the function NAME below
replaces everything between them. tests/test_tables.py fails if a page's tables do not match the rows.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tables_linear
import tables_quantizers
from rows import find, rows, table

ROOT = Path(__file__).parent.parent
SERVED = {"model": "llama-3-8b", "ranks": 1, "executor": "mp", "rate": None}
"""vLLM on one GPU with a separate worker process, as `anybit serve` starts it."""


# -------- README


def headline() -> str:
    """What an H200 achieves, a row per claim."""
    steps, attention, products = rows("generate"), rows("decode_attention"), rows("gemm_bitwise")
    body = []
    for words, scheme, context in (
        ("Llama-3-8B shape, batch 1, a token", "w4a16g128", 512),
        ("the same after 131,072 tokens", "w4a16g128-kv4g128", 131072),
    ):
        shape = {"case": "Llama-3-8B shape", "batch": 1, "context": context}
        plain, ours = find(steps, scheme="fp16", **shape), find(steps, scheme=scheme, **shape)
        if plain and ours:
            speed = f"`{scheme}`, {ours['tokens_per_second']:.0f} tokens/s"
            body.append([words, f"{plain['ms']:.2f} ms", f"{ours['ms']:.2f} ms ({speed})"])
    shape = {**SERVED, "requests": 64, "prompt": 128}
    plain = find(rows("serving"), engine="vllm", **shape)
    ours = find(rows("serving"), engine="vllm-anybit", scheme="w4a8+w8a16", **shape)
    if plain and ours:
        speeds = [f"{row['tokens_per_second']:,.0f} tokens/s" for row in (plain, ours)]
        body.append(["64 requests at once in vLLM", speeds[0], f"{speeds[1]} (`w4a8`)"])
    shape = {"case": "main", "batch": 8, "context": 32768, "heads_q": 32, "heads_kv": 8}
    four, two = (find(attention, kv=kv, **shape) for kv in ("kv4g128", "kv2g128"))
    if four and two:
        caches = f"{four['us']:.0f} us (4-bit cache), {two['us']:.0f} us (2-bit)"
        words = "decode attention, 8 x 32,768 tokens, 32/8 heads"
        body.append([words, f"{four['baselines']['cudnn']:.0f} us (cuDNN)", caches])
    shape = {"case": "llama-3-8b gate_up", "m": 4096, "kernel": "wgmma"}
    found = [row for scheme in ("w4a4", "w2a2", "w1a1") if (row := find(products, scheme=scheme, **shape))]
    if found:
        ours = ", ".join(f"{row['us']:.0f} us (`{row['scheme']}`)" for row in found)
        body.append(["4096 x 28672 x 4096 product", f"{found[0]['baselines']['cublas fp16']:.0f} us (cuBLAS)", ours])
    return table(["", "fp16, at its best", "anybit"], body)


# -------- which scheme


LINEAR, REST = 6.98e9, 1.05e9
"""Parameters of Llama-3-8B's linear layers, and of its embedding and output head, which stay in 16 bits."""


def weights_gb(scheme: str, linear: float = LINEAR, rest: float = REST) -> float:
    """The size of a model, by default of Llama-3-8B's shape, with embedding and output head in 16 bits."""
    found = re.match(r"w(\d)a\d+(?:g(\d+))?(asym)?(s24)?", scheme)
    if found is None:
        return (linear + rest) * 2 / 1e9
    bits = (int(found[1]) + 2) / 2 if found[4] else int(found[1])
    each = (16 + (int(found[1]) if found[3] else 0)) / int(found[2]) if found[2] else 0
    return (linear * (bits + each) / 8 + rest * 2) / 1e9


def choosing() -> str:
    """Memory and speed of a Llama-3-8B shape: schemes down."""
    steps, body = rows("generate"), []
    for scheme in ("fp16", "w8a16g128", "w4a16g128", "w3a16g128", "w2a16g128", "w4a8", "w4a4", "w2a2"):
        cells = [f"{weights_gb(scheme):.1f}"]
        for batch in (1, 16):
            row = find(steps, case="Llama-3-8B shape", scheme=scheme, batch=batch, context=512)
            cells.append(f"{row['tokens_per_second']:,.0f}" if row else "")
        speeds = []
        for m in (64, 4096):
            layer = {"case": "llama-3-8b gate_up", "scheme": scheme, "m": m}
            packed, planes = find(rows("gemm_packed"), **layer), find(rows("gemm_bitwise"), kernel="wgmma", **layer)
            each = [(row, row.get("us_with_pack", row["us"])) for row in (packed, planes) if row]
            ratios = [row["baselines"]["cublas fp16"] / us for row, us in each]
            speeds.append("1" if scheme == "fp16" else f"{max(ratios):.2f}" if ratios else "")
        body.append([f"`{scheme}`", *cells, *speeds])
    heads = ["weights, GB", "tokens/s, batch 1", "tokens/s, batch 16", "64 tokens, x fp16", "4,096 tokens, x fp16"]
    return table(["scheme", *heads], body)


# -------- which scheme fits

SHAPES = {
    "Llama-3.1-8B": (LINEAR, REST, 32),
    "Qwen3-14B": (13.21e9, 1.56e9, 40),
    "Mistral-Small-24B": (22.23e9, 1.34e9, 40),
    "Qwen3-32B": (31.21e9, 1.56e9, 64),
    "Llama-3.3-70B": (68.45e9, 2.10e9, 80),
}
"""Parameters of linear layers, those of the embedding and the output head, and layers of 8 KV heads of 128 channels."""
CONTEXT, KV4 = 32768, 4.53125
"""Tokens that ``fits`` makes room for, and bits per element of kv4."""
ASIDE = 2e9
"""Bytes that ``fits`` leaves for activations and CUDA graphs."""


def fits() -> str:
    """The widest scheme that fits one GPU with a context of 32,768 tokens: models down, GPUs across."""
    schemes, body = ("w8a16g128", "w4a16g128", "w3a16g64asym", "w2a16g64asym"), []
    for name, (linear, rest, layers) in SHAPES.items():
        sizes = {scheme: weights_gb(scheme, linear, rest) for scheme in schemes}
        caches = {suffix: CONTEXT * layers * 2 * 8 * 128 * bits / 8e9 for suffix, bits in (("", 16), ("-kv4", KV4))}
        cells = []
        for gib in (24, 48, 80):
            room = (0.9 * gib * 2**30 - ASIDE) / 1e9
            ways = [f"`{s}{kv}`" for s in schemes for kv, cache in caches.items() if sizes[s] + cache <= room]
            cells.append(next(iter(ways), "two GPUs"))
        shown = [f"{size:.1f}" for size in (weights_gb("fp16", linear, rest), *list(sizes.values())[:3])]
        body.append([name, *shown, ", ".join(f"{cache:.1f}" for cache in caches.values()), *cells])
    heads = ["16 bits", *(f"`{scheme}`" for scheme in schemes[:3]), "cache: 16 bits, `kv4`", "24 GB", "48 GB", "80 GB"]
    return table(["GB", *heads], body)


# -------- whole models


def generate() -> str:
    """Milliseconds per decode step and speedup over fp16: batch and context down, schemes across."""
    found = [row for row in rows("generate") if row["case"] == "Llama-3-8B shape"]
    schemes = list(dict.fromkeys(row["scheme"] for row in found if row["scheme"] != "fp16"))
    body = []
    for batch, context in sorted({(row["batch"], row["context"]) for row in found}, key=lambda s: (s[1], s[0])):
        same = {row["scheme"]: row for row in found if (row["batch"], row["context"]) == (batch, context)}
        plain = same.get("fp16")
        cells = []
        for scheme in schemes:
            ms = same[scheme]["ms"] if scheme in same else None
            speed = f" ({plain['ms'] / ms:.2f}x)" if ms and plain else ""
            cells.append(f"{ms:.2f}{speed}" if ms else "")
        body.append([f"{batch}, {context:,}", f"{plain['ms']:.2f}" if plain else "", *cells])
    return table(["batch, context", "fp16", *schemes], body)


# -------- inside vLLM


def serving() -> str:
    """Step times, throughput and TTFT: engines across."""
    engines = (
        ("fp16", {"engine": "vllm"}),
        ("fp8", {"engine": "vllm-fp8"}),
        ("Machete W4A16", {"engine": "vllm-machete"}),
        ("anybit `w4a16g128`", {"engine": "vllm-anybit", "scheme": "w4a16g128+w8a16"}),
        ("anybit `w4a8`", {"engine": "vllm-anybit", "scheme": "w4a8+w8a16"}),
    )
    return _served(engines, (1, 16, 64, 256), (4096,), SERVED)


def serving_experts() -> str:
    """The same of 12 layers of Qwen3-30B-A3B."""
    engines = (
        ("bf16", {"engine": "vllm"}),
        ("Marlin W4A16", {"engine": "vllm-marlin"}),
        ("anybit `w4a16g128`", {"engine": "vllm-anybit", "scheme": "w4a16g128"}),
    )
    return _served(
        engines, (1, 4, 16, 64), (1024, 4096), {**SERVED, "model": "qwen3-30b-a3b, 12 layers", "executor": "uni"}
    )


def _served(
    engines: Sequence[tuple[str, dict[str, str]]], requests: Sequence[int], prompts: Sequence[int],
    model: dict[str, object],
) -> str:  # fmt: skip
    lines = [(str(count), "step_ms", ".2f", {"requests": count, "prompt": 128}) for count in requests]
    for count in (64, 256):
        lines.append((f"tokens/s at {count}", "tokens_per_second", ",.0f", {"requests": count, "prompt": 128}))
    for prompt in prompts:
        asked = {"requests": 1, "prompt": prompt}
        lines.append((f"first token, prompt of {prompt:,}, ms", "ttft_ms", ".1f", asked))
    body = []
    for words, field, form, asked in lines:
        found = [find(rows("serving"), **model, **engine, **asked) for _, engine in engines]
        body.append([words, *(format(row[field], form) if row else "" for row in found)])
    return table(["requests at once", *(name for name, _ in engines)], body)


# -------- the KV cache


def decode_attention() -> str:
    """Attention of 32 heads over 4-bit and 2-bit caches: microseconds, speedup over cuDNN's fp16, and baselines."""
    found = [row for row in rows("decode_attention") if row["case"] == "main" and row["heads_q"] == 32]
    body = []
    for shape in dict.fromkeys((r["batch"], r["context"], r["heads_q"], r["heads_kv"]) for r in found):
        if shape[0] in (32, 64):  # as 8 and 128
            continue
        keys = dict(zip(("batch", "context", "heads_q", "heads_kv"), shape, strict=True))
        pair = [row for kv in ("kv4g128", "kv2g128") if (row := find(found, kv=kv, **keys)) is not None]
        if len(pair) < 2:
            continue
        others = pair[0]["baselines"]
        speeds = [f"{row['us']:.1f} ({row['baselines']['cudnn'] / row['us']:.2f}x)" for row in pair]
        vendors = [f"{others[name]:.0f}" for name in ("cudnn", "flash attention 2")]
        body.append([f"{shape[0]} x {shape[1]}, {shape[2]}/{shape[3]}", *speeds, *vendors])
    header = ["batch x context, heads", "4 bits", "2 bits", "fp16: cuDNN", "FlashAttention-2"]
    return table(header, body)


def kv_perplexity() -> str:
    """Perplexity with a quantized cache: bits down, how keys are grouped across."""
    found = [row for row in rows("kv_accuracy") if row["case"] == "perplexity"]
    body = []
    for name in ("kv8", "kv4", "kv4g32", "kv2", "kv2g32"):
        ways = [find(found, kv=name + suffix) for suffix in ("", "t", "rot", "trot")]
        if ways[0] is not None:
            cells = [f"{row['perplexity']:.2f}" if row else "" for row in ways]
            body.append([name, f"{ways[0]['bits']:.2f}", *cells])
    kinds = ["keys by channel", "keys by token", "by channel, rotated", "by token, rotated"]
    return table(["", "bits an element", *kinds], body)


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        headline, choosing, fits, *tables_linear.MAKERS, generate, serving, serving_experts, decode_attention,
        kv_perplexity, *tables_quantizers.MAKERS,
    )
}  # fmt: skip
_MARK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Pages that may contain tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "design").glob("*.md"))]


def written(text: str) -> str:
    """Regenerate a page's tables. Raises KeyError for an unknown table."""

    def made(match: re.Match[str]) -> str:
        content = TABLES[match[2]]()
        return f"{match[1]}\n{content}\n\n{match[3]}" if content else match[1] + match[3]

    return _MARK.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="print these tables and write nothing")
    parser.add_argument("--list", action="store_true", help="print the names of all tables")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(TABLES)):
        parser.error(f"there is no table {', '.join(unknown)}: --list shows their names")
    if arguments.list or arguments.names:
        print("\n\n".join(TABLES[name]() for name in arguments.names) or "\n".join(TABLES))
        return
    stale = []
    for page in pages():
        text = page.read_text()
        new = written(text)
        if new != text:
            stale.append(page.name)
            if not arguments.check:
                page.write_text(new)
    print(f"{'out of date' if arguments.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    sys.exit(arguments.check and bool(stale))


if __name__ == "__main__":
    main()
