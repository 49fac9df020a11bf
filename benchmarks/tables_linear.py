"""Tables of linear layers: products of bit planes and of packed weights."""

from collections.abc import Callable

from rows import Row, find, rows, table


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
"""Token counts that pages show."""


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


def experts() -> str:
    """Mixtures down, tokens across: microseconds, and in brackets how many times the floor; peers of the same run."""
    body, tokens = [], (1, 4, 16, 64, 256, 1024, 4096)
    names = {"qwen3-30b": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B", "deepseek-v3": "DeepSeek-V3, 32 experts"}
    for case, words in (names | {"gpt-oss-120b": "gpt-oss-120b, MXFP4"}).items():
        for scheme in ("w4a16g128", "w4a8", "w2a16g128", "w4a16g32e2m1"):
            found = {row["tokens"]: row for row in rows("moe") if (row["case"], row["scheme"]) == (case, scheme)}
            cells = [
                f"{_rounded(row['us'])} ({row['us'] / row['floor_us']:.1f})" if (row := found.get(m)) else ""
                for m in tokens
            ]
            if found:
                body.append([f"{words}, `{scheme}`", *cells])
            if peers := {m: min(row["baselines"].values()) for m, row in found.items() if row["baselines"]}:
                body.append(["vLLM, its faster one", *(_rounded(peers[m]) if m in peers else "" for m in tokens)])
    return table(["us (x floor)", *(f"{m:,}" for m in tokens)], body) if body else ""


MAKERS = (bitplane_shapes, packed_layers, packed_widths, experts)
