"""What choosing kernels costs, and what a map is worth in whole models; rows go to results/h200/dispatch.json.

python tools/tuning/measure_choices.py model       # whole models, by a map and by built-in choices
python tools/tuning/measure_choices.py look-up     # host time of a look-up
python tools/tuning/measure_choices.py clock       # anybit tune by the clock
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

from anybit.scheme import Scheme
from layers import MODELS
from measure_models import BATCHES, LAYERS, PROMPTS, ROW_KEY, whole_models
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    whole = kinds.add_parser("model", help="what a map is worth in whole models")
    whole.add_argument("--schemes", nargs="*", default=["w4a8", "w2a4"])
    gated = [name for name, layers in MODELS.items() if len(layers) == 4 and layers[2][0] == 2 * layers[3][1]]
    whole.add_argument("--model", choices=gated, default="Llama-3-8B", help="whose layers it has")
    whole.add_argument("--layers", type=int, default=LAYERS)
    whole.add_argument("--seconds", type=float, default=60.0, help="begin no more points after this")
    whole.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    whole.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    clocking = kinds.add_parser("clock", help="anybit tune by the clock")
    clocking.add_argument("--schemes", nargs="*", default=["w4a8"])
    looking = kinds.add_parser("look-up", help="host time of a look-up")
    whole.add_argument("--map", type=Path, help="the map to choose by; by default the shipped one")
    for command in (whole, clocking, looking):
        command.add_argument("--rows", type=Path, default=RESULTS / "h200" / "dispatch.json")
    options = parser.parse_args()
    {"model": whole_models, "look-up": look_up, "clock": clock}[options.command](options)


if __name__ == "__main__":
    main()
