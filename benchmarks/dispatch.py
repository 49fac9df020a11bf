"""The search over the layers of real models, and what choosing is worth.

    python benchmarks/dispatch.py map --out map.json [--seconds 15] [--compile]      # measure a policy map
    python benchmarks/dispatch.py show map.json                                      # print one
    python benchmarks/dispatch.py ablate                   # variants over whole models -> results/h200/dispatch.json
    python benchmarks/dispatch.py model                    # whole models at some of the same points
    python benchmarks/dispatch.py draw                     # docs/dispatch.svg, docs/crossover.svg
    python benchmarks/dispatch.py verify --problems 20     # against whole spaces, problems at random
    python benchmarks/dispatch.py replay                   # what a map chooses now where it was compared (no GPU)
    python benchmarks/dispatch.py look-up                  # host time of a look-up
    python benchmarks/dispatch.py clock                    # anybit tune by the clock
    python benchmarks/dispatch.py record --plans plans --seconds 250               # map and ablate in one process

``map --compile --plans plans`` plans and compiles what ``record --plans plans`` measures, without a GPU.

The map that is shipped (src/anybit/tune/policies) is measured anew, where kernels have changed, by dispatch_refresh.py.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybit.scheme import Scheme
from anybit.tune.dispatch import Dispatcher, dispatcher
from anybit.tune.plans import Options, compile_all, compile_candidates
from anybit.tune.policy import SHIPPED, Origin, Policy, file_name, read
from anybit.tune.registry import (
    Layout,
    LinearProblem,
    tiles_of,
)
from anybit.tune.roofline import floor_us
from anybit.tune.search import Worker, race, search
from anybit.tune.space import Candidate, builtin
from anybit.tune.worker import TimingBudget
from cases import LLAMA3_8B
from dispatch_check import compile_spaces, replay, verify
from dispatch_layers import MAPPED, MODELS, PICTURED, SCHEMES, parts, tokens_of
from dispatch_model import BATCHES, LAYERS, PROMPTS, TIMED, one_config, whole_models
from timing import RESULTS, merge_rows, stamp


def show(policy: Policy) -> None:
    """A map as a table: what won, by how much, and with what."""
    for (scheme, dtype, n, k), points in policy.layers.items():
        for m, point in sorted(points.items()):
            ordered = point.ordered()
            best = ordered[0][1]
            fields = " ".join(f"{name}={value}" for name, value in best.fields)
            others = ", ".join(f"{name} {measured.us:.2f}" for name, measured in ordered)
            gain = point.default_us / best.us
            print(f"{scheme:10s} {dtype} {n:6d} x {k:5d} M={m:5d}: floor {point.floor_us:8.2f}, ", end="")
            print(f"default {point.default_us:8.2f} = {gain:.3f}x, {others} [{best.kernel} {fields}]")
    for name, reason in policy.excluded.items():
        print("excluded:", name, "--", reason)


def measure_map(options: argparse.Namespace) -> None:
    """Measure (or only compile) what was asked for; ``record``: the ablation after it."""
    models = [name for name in MODELS if options.models is None or name in options.models]
    schemes = [*options.schemes, *(PICTURED if options.pictured else ())]
    wanted = parts(models, schemes, tuple(options.tokens), options.each)
    hints = [read(path) for path in options.hints]
    how = Options(
        options.each,
        tuple(options.allow),
        TimingBudget(options.microseconds, options.replays, options.final_replays, finalists=3),
        again=options.again,
        plans=options.plans,
        limit=options.limit,
        jobs=options.jobs,
    )

    def for_part(part: Sequence[LinearProblem], each: int, seconds: float = float("inf")) -> Options:
        grid = tokens_of(str(part[0].scheme), tuple(options.tokens))
        return replace(how, each=each, seconds=seconds, grid=grid)

    began = time.perf_counter()
    if options.compile:
        for part, each in wanted:
            count = compile_all(part, for_part(part, each), hints)
            passed = time.perf_counter() - began
            print(f"{part[0].scheme}: {len(part)} products, {count} candidates compiled, {passed:.1f} s", flush=True)
        return
    child = Worker()
    child.start()
    print(f"the GPU answers after {time.perf_counter() - began:.1f} s", flush=True)
    policy: Policy | None = None
    for part, each in wanted:
        left = options.seconds - (time.perf_counter() - began)
        if left > 0:
            policy = search(part, options.out, for_part(part, each, left), hints=hints, child=child)
            spent = {what: round(seconds, 1) for what, seconds in child.spent.items()}
            passed = time.perf_counter() - began
            print(f"{part[0].scheme}: {policy.points} points after {passed:.1f} s; the child's: {spent}", flush=True)
    assert policy is not None
    for name, reason in policy.excluded.items():
        print("excluded:", name, "--", reason)
    if options.command == "record":
        ablate(options, child, policy)
    child.stop()


def check(options: argparse.Namespace) -> None:
    """The check alone, of a map that is there; its spaces were compiled before."""
    if options.compile:
        compile_spaces(options)
        return
    child = _started()
    found = read(options.map or SHIPPED / file_name(child.facts["device"].name))
    verify(options, child, Dispatcher(child.facts["device"].name, [found]), found)
    child.stop()


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


def ablate(options: argparse.Namespace, child: Worker | None = None, policy: Policy | None = None) -> None:
    """Time to first token and tokens a second, summed over the linear layers of a model from measured products."""
    began = time.perf_counter()
    if options.compile:
        by = _dispatcher(options, None, "NVIDIA H200")
        asked = [product for _, products in ablated(options.schemes) for product in products]
        refused = compile_candidates([(p, candidate) for p in asked for candidate in contestants(p, by).values()])
        print(f"compiled, {time.perf_counter() - began:.1f} s", *refused, flush=True)
        return
    mine = child is None
    child = child or _started()
    device = child.facts["device"]
    by = _dispatcher(options, policy, device.name)
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
    if mine:
        child.stop()
    print(f"{time.perf_counter() - began:.1f} s")


def _started() -> Worker:
    child = Worker()
    child.start()
    return child


def _dispatcher(options: argparse.Namespace, policy: Policy | None, gpu: str) -> Dispatcher:
    """What chooses: the map just measured, the one that was asked for, or the shipped one."""
    if policy is not None:
        return Dispatcher(gpu, [policy])
    return Dispatcher(gpu, [read(options.map)]) if options.map else dispatcher(gpu)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose numbers have as many digits as they mean."""
    return {
        name: round(value, 3) if isinstance(value, float) else _rounded(value) if isinstance(value, dict) else value
        for name, value in row.items()
    }


# -------- figures

DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {"bitwise": "#1f77b4", "padding to int8": "#ff7f0e", "padding to fp8": "#2ca02c", "dequantize": "#9467bd"}
CROSSOVER = ("w1a1", "w1a2", "w2a2", "w1a4", "w2a3", "w2a4", "w3a3", "w3a4", "w4a4", "w4a8", "w8a8")
"""Schemes of the crossover map, by the number of their products of planes."""


def draw(options: argparse.Namespace) -> None:
    """Draw docs/dispatch.svg from the rows of ``ablate``, and docs/crossover.svg from a map."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "anybit", "font.size": 9})
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else []
    for name, start in (("dispatch", "llama-3-8b "), ("dispatch_model", "llama-3-8b whole, ")):
        mine = [row for row in rows if row["case"] in (f"{start}prefill", f"{start}decode")]
        if mine:
            _draw_variants(mine, name)
    policy = read(options.map or SHIPPED / file_name("NVIDIA H200"))
    _draw_crossover(policy)


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


def _draw_crossover(policy: Policy) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    shapes = [(4096, 4096), (28672, 4096)]
    known = {(key[0], *key[2:]): points for key, points in policy.layers.items()}
    schemes = [scheme for scheme in CROSSOVER if any((scheme, n, k) in known for n, k in shapes)]
    measured = {m for scheme in schemes for shape in shapes for m in known.get((scheme, *shape), {})}
    columns = sorted(m for m in measured if m % 3 == 0 or m.bit_count() == 1)  # quarter steps would not be legible
    figure, axes = plt.subplots(len(shapes), 1, figsize=(9, 1.2 + 0.7 * len(schemes) * len(shapes)), squeeze=False)
    used: set[str] = set()
    for (axis,), (n, k) in zip(axes, shapes, strict=True):
        for y, scheme in enumerate(schemes):
            for m, point in known.get((scheme, n, k), {}).items():
                if m not in columns:
                    continue
                ordered = point.ordered()
                name, best = ordered[0]
                used.add(name)
                x = columns.index(m)
                axis.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[name], linewidth=0))
                if len(ordered) > 1:
                    gain = ordered[1][1].us / best.us
                    axis.text(x, y, f"{gain:.2f}" if gain < 9.95 else "10+", ha="center", va="center", fontsize=7)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(-0.5, len(schemes) - 0.5)
        axis.set_xticks(range(len(columns)), [str(m) for m in columns], rotation=60, fontsize=7)
        axis.set_yticks(range(len(schemes)), schemes)
        axis.set_title(f"{n} x {k}: the fastest strategy, and how many times the next one's time is its", fontsize=9)
        axis.set_xlabel("tokens")
    handles = [Patch(color=COLOURS[name], label=name) for name in sorted(used)]
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(handles=handles, fontsize=8, loc="lower center", ncols=len(handles) or 1)
    figure.savefig(DOCS / "crossover.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    mapping = kinds.add_parser("map", help="measure a policy map")
    ablating = kinds.add_parser("ablate", help="what choosing is worth, over whole models")
    verifying = kinds.add_parser("verify", help="how near the chosen configs are to the best there is")
    recording = kinds.add_parser("record", help="map and ablate in one process")
    for command in (mapping, recording):
        command.add_argument("--models", nargs="*", choices=MODELS)
        command.add_argument("--tokens", type=int, nargs="*", default=list(MAPPED))
        command.add_argument("--pictured", action="store_true", help="also the schemes of the crossover map")
        command.add_argument("--allow", nargs="*", default=[])
        command.add_argument("--hints", type=Path, nargs="*", default=[])
        command.add_argument("--seconds", type=float, default=float("inf"), help="begin no more products after this")
        command.add_argument("--microseconds", type=float, default=60.0)
        command.add_argument("--replays", type=int, default=2)
        command.add_argument("--final-replays", type=int, default=5)
        command.add_argument("--again", action="store_true", help="measure what the file has anew")
        command.add_argument("--out", type=Path, default=SHIPPED / file_name("NVIDIA H200"))
    for command in (mapping, recording, ablating):
        schemes = ABLATED if command is ablating else SCHEMES
        command.add_argument("--schemes", nargs="*", default=list(schemes))
    for command in (ablating, recording):
        command.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    verifying.add_argument("--problems", type=int, default=200)
    verifying.add_argument("--seed", type=int, default=20261121)
    verifying.add_argument("--part", type=int, nargs=2, default=(0, 1), help="which of how many, for several GPUs")
    verifying.add_argument("--most", type=int, default=10**6, help="candidates of a space that are timed")
    verifying.add_argument("--tune-each", type=int, default=6, help="candidates of each family in the search")
    verifying.add_argument("--verify-seconds", type=float, default=300.0)
    verifying.add_argument("--check-rows", type=Path, default=RESULTS / "h200" / "dispatch_check.json")
    verifying.add_argument("--times", type=Path, help="a file that gets all times of each problem, for `replay`")
    verifying.add_argument("--nice", type=int, default=0, help="of the processes that compile")
    verifying.add_argument("--beside", action="store_true", help="compile in processes beside the comparison")
    verifying.add_argument("--compile-jobs", type=int, default=0, help="how many; by default all cores but three")
    for command in (mapping, recording, verifying):
        command.add_argument("--each", type=int, default=4, help="candidates of each family beside defaults and hints")
        command.add_argument("--plans", type=Path, help="a file between --compile and the measurement")
        command.add_argument("--jobs", type=int, default=0, help="processes that compile")
    for command in (mapping, recording, ablating, verifying):
        command.add_argument("--compile", action="store_true", help="only compile")
        command.add_argument("--limit", type=float, default=20.0, help="seconds that one candidate may take")
        command.add_argument("--map", type=Path, help="the map to choose by; by default the shipped one")
    replaying = kinds.add_parser("replay", help="what a map chooses now in problems that were compared; needs no GPU")
    replaying.add_argument("--check-rows", type=Path, default=RESULTS / "h200" / "dispatch_check.json")
    replaying.add_argument("--times", type=Path, nargs="*", default=[], help="what `verify --times` wrote")
    replaying.add_argument("--map", type=Path, help="by default the shipped one")
    whole = kinds.add_parser("model", help="the variants in whole models")
    whole.add_argument("--schemes", nargs="*", default=list(ABLATED))
    gated = [name for name, layers in MODELS.items() if len(layers) == 4 and layers[2][0] == 2 * layers[3][1]]
    whole.add_argument("--model", choices=gated, default="Llama-3-8B", help="whose layers it has")
    whole.add_argument("--without", nargs="*", choices=TIMED[1:], default=[], help="variants that are not measured")
    whole.add_argument("--layers", type=int, default=LAYERS)
    whole.add_argument("--seconds", type=float, default=60.0, help="begin no more points after this")
    whole.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    whole.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    whole.add_argument("--map", type=Path, help="the map to choose by; by default the shipped one")
    whole.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    clocking = kinds.add_parser("clock", help="anybit tune by the clock")
    clocking.add_argument("--schemes", nargs="*", default=["w4a8"])
    clocking.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    looking = kinds.add_parser("look-up", help="host time of a look-up")
    looking.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    drawing = kinds.add_parser("draw", help="draw docs/dispatch*.svg and docs/crossover.svg (needs matplotlib)")
    drawing.add_argument("--map", type=Path, help="by default the shipped one")
    drawing.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    showing = kinds.add_parser("show", help="print a map")
    showing.add_argument("path", type=Path)
    options = parser.parse_args()
    if options.command == "show":
        show(read(options.path))
        return
    commands = {"map": measure_map, "record": measure_map, "ablate": ablate, "verify": check}
    commands |= {"replay": replay, "model": whole_models, "draw": draw, "look-up": look_up, "clock": clock}
    commands[options.command](options)


if __name__ == "__main__":
    main()
