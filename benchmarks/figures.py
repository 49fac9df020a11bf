"""Draw the pictures of docs/ from committed rows (needs matplotlib).

speed.svg          README: throughput inside vLLM, and decode steps over long contexts
sizes.svg          schemes: perplexity and decode speed over bits per weight
widths.svg         design/packed: times of narrow weights at few tokens, and their floors
experts.svg        experts: time over the floor, by tokens
packed_roofline.svg, sparse_speedup.svg, serving_rates.svg
                   the MARLIN paper's Fig. 11, its section 5 on Sparse-MARLIN and its serving figure, for an H200
"""

import re
from pathlib import Path

import matplotlib

from rows import Row
from rows import rows as rows_of
from tables import SERVED, weights_gb
from tables_quantizers import quantized
from timing import RATES, read_floor_us

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
READ_TB_S = 121e6 / read_floor_us(121e6) * 1e-6
RATES_SHOWN = (16, 64, 128)
"""Requests per second at which all engines were timed."""


ENGINES = {"vllm": "fp16", "vllm-fp8": "fp8", "vllm-machete": "Machete, w4a16g128", "vllm-anybit": "anybit, "}


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


def widths(rows: list[Row]) -> None:
    """Times by tokens, a curve per width, and the same over the floor."""
    mine = {(row["scheme"], row["m"]): row for row in rows if row["case"] == "mistral-large qkv"}
    counts = sorted({m for _, m in mine})
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for scheme in dict.fromkeys(scheme for scheme, _ in mine):
        us, floor = ([mine[scheme, m][field] for m in counts] for field in ("us", "floor_us"))
        left.plot(counts, us, marker="o", markersize=3, label=scheme)
        right.plot(counts, [a / b for a, b in zip(us, floor, strict=True)], marker="o", markersize=3, label=scheme)
    left.set(title="microseconds, 14336 x 12288, on an H200")
    right.set(title="of the time that reading and multiplying take")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens", xticks=counts, xticklabels=counts)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    save(picture, "widths.svg")


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


def speed(served: list[Row], steps: list[Row]) -> None:
    """Tokens/s of an 8B model in vLLM by requests at once, and steps of one request by context."""
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    mine = [row for row in served if SERVED.items() <= row.items() and row["prompt"] == 128]
    counts = (1, 16, 64, 256)
    for engine, scheme in (
        ("vllm-anybit", "w4a8+w8a16"), ("vllm-anybit", "w4a16g128+w8a16"), ("vllm-fp8", "fp8"),
        ("vllm-machete", "w4a16g128"), ("vllm", "fp16"),
    ):  # fmt: skip
        of = {row["requests"]: row for row in mine if (row["engine"], row["scheme"]) == (engine, scheme)}
        label = ENGINES[engine] + (scheme.partition("+")[0] if engine == "vllm-anybit" else "")
        left.plot(range(4), [of[n]["tokens_per_second"] / 1e3 for n in counts], marker="o", markersize=3, label=label)
    left.set_xticks(range(4), [str(n) for n in counts])
    left.set(xlabel="requests at once", title="thousand tokens/s in vLLM")
    contexts = (512, 32768, 131072)
    for label, schemes in (
        ("anybit, w4a16g128, 4-bit cache", ("w4a16g128", *["w4a16g128-kv4g128"] * 2)),
        ("fp16, torch.compile", ["fp16"] * 3),
    ):
        found = {(row["scheme"], row["context"]): row["ms"] for row in steps if row["batch"] == 1}
        points = [found[each] for each in zip(schemes, contexts, strict=True)]
        color = "C0" if "anybit" in label else "C4"
        right.plot([n / 1024 for n in contexts], points, marker="o", markersize=3, color=color, label=label)
    right.set(xlabel="thousand tokens of context", title="milliseconds a token, one request")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(picture, "speed.svg")


def sizes(found: list[Row], plain: list[Row], steps: list[Row]) -> None:
    """Perplexity of SmolLM2-135M by bits per weight, and decode speed of a Llama-3-8B shape by size."""
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    curves = {"round to nearest": [row for row in plain if "a16" in row["scheme"]]}
    for method in ("gptq", "distill"):
        mine = [row for row in found if (row["method"], row["on"]) == (method, "H200") and "a16" in row["scheme"]]
        curves[method] = [row for row in mine if not re.search("kv|s24", row["scheme"])]
    for label, mine in curves.items():
        points = [(row["bits_per_weight"], row["perplexity"]) for row in mine if row["perplexity"] < 150]
        # Only what nothing smaller beats.
        best = sorted(p for p in points if not any(q[0] <= p[0] and q[1] < p[1] for q in points))
        left.plot(*zip(*best, strict=True), marker="o", markersize=3, label=label)
    for row in curves["distill"]:
        if row["scheme"].endswith("g64asym"):
            place = (row["bits_per_weight"], row["perplexity"])
            left.annotate(row["scheme"], place, (2, -10), textcoords="offset points", fontsize=7)
    exact = next(row["perplexity"] for row in plain if row["scheme"] == "float32")
    left.axhline(exact, color="black", linewidth=0.8)
    left.annotate("float32", (7.3, exact * 0.945), fontsize=7)
    left.set(yscale="log", title="perplexity, SmolLM2-135M-Instruct", ylim=(21, 150), xlim=(2, 8.5))
    ticks = (24, 30, 40, 60, 100)
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.legend(fontsize=8)
    for row in steps:
        if (row["batch"], row["context"]) == (1, 512):
            place, down = (weights_gb(row["scheme"]), row["tokens_per_second"]), row["scheme"] == "w4a8"
            right.plot(*place, "o", markersize=4, color="C0")
            right.annotate(row["scheme"], place, (5, -8 if down else 2), textcoords="offset points", fontsize=7)
    right.set(title="tokens/s, Llama-3-8B shape, one request", xlabel="GB of weights", xlim=(3, 18.5), ylim=(0, 820))
    left.set_xlabel("bits per weight, scales included")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(picture, "sizes.svg")


def experts(rows: list[Row]) -> None:
    picture, axes = plt.subplots(figsize=(6, 3.6))
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case and row["scheme"].startswith("w4a16")]
        points = sorted((row["tokens"], row["us"] / row["floor_us"]) for row in mine)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=case)
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens", ylabel="time / floor", title="Experts in 4 bits on an H200")
    ticks = (1, 4, 16, 64, 256, 1024, 4096)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(picture, "experts.svg")


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "anybit", "svg.fonttype": "none"}
    steps = [row for row in rows_of("generate") if row["case"] == "Llama-3-8B shape"]
    speed(rows_of("serving"), steps)
    sizes(quantized(), rows_of("perplexity", "cpu"), steps)
    roofline([row for row in rows_of("gemm_packed") if "bytes" in row])
    widths(rows_of("widths"))
    rows = [row for row in rows_of("serving") if row["rate"] in RATES_SHOWN and row["model"] == "llama-3-8b"]
    served([row for row in rows if (row["ranks"], row["executor"]) == (1, "mp")])  # as `anybit serve` runs vLLM
    sparse(rows_of("sparse"))
    experts(rows_of("moe"))


if __name__ == "__main__":
    main()
