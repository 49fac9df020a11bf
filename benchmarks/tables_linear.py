"""The tables of linear layers: products of bit planes and of packed weights, quantize-and-pack, launches, logits."""

from collections.abc import Callable

from cases import BITWISE_SCHEMES, MODELS, TOKENS
from rows import Row, find, rows, table

PACKED_SCHEMES = ("w4a16g128", "w2a16g128", "w3a16g128", "w8a16g128", "w4a8", "w2a8", "w4a8fp")
"""Those of gemm_packed.json that are shown; the others are in the rows."""


def cell(row: Row | None) -> str:
    """Microseconds alone / with quantize-and-pack, and how many times cuBLAS fp16 the latter is."""
    if row is None:
        return ""
    fp16 = row["baselines"].get("cublas fp16")
    speed = f" ({fp16 / row['us_with_pack']:.2f}x)" if fp16 else ""
    return f"{row['us']:.1f} / {row['us_with_pack']:.1f}{speed}"


def gemm_bitwise() -> str:
    """One table a case name: shapes down, schemes across."""
    found = [row for row in rows("gemm_bitwise") if row.get("kernel", "wgmma") == "wgmma"]
    parts = []
    for name in sorted({row["case"] for row in found}):
        mine = [row for row in found if row["case"] == name]
        schemes = [s for s in BITWISE_SCHEMES if any(row["scheme"] == s for row in mine)]
        body = []
        for m, n, k in sorted({(row["m"], row["n"], row["k"]) for row in mine}, key=lambda s: (s[1], s[2], s[0])):
            same = {row["scheme"]: row for row in mine if (row["m"], row["n"], row["k"]) == (m, n, k)}
            vendor = next(iter(same.values()))["baselines"]
            others = [f"{vendor[v]:.1f}" if v in vendor else "" for v in ("cublas fp16", "int8", "fp8")]
            body.append([f"{m} x {n} x {k}", *others, *(cell(same.get(s)) for s in schemes)])
        header = ["M x N x K", "cuBLAS fp16", "int8", "fp8", *schemes]
        parts.append(f"**{name}**\n\n{table(header, body)}")
    return "\n\n".join(parts)


def bitwise_shapes() -> str:
    """Some products of bit planes: shapes down, schemes across."""
    found = [row for row in rows("gemm_bitwise") if row.get("kernel", "wgmma") == "wgmma"]
    body = []
    for m, n, k in ((4096, 28672, 4096), (1024, 4096, 4096), (64, 4096, 4096), (1, 4096, 14336), (1, 28672, 4096)):
        cells = []
        for scheme in ("w1a1", "w2a2", "w4a4"):
            row = next((r for r in found if (r["m"], r["n"], r["k"], r["scheme"]) == (m, n, k, scheme)), None)
            cells.append(f"{row['us']:.2f} / {row['us_with_pack']:.2f}" if row else "")
        body.append([f"{m} x {n} x {k}", *cells])
    header = ["alone / with quantize-and-pack", "w1a1", "w2a2", "w4a4"]
    return table(header, body) if any(cell for line in body for cell in line[1:]) else ""


def sm80_bitplane_gemm() -> str:
    """The products by mma.sync, which sm_80 to sm_89 run, beside wgmma's on the same GPU."""
    found = rows("gemm_bitwise")
    body = []
    for row in (row for row in found if row.get("kernel") == "mma.sync"):
        keys = {key: row[key] for key in ("case", "scheme", "m", "n", "k")}
        other = find(found, kernel="wgmma", **keys)
        shape = f"{row['case']}, {row['m']} x {row['n']} x {row['k']}, {row['scheme']}"
        body.append([shape, f"{row['us']:.2f}", f"{other['us']:.2f}" if other else ""])
    return table(["us", "mma.sync", "wgmma"], body) if body else ""


def launch() -> str:
    """What a kernel costs before it runs."""
    body = [
        [
            f"{row['case']}, {row['scheme']}",
            f"{row['first_use_s']:.2f} s",
            f"{row['from_disk_ms']:.1f} ms",
            f"{row['launch_host_us']:.1f} us",
            f"{row['multiply_host_us']:.1f} us",
        ]
        for row in rows("launch")
    ]
    header = ["kernel", "first use", "from disk", "host time of a launch", "of `multiply`, with its checks"]
    return table(header, body) if body else ""


SHOWN = (1, 4, 16, 64, 256, 4096)
"""The counts of tokens that pages show; ``gemm_packed`` has all."""


def gemm_packed() -> str:
    """One table a model and scheme: tokens down, layers across; microseconds, and how many times cuBLAS fp16."""
    found = rows("gemm_packed")
    parts = []
    for model, layers in MODELS.items():
        names = [f"{model} {layer}" for layer in layers]
        for scheme in PACKED_SCHEMES:
            mine = [row for row in found if row["scheme"] == scheme and row["case"] in names]
            if not mine:
                continue
            body = []
            for m in sorted({row["m"] for row in mine}):
                cells = [_beside_cublas(find(mine, case=name, m=m)) for name in names]
                body.append([f"{m}", *cells])
            shapes = [f"{layer} {n} x {k}" for layer, (n, k) in layers.items()]
            parts.append(f"**{model}, {scheme}**\n\n{table(['M', *shapes], body)}")
    return "\n\n".join(parts)


def _beside_cublas(row: Row | None) -> str:
    """Microseconds, and how many times cuBLAS fp16; nothing where there is no row."""
    if row is None:
        return ""
    fp16 = row["baselines"].get("cublas fp16")
    return f"{row['us']:.1f}" + (f" ({fp16 / row['us']:.2f}x)" if fp16 else "")


def packed_layers() -> str:
    """Llama-3-8B in w4a16g128, a line a layer and way: some counts of tokens across, microseconds."""
    found = [row for row in rows("gemm_packed") if row["scheme"] == "w4a16g128" and row["m"] in SHOWN]
    tokens, body = sorted({row["m"] for row in found}), []
    for layer in MODELS["llama-3-8b"]:
        mine = {row["m"]: row for row in found if row["case"] == f"llama-3-8b {layer}"}
        ways: dict[str, Callable[[Row], float | None]] = {
            f"**{layer}**": lambda row: row["us"],
            "cuBLAS fp16": lambda row: row["baselines"].get("cublas fp16"),
            "humming-kernels": lambda row: row["baselines"].get("humming"),
        }
        for words, of in ways.items():
            values = [of(mine[m]) if m in mine else None for m in tokens]
            if any(values):
                body.append([words, *("" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" for us in values)])
    return table(["us", *(f"M = {m}" for m in tokens)], body) if body else ""


def packed_widths() -> str:
    """gate_up of Llama-3-8B: widths and activations down, some counts of tokens across; times cuBLAS fp16."""
    found = [row for row in rows("gemm_packed") if row["case"] == "llama-3-8b gate_up" and row["m"] in SHOWN]
    tokens, body = sorted({row["m"] for row in found}), []
    for scheme in sorted({row["scheme"] for row in found}, key=lambda name: (name.partition("a")[2], name)):
        mine = {row["m"]: row for row in found if row["scheme"] == scheme}
        if scheme in ("w2a16g128", "w3a16g128", "w4a16g128", "w8a16g128", "w2a8", "w4a8", "w8a8", "w4a8fp"):
            each = [(row["baselines"]["cublas fp16"], row["us"]) if (row := mine.get(m)) else None for m in tokens]
            body.append([scheme, *(f"{pair[0] / pair[1]:.2f}" if pair else "" for pair in each)])
    return table(["x cuBLAS fp16", *(f"M = {m}" for m in tokens)], body) if body else ""


def packed_sweep() -> str:
    """The worst of each layer: schemes down, layers across; how many times the time of more tokens."""
    found, body = rows("gemm_packed_sweep"), []
    layers = MODELS["llama-3-8b"]
    for scheme in dict.fromkeys(row["scheme"] for row in found):
        cells = []
        for layer in layers:
            mine = sorted(
                (row["m"], row["us"])
                for row in found
                if (row["case"], row["scheme"]) == (f"llama-3-8b {layer}", scheme)
            )
            worst = max(((us / later, m, more) for m, us in mine for more, later in mine if more > m), default=None)
            cells.append(f"{worst[0]:.3f} ({worst[1]}, {worst[2]})" if worst else "")
        body.append([scheme, *cells])
    return table(["time(M) / time(M'), worst", *layers], body) if body else ""


def logits() -> str:
    """A real model's logits on the kernels beside the reference's: schemes and backends down."""
    body = [
        [
            f"{row['scheme']} ({row['case']}: {', '.join(row['kernels'])})",
            f"{row['codes_differ']} and {row['sums_differ']}",
            f"{row['results_differ']} of {row['results']:,}",
            f"{row['logits_worst']:.4f}",
            f"{row['tokens_agree']} of {row['tokens']}",
        ]
        for row in rows("logits")
    ]
    header = ["", "codes and sums", "results of layers", "logits, at most", "greedy tokens that agree"]
    return table(header, body) if body else ""


def pack() -> str:
    """Quantize-and-pack: formats down, tokens across, microseconds and the time of reading and writing once."""
    found = rows("pack")
    body = []
    for k, kind, scheme in dict.fromkeys((row["k"], row["case"], row["scheme"]) for row in found):
        same = {row["m"]: row for row in found if (row["k"], row["case"], row["scheme"]) == (k, kind, scheme)}
        cells = [f"{same[m]['us']:.2f} ({same[m]['floor_us']:.2f})" if m in same else "" for m in TOKENS]
        body.append([f"{scheme}, K = {k}, {kind.removeprefix('pack ')}", *cells])
    return table(["", *(f"M = {m}" for m in TOKENS)], body) if body else ""


MAKERS = (
    gemm_bitwise,
    bitwise_shapes,
    sm80_bitplane_gemm,
    launch,
    gemm_packed,
    packed_layers,
    packed_widths,
    packed_sweep,
    logits,
    pack,
)
