"""Tables of linear layers: products of bit planes and of packed weights."""

from collections.abc import Callable

from cases import BITWISE_SCHEMES, MODELS
from rows import Row, find, rows, table

PACKED_SCHEMES = ("w4a16g128", "w2a16g128", "w3a16g128", "w8a16g128", "w4a8", "w2a8", "w4a8fp")
"""Schemes of gemm_packed.json that pages show."""


def cell(row: Row | None) -> str:
    """Microseconds alone / with quantize-and-pack, and the latter's speedup over cuBLAS fp16."""
    if row is None:
        return ""
    fp16 = row["baselines"].get("cublas fp16")
    speed = f" ({fp16 / row['us_with_pack']:.2f}x)" if fp16 else ""
    return f"{row['us']:.1f} / {row['us_with_pack']:.1f}{speed}"


def gemm_bitwise() -> str:
    """One table per case name: shapes down, schemes across."""
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


def bitplane_shapes() -> str:
    """Three of Llama-3-8B's products: schemes across; microseconds alone / with quantize-and-pack."""
    schemes, body = ("w1a1", "w1a2", "w2a2", "w3a4", "w4a4"), []
    for layer, m in (("gate_up", 4096), ("o", 1024), ("o", 64), ("gate_up", 1)):
        shape = {"case": f"llama-3-8b {layer}", "m": m, "kernel": "wgmma"}
        found = [row for scheme in schemes if (row := find(rows("gemm_bitwise"), scheme=scheme, **shape))]
        cells = [f"{_rounded(row['us'])} / {_rounded(row['us_with_pack'])}" for row in found]
        cublas = _rounded(found[0]["baselines"]["cublas fp16"])
        body.append([f"{m} x {found[0]['n']} x {found[0]['k']}", cublas, *cells])
    return table(["M x N x K", "cuBLAS fp16", *(f"`{scheme}`" for scheme in schemes)], body)


def _rounded(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


SHOWN = (1, 16, 64, 256, 4096)
"""Token counts that pages show; ``gemm_packed`` has all."""


def gemm_packed() -> str:
    """One table per model and scheme: tokens down, layers across; microseconds, and speedup over cuBLAS fp16."""
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
    """Microseconds, and speedup over cuBLAS fp16; "" without a row."""
    if row is None:
        return ""
    fp16 = row["baselines"].get("cublas fp16")
    return f"{row['us']:.1f}" + (f" ({fp16 / row['us']:.2f}x)" if fp16 else "")


def packed_layers() -> str:
    """Two layers of Llama-3-8B in w4a16g128, a line per kernel: some token counts across, microseconds."""
    found = [row for row in rows("gemm_packed") if row["scheme"] == "w4a16g128" and row["m"] in SHOWN]
    tokens, body = sorted({row["m"] for row in found}), []
    for layer in ("o", "gate_up"):
        mine = {row["m"]: row for row in found if row["case"] == f"llama-3-8b {layer}"}
        ways: dict[str, Callable[[Row], float | None]] = {
            f"**{layer}**": lambda row: row["us"],
            "cuBLAS fp16": lambda row: row["baselines"].get("cublas fp16"),
            "humming-kernels": lambda row: row["baselines"].get("humming"),
        }
        for words, of in ways.items():
            values = [of(mine[m]) if m in mine else None for m in tokens]
            if any(values):
                body.append([words, *("" if us is None else _rounded(us) for us in values)])
    return table(["us", *(f"M = {m}" for m in tokens)], body) if body else ""


def packed_widths() -> str:
    """gate_up of Llama-3-8B: widths and activations down, some token counts across; speedup over cuBLAS fp16."""
    found = [row for row in rows("gemm_packed") if row["case"] == "llama-3-8b gate_up" and row["m"] in SHOWN]
    tokens, body = sorted({row["m"] for row in found}), []
    for scheme in sorted({row["scheme"] for row in found}, key=lambda name: (name.partition("a")[2], name)):
        mine = {row["m"]: row for row in found if row["scheme"] == scheme}
        if scheme in ("w2a16g128", "w3a16g128", "w4a16g128", "w8a16g128", "w4a8", "w8a8", "w4a8fp"):
            each = [(row["baselines"]["cublas fp16"], row["us"]) if (row := mine.get(m)) else None for m in tokens]
            body.append([scheme, *(f"{pair[0] / pair[1]:.2f}" if pair else "" for pair in each)])
    return table(["x cuBLAS fp16", *(f"M = {m}" for m in tokens)], body) if body else ""


MAKERS = (gemm_bitwise, bitplane_shapes, gemm_packed, packed_layers, packed_widths)
