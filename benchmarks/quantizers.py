"""Methods against schemes: perplexity of SmolLM2-135M on Wikipedia prose, and a picture of perplexity against size.

    python benchmarks/quantizers.py --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt [SCHEME:METHOD ...]

Calibration reads the second half of the text, evaluation the first 16 windows of 512 tokens of the first. Rows are
added to benchmarks/results/cpu/quantizers.json one by one; those of the same case, scheme, method and options are
replaced. `--figure` only draws docs/quantizers.svg from the rows (needs matplotlib).
"""

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from anybit import evaluate
from anybit.integrations.loading import load_model
from anybit.quantize.methods import METHODS, quantize_folder
from perplexity import commit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "quantizers.json"
FIGURE = ROOT / "docs" / "quantizers.svg"
SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
CASES = [f"{scheme}:{method}" for scheme in SCHEMES for method in ("rtn", "gptq", "learned")]
CASES += ["w6a6g64asym-xasym:smooth", "w4a4g64asym-xasym:rotate"]


def measure(model: Path, text: Path, scheme: str, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Quantize, reload, evaluate through the layers that a user gets."""
    content = evaluate.read_text(text)
    with tempfile.TemporaryDirectory() as scratch:
        second = Path(scratch) / "second.txt"
        second.write_text(content[len(content) // 2 :], encoding="utf-8")
        started = time.perf_counter()
        given = {"text": second, **options} if METHODS[method].calibrated else {}
        saved = quantize_folder(model, Path(scratch) / "model", scheme, method, options=given)
        seconds = time.perf_counter() - started
        loaded = load_model(Path(scratch) / "model")
        ids = loaded.tokenizer(content[: len(content) // 2][:100_000]).input_ids
        result = evaluate.perplexity(loaded.model, evaluate.windows_of(ids, 512, 16))
    return {
        "case": "smollm2-135m wikipedia, first half",
        "scheme": scheme,
        "method": method,
        "options": options,
        "bits_per_weight": round(saved.bits_per_weight, 4),
        "perplexity": round(result.perplexity, 4),
        "scored": result.scored,
        "quantize_seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def add(row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    key = ("case", "scheme", "method", "options")
    rows = [old for old in rows if any(old.get(k) != row.get(k) for k in key)] + [row]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def figure(rows: list[dict[str, Any]]) -> None:
    """Perplexity over the unquantized model's, against bits a weight, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "anybit"  # the same rows give the same file
    picture, axes = plt.subplots(figsize=(7, 4.5))
    base = {row["case"]: row["perplexity"] for row in rows if row["scheme"] == "float32"}
    for method in METHODS:
        points: dict[float, float] = {}
        for row in rows:
            if row["method"] == method and row["case"] in base and "a16" in row["scheme"]:
                ratio = row["perplexity"] / base[row["case"]]
                points[row["bits_per_weight"]] = min(ratio, points.get(row["bits_per_weight"], ratio))
        if points:
            axes.plot(*zip(*sorted(points.items()), strict=True), "o-", label=method)
    axes.set(xlabel="bits per weight, scales included", ylabel="perplexity over float32", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture.tight_layout()
    picture.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, help="SCHEME:METHOD")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="options of the method, as JSON")
    parser.add_argument("--figure", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    if not arguments.figure:
        for case in arguments.cases:
            scheme, method = case.split(":")
            row = measure(arguments.model, arguments.text, scheme, method, arguments.options)
            print(json.dumps(row), flush=True)
            add(row)
    figure(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
