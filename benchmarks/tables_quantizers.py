"""Tables of quantizers: perplexity by scheme and method, and of other quantizers."""

import math

from rows import Row, rows, table


def perplexity() -> str:
    """Round-to-nearest on a CPU: schemes down."""
    body = []
    for row in rows("perplexity", "cpu"):
        if row["scheme"] in ("w4a16g256asym", "w4a16asym", "w3a16g32asym"):
            continue
        bits = 32 if row["scheme"] == "float32" else row["bits_per_weight"]
        body.append([f"`{row['scheme']}`", f"{bits:.2f}", _perplexity(row["perplexity"])])
    return table(["scheme", "bits per weight", "perplexity"], body)


_FIRST = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
"""Schemes that head the table."""
_METHODS = ("rtn", "gptq", "distill", "smooth", "rotate", "smooth_rotate")
_COLUMNS = ("rtn", "gptq", "distill")


_COURSE = {"minutes", "written", "seed", "bits"}
"""Options of a distillation in so many minutes, on text that was written in so many seconds."""


def quantized() -> list[Row]:
    """Rows of whole quantizers with their defaults, with machines in ``on``; those in minutes as ``distilled`` says."""
    both = {"CPU": rows("quantizers", "cpu"), "H200": rows("quantizers"), "H100": rows("quantizers", "h100")}
    mine = [row | {"on": on} for on, found in both.items() for row in found if row["case"].endswith("first half")]
    mine = [row for row in mine if "perplexity" in row]
    timed = distilled([row for row in mine if "minutes" in row["options"] and row["options"].keys() <= _COURSE])
    newer = {(row["scheme"], row["method"]) for row in timed}
    plain = [row for row in mine if not row["options"] and (row["scheme"], row["method"]) not in newer]
    return [*plain, *timed]


def distilled(found: list[Row]) -> list[Row]:
    """Rows of the most minutes for each scheme and budget of bits: the mean of seeds, with ``minutes``."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        options = row["options"]
        bits = f" --bits {options['bits']:g}" if "bits" in options else ""
        minutes = options["minutes"] + options.get("written", 0) / 60
        named = row | {"scheme": row["scheme"] + bits, "minutes": minutes}
        groups.setdefault((named["scheme"], row["method"]), []).append(named)
    means = []
    for rows_of in groups.values():
        most = max(row["minutes"] for row in rows_of)
        same = [row for row in rows_of if row["minutes"] == most]
        mean = math.exp(sum(math.log(row["perplexity"]) for row in same) / len(same))
        means.append(same[0] | {"perplexity": mean})
    return means


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"


def quantizers() -> str:
    """Perplexity by scheme and method, folder to folder: schemes down, methods across, rare ones in one column.

    The machine is named unless it is an H200, and ``distill``'s minutes where they were given.
    """
    mine = quantized()
    known = {(row["scheme"], row["method"]) for row in mine if row["on"] == "H200"}
    mine = [row for row in mine if row["on"] == "H200" or (row["scheme"], row["method"]) not in known]
    plain = next((row["perplexity"] for row in mine if row["scheme"] == "float32"), None)
    body = []
    order = [*_FIRST, *(row["scheme"] for row in mine if "perplexity_kernels" not in row)]
    for scheme in dict.fromkeys(scheme for scheme in order if scheme != "float32"):
        cells: dict[str, list[str]] = {name: [] for name in (*_COLUMNS, "others")}
        for row in (row for method in _METHODS for row in mine if (row["scheme"], row["method"]) == (scheme, method)):
            own = row["method"] in _COLUMNS
            words = [*([] if own else [f"`{row['method']}`"]), *([row["on"]] if row["on"] != "H200" else [])]
            words += [f"{row['minutes']:.0f}"] if "minutes" in row else []
            shown = _perplexity(row["perplexity"]) + f" ({', '.join(words)})" * bool(words)
            cells[row["method"] if own else "others"].append(shown)
        if any(cells.values()):
            body.append([f"`{scheme}`", *map("; ".join, cells.values())])
    if plain is None:
        return ""
    header = [f"scheme (float32 {plain:.2f})", *(f"`{method}`" for method in _COLUMNS), "others"]
    return table(header, body)


def peers() -> str:
    """Perplexity by other quantizers on the same model, text and scheme, and by ours: schemes down."""
    mine, theirs = quantized(), [row for machine in ("cpu", "h200") for row in rows("peers", machine)]
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
