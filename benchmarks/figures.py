"""Draw docs/packed_roofline.svg from the rows of gemm_packed.json (needs matplotlib).

It is the MARLIN paper's Fig. 11 for an H200: operations a second over operations a byte, a curve a layer, a marker a
batch size, under the roofs measured there.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

from timing import RATES, RESULTS, read_floor_us

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
READ_TB_S = 121e6 / read_floor_us(121e6) * 1e-6
Row = dict[str, Any]


def save(picture: plt.Figure, name: str) -> None:
    """The same rows give the same file."""
    picture.tight_layout()
    picture.savefig(DOCS / name, metadata={"Date": None})
    plt.close(picture)


def roofline(rows: list[Row]) -> None:
    picture, axes = plt.subplots(figsize=(7, 4.5))
    mine = [row for row in rows if row["scheme"] == "w4a16g128"]
    for case in dict.fromkeys(row["case"] for row in mine if row["case"].startswith("llama-3")):
        points = sorted(
            (2 * row["m"] * row["n"] * row["k"] / row["bytes"], 2e-6 * row["m"] * row["n"] * row["k"] / row["us"])
            for row in mine
            if row["case"] == case
        )
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=case)
    knee = RATES["f16"] / READ_TB_S
    axes.plot([2, knee, 6000], [2 * READ_TB_S, RATES["f16"], RATES["f16"]], color="black", linewidth=1)
    axes.annotate(f"{READ_TB_S:.2f} TB/s", (8, 8 * READ_TB_S * 1.15), rotation=32, fontsize=8)
    axes.annotate(f"{RATES['f16']:.0f} TFLOP/s: wgmma, fp16", (700, RATES["f16"] * 1.08), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title="w4a16g128 on an H200")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    save(picture, "packed_roofline.svg")


def main() -> None:
    rows = json.loads((RESULTS / "h200" / "gemm_packed.json").read_text())
    rows = [row for row in rows if "bytes" in row]
    plt.rcParams["svg.hashsalt"] = "anybit"
    roofline(rows)


if __name__ == "__main__":
    main()
