"""The search over the layers of real models, and what choosing is worth.

    python benchmarks/dispatch.py map --out map.json [--seconds 15] [--compile]      # measure a policy map
    python benchmarks/dispatch.py show map.json                                      # print one

The map that is shipped (src/anybit/tune/policies) is made by ``map`` over all layers and schemes below.
"""

import argparse
import time
from pathlib import Path

from anybit.scheme import Scheme
from anybit.tune.families import GRID, Product
from anybit.tune.policy import SHIPPED, Policy, file_name, read
from anybit.tune.runner import Effort
from anybit.tune.search import Options, Progress, compile_all, search

# Linear layers as they are served, projections that share an input fused: (N, K). The most used ones first.
MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen3-14B": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "Qwen3-32B": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "Llama-3-70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "OPT-6.7B": ((4096, 4096), (16384, 4096), (4096, 16384)),
    "BLOOM-7B": ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "SmolLM2-1.7B": ((6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
SCHEMES = ("w4a16g128", "w4a8", "w2a4", "w4a4", "w8a8", "w2a2", "w2a16g128", "w3a16g128", "w8a16g128", "w1a2")


def products(models: list[str], schemes: list[str], tokens: list[int]) -> list[Product]:
    """The products of models, each shape once, scheme by scheme."""
    shapes = dict.fromkeys(shape for model in models for shape in MODELS[model])
    parsed = [Scheme.parse(scheme) for scheme in schemes]
    return [Product(m, n, k, s.weights, s.activations) for s in parsed for n, k in shapes for m in tokens]


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
    """Measure (or only compile) what was asked for."""
    models = [name for name in MODELS if options.models is None or name in options.models]
    wanted = products(models, options.schemes, options.tokens)
    hints = [read(path) for path in options.hints]
    effort = Effort(options.microseconds, options.replays, options.final_replays)
    how = Options(options.each, tuple(options.allow), effort, options.seconds, again=options.again)
    began = time.perf_counter()
    if options.compile:
        print(f"{compile_all(wanted, how, hints)} candidates compiled, {time.perf_counter() - began:.1f} s", flush=True)
        return

    def report(progress: Progress) -> None:
        if progress.done % 100 == 0:
            passed = time.perf_counter() - began
            print(f"{progress.done} of {progress.total} after {passed:.1f} s: {progress.product}", flush=True)

    policy = search(wanted, options.out, how, hints=hints, report=report)
    print(f"{policy.points} points, {time.perf_counter() - began:.1f} s")
    show(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="measure a policy map")
    mapping.add_argument("--models", nargs="*", choices=MODELS)
    mapping.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    mapping.add_argument("--tokens", type=int, nargs="*", default=list(GRID))
    mapping.add_argument("--each", type=int, default=4, help="candidates of each family beside defaults and hints")
    mapping.add_argument("--allow", nargs="*", default=[])
    mapping.add_argument("--hints", type=Path, nargs="*", default=[])
    mapping.add_argument("--seconds", type=float, default=float("inf"))
    mapping.add_argument("--microseconds", type=float, default=60.0)
    mapping.add_argument("--replays", type=int, default=2)
    mapping.add_argument("--final-replays", type=int, default=5)
    mapping.add_argument("--compile", action="store_true", help="only compile")
    mapping.add_argument("--again", action="store_true", help="measure what the file has anew")
    mapping.add_argument("--out", type=Path, default=SHIPPED / file_name("NVIDIA H200"))
    showing = commands.add_parser("show", help="print a map")
    showing.add_argument("path", type=Path)
    options = parser.parse_args()
    if options.command == "map":
        measure_map(options)
    else:
        show(read(options.path))


if __name__ == "__main__":
    main()
