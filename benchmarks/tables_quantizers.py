"""The tables of quantizers: perplexity by scheme and method, and by other quantizers."""

from rows import Row, rows, table


def perplexity() -> str:
    """Rounding to nearest on a CPU: schemes down."""
    body = []
    for row in rows("perplexity", "cpu"):
        plain = row["plain_rounding"]
        cells = [f"{row['bits_per_weight']:.2f}", _perplexity(row["perplexity"]), _perplexity(plain) if plain else ""]
        body.append([f"`{row['scheme']}`", *cells])
    return table(["scheme", "bits per weight", "perplexity", "plain rounding"], body)


PLAIN_GPTQ = {
    "w4a16g64asym": 28.11, "w3a16g128asym": 45.77, "w3a16g64asym": 46.32, "w2a16g64asym": 239, "w2a16g32asym": 155.6,
}  # fmt: skip
"""Perplexity by a plain GPTQ on the same sample: clip search, act-order, 24 thousand tokens."""
_METHODS = ("rtn", "gptq", "blockwise", "distill", "smooth", "rotate", "smooth_rotate")
_RENAMED = {"block": "blockwise", "learned": "distill", "spread": "smooth_rotate"}
"""What older rows call some methods."""


def _quantized() -> list[Row]:
    """Rows of whole quantizers with their defaults, machines named in ``on``."""
    both = {"CPU": rows("quantizers", "cpu"), "H200": rows("quantizers"), "H100": rows("quantizers", "h100")}
    mine = [
        row | {"on": on, "method": _RENAMED.get(row["method"], row["method"])}
        for on, found in both.items()
        for row in found
        if row["case"].endswith("first half")
    ]
    return [row for row in mine if not row["options"] and "perplexity" in row]


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"


def quantizers() -> str:
    """Perplexity of every scheme and method from folder to folder, over the machines: schemes down, methods across."""
    mine = _quantized()
    plain = next((row["perplexity"] for row in mine if row["scheme"] == "float32"), None)
    methods = [m for m in _METHODS if any(row["method"] == m for row in mine)]
    body = []
    order = [*PLAIN_GPTQ, *(row["scheme"] for row in mine if "perplexity_kernels" not in row)]
    for scheme in dict.fromkeys(scheme for scheme in order if scheme != "float32"):
        cells = []
        for method in methods:
            each = [row for row in mine if (row["scheme"], row["method"]) == (scheme, method)]
            cells.append("; ".join(f"{_perplexity(row['perplexity'])} ({row['on']})" for row in each))
        if any(cells):
            body.append([f"`{scheme}`", *cells, f"{PLAIN_GPTQ.get(scheme, '')}"])
    if plain is None:
        return ""
    return table([f"scheme (float32 {plain:.2f})", *(f"`{method}`" for method in methods), "plain GPTQ"], body)


def peers() -> str:
    """Perplexity by other quantizers on the same model, text and scheme, and by ours: schemes down."""
    mine, theirs = _quantized(), [row for machine in ("cpu", "h200") for row in rows("peers", machine)]
    names, body = sorted({row["method"] for row in theirs}), []
    for scheme in sorted({row["scheme"] for row in theirs}, reverse=True):
        cells = []
        for found, methods in ((theirs, names), (mine, ("gptq", "distill"))):
            for method in methods:
                each = [row["perplexity"] for row in found if (row["scheme"], row["method"]) == (scheme, method)]
                cells.append(_perplexity(min(each)) if each else "")
        body.append([f"`{scheme}`", *cells])
    return table(["scheme", *names, "`gptq`", "`distill`"], body) if body else ""


MAKERS = (perplexity, quantizers, peers)
