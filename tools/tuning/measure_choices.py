"""What choosing kernels is worth, in sums of linear layers and in whole models, and what it costs.

python tools/tuning/measure_choices.py ablate      # variants over whole models -> results/h200/dispatch.json
python tools/tuning/measure_choices.py model       # whole models at some of the same points
python tools/tuning/measure_choices.py look-up     # host time of a look-up
python tools/tuning/measure_choices.py clock       # anybit tune by the clock
python tools/tuning/measure_choices.py draw        # docs/dispatch.svg, docs/dispatch_model.svg
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

from anybit.scheme import Scheme
from anybit.tune.dispatch import Dispatcher, dispatcher
from anybit.tune.policy import Origin, Policy, read
from anybit.tune.processes import Worker, compile_one
from anybit.tune.registry import Layout, LinearProblem, tiles_of
from anybit.tune.roofline import floor_us
from anybit.tune.search import Options, race
from anybit.tune.space import Candidate, builtin
from anybit.tune.worker import TimingBudget
from cases import LLAMA3_8B
from layers import MODELS
from measure_models import BATCHES, LAYERS, PROMPTS, TIMED, one_config, whole_models
from timing import RESULTS, merge_rows, stamp


def look_up(options: argparse.Namespace) -> None:
    """Host time from a layer's input to the plan of its launch, in eager mode; a CUDA graph has none of it."""
    import torch

    from anybit import QuantLinear
    from anybit.ops import bitwise, packed
    from anybit.packing import QuantizedWeight, words_per_row

    rows: list[dict[str, Any]] = []
    for scheme, backend in (("w4a16g128", "packed"), ("w4a8", "packed"), ("w2a4", "bitwise")):
        n, k, form = 4096, 4096, Scheme.parse(scheme).weights
        words = torch.zeros(n, words_per_row(k, form.bits), dtype=torch.int32, device="cuda")
        weight = QuantizedWeight(words, torch.ones(n, form.groups(k), device="cuda"), None, (n, k), form)
        layer = QuantLinear.from_weight(weight, scheme, backend=backend)
        x = torch.randn(37, k, device="cuda").half()
        layer(x)
        kept = layer._prepared
        assert kept is not None
        spec, tiles = kept.spec, packed._weight(kept.tensors, kept.spec) if backend == "packed" else None

        def plan(spec: Any = spec, x: Any = x, tiles: Any = tiles) -> object:
            return bitwise._plan(spec, x) if tiles is None else packed._plan(spec, x, tiles)

        us = min(timeit.repeat(plan, number=5000, repeat=15)) / 5000 * 1e6
        row = {
            "case": "look-up",
            "scheme": scheme,
            "batch": None,
            "prompt": None,
            "backend": backend,
            "us": round(us, 3),
        }
        rows.append(row | {"how": "host time, the least of 15 repeats of 5000", "checked": True} | stamp())
        print(row)
    merge_rows(options.rows, rows, ROW_KEY)


def clock(options: argparse.Namespace) -> None:
    """How long ``anybit tune`` takes for a model of Llama-3-8B's shape, nothing compiled before."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    rows: list[dict[str, Any]] = []
    for scheme in options.schemes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=LAYERS,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                architectures=["LlamaForCausalLM"],
            ).save_pretrained(folder)
            save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
            command = [sys.executable, "-m", "anybit", "tune", str(folder), "--scheme", scheme]
            began = time.perf_counter()
            fresh = os.environ | {"ANYBIT_CACHE_DIR": name}
            done = subprocess.run(command, env=fresh, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - began
            said = " ".join(done.stderr.split("products known")[-1].split())
            print(f"{scheme}: {seconds:.1f} s, exit code {done.returncode}; {said}", flush=True)
            if done.returncode == 0:
                rows.append(
                    {"case": "anybit tune, llama-3-8b", "scheme": scheme, "batch": None, "prompt": None}
                    | {"us": round(seconds * 1e6), "seconds": round(seconds, 1), "cores": os.cpu_count()}
                    | {"how": "the command by the clock, no kernel compiled before", "checked": True} | stamp()
                )  # fmt: skip
    merge_rows(options.rows, rows, ROW_KEY)


# -------- what choosing is worth: the ablations of ADAngel (section 6.4) and APT-LLM (figures 15 and 16)

ABLATED = ("w4a8", "w2a4")
ROW_KEY = ("case", "scheme", "batch", "prompt")
_HOW = "sum of the linear layers of 32 decoder layers, each timed by itself after a check against the reference"
VARIANTS = ("dispatch", "static bitwise", "static padding", "rule by M", "without split", "built in", "one config")
"""rule by M: bitwise to 8 tokens, split to 64, padding above; where there is no split, padding takes its place.
without split: the same as dispatch where split is illegal. one config: scheduling without mapping, APT-LLM's figure 15:
the built-in config of padding for 64 tokens of a 4096 x 4096 layer runs everything."""


def ablated(schemes: Sequence[str]) -> Iterator[tuple[str, list[LinearProblem]]]:
    """The products of each scheme, layer by layer."""
    tokens = sorted({*BATCHES, *(batch * prompt for batch in BATCHES for prompt in PROMPTS)})
    for scheme in schemes:
        s = Scheme.parse(scheme)
        yield scheme, [LinearProblem(m, n, k, s.weights, s.activations) for n, k in LLAMA3_8B.values() for m in tokens]


def contestants(product: LinearProblem, by: Dispatcher) -> dict[str, Candidate]:
    """What each variant that is measured runs for a product."""
    tiles = tiles_of(product.activations)
    return {
        "dispatch": by.choose(product).candidate,
        "static bitwise": by.choose(product, [Layout.planes]).candidate,
        "static padding": by.choose(product, [tiles]).candidate,
        "built in": builtin(product),
        "one config": one_config(product),
    }


def time_variants(
    child: Worker, product: LinearProblem, by: Dispatcher, options: Options, policy: Policy
) -> dict[str, float]:
    """Microseconds of a call in each variant, all measured side by side."""
    named = contestants(product, by)
    candidates = list(dict.fromkeys(named.values()))
    us = {candidate: found.us for candidate, found in race(child, product, candidates, options, policy, candidates)}
    return {name: us[candidate] for name, candidate in named.items()}


def ablate(options: argparse.Namespace) -> None:
    """Time to first token and tokens a second, summed over the linear layers of a model from measured products."""
    began = time.perf_counter()
    if options.compile:
        by = _dispatcher(options, "NVIDIA H200")
        asked = [product for _, products in ablated(options.schemes) for product in products]
        kernels = {k for p in asked for one in contestants(p, by).values() for k in one.kernels(p)}
        with ProcessPoolExecutor() as pool:
            refused = [reason for reason in pool.map(compile_one, kernels, ["sm_90a"] * len(kernels)) if reason]
        print(f"compiled, {time.perf_counter() - began:.1f} s", *refused, flush=True)
        return
    child = Worker()
    child.start()
    device = child.facts["device"]
    by = _dispatcher(options, device.name)
    how = Options(effort=TimingBudget(120.0, 1, 7), limit=options.limit)
    excluded = Policy(Origin.here(device.name, device.arch))
    rows: list[dict[str, Any]] = []
    marks = stamp(device.name)
    for scheme, products in ablated([scheme for scheme in ABLATED if scheme in options.schemes]):
        sums: dict[int, dict[str, float]] = {product.m: dict.fromkeys(VARIANTS, 0.0) for product in products}
        floors = dict.fromkeys(sums, 0.0)
        for product in products:
            product, m = replace(product, device=device), product.m
            us = time_variants(child, product, by, how, excluded)
            us["rule by M"] = us["static bitwise"] if m <= 8 else us["static padding"]
            us["without split"] = us["dispatch"]
            floors[m] += LAYERS * floor_us(product)
            for name in VARIANTS:
                sums[m][name] += LAYERS * us[name]
            print(product, {name: round(value, 2) for name, value in us.items()}, flush=True)
        common = {"scheme": scheme, "how": _HOW, "checked": True}
        for batch in BATCHES:
            for prompt in PROMPTS:
                m = batch * prompt
                rows.append(
                    {"case": "llama-3-8b prefill", "batch": batch, "prompt": prompt, "m": m, "us": sums[m]["dispatch"]}
                    | {"floor_us": floors[m], "variants": sums[m], "linear_ms": sums[m]["dispatch"] / 1e3}
                    | common
                )
            us = sums[batch]["dispatch"]
            rows.append(
                {"case": "llama-3-8b decode", "batch": batch, "prompt": None, "m": batch, "us": us}
                | {"floor_us": floors[batch], "variants": sums[batch], "linear_tokens_per_second": batch * 1e6 / us}
                | common
            )
        merge_rows(options.rows, [_rounded(row) | marks for row in rows], ROW_KEY)
    for row in rows:
        slower = {name: round(us / row["us"], 3) for name, us in row["variants"].items() if name != "dispatch"}
        print(row["case"], row["scheme"], row["batch"], row["prompt"], f"{row['us']:.1f} us", slower)
    child.stop()
    print(f"{time.perf_counter() - began:.1f} s")


def _dispatcher(options: argparse.Namespace, gpu: str) -> Dispatcher:
    """What chooses: the map that was asked for, or the shipped one."""
    return Dispatcher(gpu, [read(options.map)]) if options.map else dispatcher(gpu)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose numbers have as many digits as they mean."""
    return {
        name: round(value, 3) if isinstance(value, float) else _rounded(value) if isinstance(value, dict) else value
        for name, value in row.items()
    }


# -------- figures

DOCS = Path(__file__).parents[2] / "docs"


def draw(options: argparse.Namespace) -> None:
    """Draw docs/dispatch.svg and docs/dispatch_model.svg from their rows."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "anybit", "font.size": 9})
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else []
    for name, start in (("dispatch", "llama-3-8b "), ("dispatch_model", "llama-3-8b whole, ")):
        mine = [row for row in rows if row["case"] in (f"{start}prefill", f"{start}decode")]
        if mine:
            _draw_variants(mine, name)


def _draw_variants(rows: list[dict[str, Any]], to: str) -> None:
    from matplotlib import pyplot as plt

    schemes = [scheme for scheme in ABLATED if any(row["scheme"] == scheme for row in rows)]
    figure, axes = plt.subplots(len(schemes), 2, figsize=(9, 3 * len(schemes)), squeeze=False)
    for line, scheme in zip(axes, schemes, strict=True):
        mine = [row for row in rows if row["scheme"] == scheme]
        prefill = [row for row in mine if row["case"].endswith("prefill") and row["batch"] == 2]
        decode = [row for row in mine if row["case"].endswith("decode")]
        for axis, mine, x, what in (
            (line[0], prefill, "prompt", "time to first token, batch 2"),
            (line[1], decode, "batch", "time of a token"),
        ):
            mine = sorted(mine, key=lambda row: row[x])
            for name in VARIANTS:
                if name not in ("dispatch", "without split"):
                    there = [row for row in mine if name in row["variants"]]
                    slower = [row["variants"][name] / row["variants"]["dispatch"] for row in there]
                    axis.plot([row[x] for row in there], slower, marker="o", markersize=3, label=name)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks([row[x] for row in mine], [str(row[x]) for row in mine])
            axis.set_xlabel({"prompt": "prompt length", "batch": "batch"}[x])
            axis.set_ylabel("times the dispatcher's")
            axis.set_title(f"{scheme}: {what}", fontsize=9)
            axis.set_ylim(0.9, min(3.0, axis.get_ylim()[1]))
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(DOCS / f"{to}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    ablating = kinds.add_parser("ablate", help="what choosing is worth, in sums of linear layers")
    ablating.add_argument("--schemes", nargs="*", default=list(ABLATED))
    ablating.add_argument("--compile", action="store_true", help="only compile")
    ablating.add_argument("--limit", type=float, default=20.0, help="seconds that one candidate may take")
    whole = kinds.add_parser("model", help="the variants in whole models")
    whole.add_argument("--schemes", nargs="*", default=list(ABLATED))
    gated = [name for name, layers in MODELS.items() if len(layers) == 4 and layers[2][0] == 2 * layers[3][1]]
    whole.add_argument("--model", choices=gated, default="Llama-3-8B", help="whose layers it has")
    whole.add_argument("--without", nargs="*", choices=TIMED[1:], default=[], help="variants that are not measured")
    whole.add_argument("--layers", type=int, default=LAYERS)
    whole.add_argument("--seconds", type=float, default=60.0, help="begin no more points after this")
    whole.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    whole.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    clocking = kinds.add_parser("clock", help="anybit tune by the clock")
    clocking.add_argument("--schemes", nargs="*", default=["w4a8"])
    looking = kinds.add_parser("look-up", help="host time of a look-up")
    drawing = kinds.add_parser("draw", help="draw the figures (needs matplotlib)")
    for command in (ablating, whole):
        command.add_argument("--map", type=Path, help="the map to choose by; by default the shipped one")
    for command in (ablating, whole, clocking, looking, drawing):
        command.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    options = parser.parse_args()
    commands = {"ablate": ablate, "model": whole_models, "draw": draw, "look-up": look_up, "clock": clock}
    commands[options.command](options)


if __name__ == "__main__":
    main()
