"""Methods against schemes: perplexity of SmolLM2-135M on Wikipedia prose, and a picture of perplexity against size.

    python benchmarks/quantizers.py --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt [SCHEME:METHOD ...]

From folder to folder with the methods' own defaults, on a GPU if there is one. Calibration reads the second half of the
text, evaluation the first 16 windows of 512 tokens of the first. Rows are added to quantizers.json in
benchmarks/results/h200 or cpu one by one; those of the same case, scheme, method and options are replaced.

`--op` also evaluates in 16 bits, once through plain dequantized arithmetic and once through anybit's kernels: APT-LLM's
Table V. A scheme with a KV cache is evaluated through the cache. `--jobs N` measures N cases at once, which does not
change them, only their seconds. `--blocks DIR` lets methods that start from the same calibrated blocks share them
(their seconds are added up), `--missing` leaves out what has a row: both are for runs that may be cut off.
`--figure` only draws docs/quantizers.svg from the rows (needs matplotlib).
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from anybit import evaluate
from anybit.errors import AnyBitError, KernelError
from anybit.integrations.cache import AnyBitCache
from anybit.integrations.loading import load_model
from anybit.linear import QuantLinear
from anybit.quantize.methods import METHODS, quantize_folder
from perplexity import commit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "quantizers.svg"
SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
CASES = [f"{scheme}:{method}" for scheme in SCHEMES for method in ("rtn", "gptq", "learned")]
CASES += ["float32:rtn", "w6a6g64asym-xasym:smooth", "w4a4g64asym-xasym:rotate"]
# What the papers compare with and without their kernels, in schemes that a kernel of ours runs.
THROUGH_KERNELS = ["w6a6:smooth", "w4a4:rotate", "w4a4g128:rotate", "w4a8:smooth", "w2a4:learned", "w4a16g128:gptq"]
KV = ["w4a16g64asym-kv4:gptq", "w4a16g64asym-kv2g32:gptq"]
# They calibrate the same blocks first.
PLAIN = ("gptq", "learned")
FLOAT32, HALF = torch.float32, torch.float16


def measure(
    model: Path, text: Path, scheme: str, method: str, options: dict[str, Any], op: bool, blocks: Path | None = None
) -> dict[str, Any]:
    """Quantize, reload, evaluate through the layers that a user gets.

    blocks: a folder for calibrated blocks, which methods that begin alike take from each other.
    """
    content = evaluate.read_text(text)
    cut = len(content) // 2
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "second.txt").write_text(content[cut:], encoding="utf-8")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        folder, bits = model, 16.0
        shared = None if blocks is None else blocks / scheme / ("plain" if method in PLAIN else method)
        if scheme != "float32":
            given = {"text": Path(scratch) / "second.txt", **options} if METHODS[method].calibrated else options
            if shared is not None and METHODS[method].calibrated:
                given["resume"] = shared
            folder = Path(scratch) / "model"
            bits = quantize_folder(model, folder, scheme, method, options=given).bits_per_weight
        seconds = time.perf_counter() - started
        print(f"# {scheme} {method}: quantized in {seconds:.1f} s", file=sys.stderr, flush=True)
        if shared is not None and shared.is_dir():
            note = shared / "seconds.txt"
            seconds += float(note.read_text()) if note.exists() else 0.0
            note.write_text(str(seconds))
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        found = perplexities(folder, content[:cut], scheme, op)
    return {
        "case": "smollm2-135m wikipedia, first half",
        "scheme": scheme,
        "method": method,
        "options": options,
        "bits_per_weight": round(bits, 4),
        **found,
        "quantize_seconds": round(seconds, 1),
        "peak_gib": None if peak is None else round(peak, 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def perplexities(folder: Path, text: str, scheme: str, op: bool) -> dict[str, Any]:
    """Perplexity in float32, and if asked in 16 bits: dequantized, and through the kernels."""
    ways: dict[str, tuple[str | None, torch.dtype]] = {
        "perplexity": (None if scheme == "float32" else "reference-decoded", FLOAT32)
    }
    if op:
        ways |= {"perplexity_dequantized": ("reference-decoded", HALF), "perplexity_kernels": (None, HALF)}
    found: dict[str, Any] = {}
    for name, (backend, dtype) in ways.items():
        try:
            loaded = load_model(folder, backend=backend, dtype=dtype)
            for layer in loaded.model.modules():
                if isinstance(layer, QuantLinear):
                    layer.prepare()
        except KernelError as error:
            found[name.replace("perplexity", "refused")] = str(error)
            continue
        windows = evaluate.windows_of(loaded.tokenizer(text[:100_000]).input_ids, 512, 16)
        cache = None
        if loaded.scheme is not None and loaded.scheme.kv is not None:
            cache = partial(AnyBitCache, loaded.scheme, config=loaded.model.config, capacity=512)
        result = evaluate.perplexity(loaded.model, windows, cache=cache)
        found |= {name: round(result.perplexity, 4), "scored": result.scored}
        del loaded
    return found


def add(row: dict[str, Any], file: Path) -> None:
    """Put a row into a file in place of an older one of its kind."""
    rows = json.loads(file.read_text()) if file.exists() else []
    key = ("case", "scheme", "method", "options")
    rows = [old for old in rows if any(old.get(k) != row.get(k) for k in key)] + [row]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def known(file: Path, scheme: str, method: str, options: dict[str, Any]) -> bool:
    """Whether a file has a row of a case."""
    rows = json.loads(file.read_text()) if file.exists() else []
    wanted = {"scheme": scheme, "method": method, "options": options}
    return any(all(row.get(k) == v for k, v in wanted.items()) for row in rows)


def alone(case: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Measure a case in a process of its own; None if it failed."""
    command = [sys.executable, __file__, case, "--model", arguments.model, "--text", arguments.text, "--print"]
    command += ["--options", json.dumps(arguments.options)] + (["--op"] if arguments.op else [])
    command += ["--blocks", arguments.blocks] if arguments.blocks else []
    threads = str(max((os.cpu_count() or 1) // arguments.jobs, 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{case} failed: {done.stderr[-2000:]}", flush=True)
        return None
    row: dict[str, Any] = json.loads(lines[-1])
    return row


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
    parser.add_argument("--op", action="store_true", help="evaluate through the kernels too")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--blocks", type=Path, default=None, help="a folder for blocks that methods share")
    parser.add_argument("--missing", action="store_true", help="only cases that have no row yet")
    parser.add_argument("--output", type=Path, default=None, help="a folder for the rows")
    parser.add_argument("--print", action="store_true", help="only print the rows")
    parser.add_argument("--figure", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    place = arguments.output or RESULTS / ("h200" if torch.cuda.is_available() else "cpu")
    lock = Lock()

    def one(case: str) -> None:
        scheme, method = case.split(":")
        given = (arguments.model, arguments.text, scheme, method, arguments.options, arguments.op, arguments.blocks)
        if arguments.missing and known(place / "quantizers.json", scheme, method, arguments.options):
            return
        try:
            row = measure(*given) if arguments.print or arguments.jobs == 1 else alone(case, arguments)
        except AnyBitError as error:  # the other cases are still worth having
            print(f"{case} failed: {error}", flush=True)
            return
        with lock:
            if row is not None:
                print(json.dumps(row), flush=True)
                if not arguments.print:
                    add(row, place / "quantizers.json")

    if not arguments.figure:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(one, arguments.cases))
    if arguments.figure:
        figure([row for file in RESULTS.glob("*/quantizers.json") for row in json.loads(file.read_text())])


if __name__ == "__main__":
    main()
