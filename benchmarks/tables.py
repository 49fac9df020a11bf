"""Write the tables of docs/results.md from the rows in results/: `python benchmarks/tables.py`.

A table stands between `<!-- table NAME -->` and `<!-- end -->` in the page, and everything between them is replaced.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import BITWISE_SCHEMES, TOKENS
from timing import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    """The rows of one results file; none where it does not exist."""
    path = RESULTS / "h200" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def pack() -> str:
    """Quantize-and-pack: formats down, tokens across, microseconds and the time of reading and writing once."""
    found = rows("pack")
    body = []
    for k, kind, scheme in dict.fromkeys((row["k"], row["case"], row["scheme"]) for row in found):
        same = {row["m"]: row for row in found if (row["k"], row["case"], row["scheme"]) == (k, kind, scheme)}
        cells = [f"{same[m]['us']:.2f} ({same[m]['floor_us']:.2f})" if m in same else "" for m in TOKENS]
        body.append([f"{scheme}, K = {k}, {kind.removeprefix('pack ')}", *cells])
    return table(["", *(f"M = {m}" for m in TOKENS)], body) if body else ""


TABLES: dict[str, Callable[[], str]] = {"gemm_bitwise": gemm_bitwise, "pack": pack}


def main() -> None:
    text = PAGE.read_text()
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        content = make()
        text = pattern.sub(lambda match, c=content: f"{match[1]}\n{c}\n\n{match[2]}", text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
