"""The perplexity table: SmolLM2-135M on Wikipedia prose, over widths and groups (docs/accuracy.md).

python benchmarks/accuracy.py --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt

Round to nearest with the scale search, every linear layer but the output head, float32 arithmetic, 16 windows of 512
tokens without BOS. Every row runs through QuantLinear and the reference backend, from weights stored in 16 bits.
"""

import argparse
import json
from pathlib import Path

import torch

from anybit import Scheme
from anybit.codes.rtn import quantize_weight
from anybit.hf import evaluate
from anybit.hf.loading import load_model
from anybit.layers.linear import QuantLinear
from anybit.models.modules import kept_modules, linear_layers
from rows import RESULTS, add, origin

FILE = RESULTS / "cpu" / "perplexity.json"

SCHEMES = (
    *("w8a16g128asym", "w6a16g128asym", "w5a16g128asym"),
    *(f"w4a16{group}asym" for group in ("g32", "g64", "g128", "g256", "")),
    *(f"w4a16{group}" for group in ("g64", "g128")),
    *(f"w3a16{group}asym" for group in ("g32", "g64", "g128")),
    *(f"w2a16{group}asym" for group in ("g32", "g64")),
    *("w8a8", "w4a8g128"),
)


def measure(model: torch.nn.Module, windows: torch.Tensor, scheme: str | None) -> dict[str, object]:
    """One row: the model in a scheme; its layers are restored afterwards."""
    layers = linear_layers(model, kept_modules(model, None))
    plain = {layer.name: model.get_submodule(layer.name) for layer in layers}
    try:
        for name, linear in plain.items() if scheme is not None else ():
            weight = quantize_weight(linear.weight.detach().half(), Scheme.parse(scheme).weights)
            model.set_submodule(name, QuantLinear.from_weight(weight, scheme, linear.bias))
        result = evaluate.perplexity(model, windows)
        bits = 16.0 if scheme is None else evaluate.bits_per_weight(model)
    finally:
        for name, linear in plain.items():
            model.set_submodule(name, linear)
    return {
        "case": "smollm2-135m wikipedia", "scheme": scheme or "float32", "method": "rtn",
        "bits_per_weight": round(bits, 4), "perplexity": round(result.perplexity, 4), "windows": result.windows,
        "context": result.context, "bos": result.bos, "scored": result.scored, "seconds": round(result.seconds, 1),
        **origin(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--all", action="store_true", help="measure float32 again too")
    options = parser.parse_args()
    loaded = load_model(options.model, device="cpu")
    # The windows come from the beginning, so the rest need not be tokenized.
    text = evaluate.read_text(options.text)[: options.windows * 512 * 16]
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    windows = evaluate.windows_of(ids, 512, options.windows)
    known = FILE.exists() and any(row["scheme"] == "float32" for row in json.loads(FILE.read_text()))
    for scheme in options.schemes if known and not options.all else (None, *options.schemes):
        row = measure(loaded.model, windows, scheme)
        print(json.dumps(row), flush=True)
        add(FILE, [row], ("case", "scheme"))


if __name__ == "__main__":
    main()
