"""Draw docs/packed_roofline.svg, sparse_speedup.svg and serving_rates.svg from committed rows (needs matplotlib).

The first is the MARLIN paper's Fig. 11 for an H200: operations/s over arithmetic intensity, a curve per layer, a
marker per batch size, under the roofs measured there. The second is its section 5 on Sparse-MARLIN: speedup
over fp16 by batch size, dense and 2:4 sparse, and the time of 2:4 relative to dense weights. The third is
MARLIN's serving figure: latency over request rate.
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
RATES_SHOWN = (16, 64, 128)
"""Requests per second at which all engines were timed."""


def save(picture: plt.Figure, name: str) -> None:
    """Save reproducibly."""
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


def sparse(rows: list[Row]) -> None:
    mine = [row for row in rows if row["case"] == "llama-3-8b gate_up" and "dtype" not in row]
    gate_up = {(row["scheme"], row["m"]): row for row in mine}
    counts = sorted({m for _, m in gate_up})
    us = {key: row.get("us_product", row["us"]) for key, row in gate_up.items()}
    for (_, m), row in gate_up.items():
        us |= {(name, m): time for name, time in row["baselines"].items()}
    picture, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    for name in ("w4a16g128s24", "w4a16g128", "cusparselt fp16", "w4a8s24", "w4a8", "cusparselt int8"):
        known = [m for m in counts if {(name, m), ("cublas fp16", m)} <= us.keys()]
        points = [(m, us["cublas fp16", m] / us[name, m]) for m in known]
        left.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name) if points else None
    left.axhline(1, color="black", linewidth=0.8)
    left.set(yscale="log", ylabel="times faster than cuBLAS fp16", title="gate_up, 28672 x 4096, on an H200")
    ticks = [0.5, 1, 1.5, 2, 3, 4, 6]
    left.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    for name in dict.fromkeys(scheme for scheme, _ in gate_up if scheme.endswith("s24")):
        points = [(m, us[name, m] / us[name[:-3], m]) for m in counts if {(name, m), (name[:-3], m)} <= us.keys()]
        right.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
    right.set(ylabel="of the time of dense weights of the same width", title="2:4 over dense", ylim=(0.5, 1.05))
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens", xticks=counts, xticklabels=counts)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(picture, "sparse_speedup.svg")


def served(rows: list[Row]) -> None:
    """Median latencies of requests that arrive at random, a curve per engine."""
    picture, both = plt.subplots(1, 2, figsize=(9, 3.6))
    names = {"vllm": "", "vllm-fp8": "", "vllm-machete": "Machete, ", "vllm-anybit": "anybit, "}
    for engine, scheme in dict.fromkeys((row["engine"], row["scheme"]) for row in rows):
        of_rate = {row["rate"]: row for row in rows if (row["engine"], row["scheme"]) == (engine, scheme)}  # the last
        if of_rate.keys() != set(RATES_SHOWN):
            continue
        mine = [of_rate[rate] for rate in sorted(of_rate)]
        for axes, field in zip(both, ("ttft_ms", "tpot_ms"), strict=True):
            label = f"{names[engine]}{scheme}"
            axes.plot([r["rate"] for r in mine], [r[field] for r in mine], marker="o", markersize=3, label=label)
    for axes, title in zip(both, ("time to the first token, ms", "time of each later token, ms"), strict=True):
        axes.set(xscale="log", xlabel="requests a second", title=title)
        axes.set_xticks(RATES_SHOWN, [f"{rate:g}" for rate in RATES_SHOWN])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    save(picture, "serving_rates.svg")


def main() -> None:
    rows = json.loads((RESULTS / "h200" / "gemm_packed.json").read_text())
    rows = [row for row in rows if "bytes" in row]
    plt.rcParams["svg.hashsalt"] = "anybit"
    roofline(rows)
    rows = json.loads((RESULTS / "h200" / "serving.json").read_text())
    rows = [row for row in rows if row["rate"] in RATES_SHOWN and row["model"] == "llama-3-8b" and row["ranks"] == 1]
    served([row for row in rows if row["executor"] == "mp"])  # as `anybit serve` runs vLLM
    sparse(json.loads((RESULTS / "h200" / "sparse.json").read_text()))


if __name__ == "__main__":
    main()
