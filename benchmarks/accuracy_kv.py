"""What a quantized KV cache costs in accuracy: perplexity.

    python benchmarks/accuracy_kv.py --model FOLDER --text FILE

Weights (SmolLM2-135M-Instruct) stay in 16 bits, so only the cache differs. Rows go to
benchmarks/results/<gpu>/kv_accuracy.json, which the tables of docs/accuracy.md show.

Windows of 2048 tokens go through an AnyBitCache 128 at a time, so that every token sees what it would see during
generation: full 128-token windows quantized, its own window in 16 bits. ``kv16`` must agree with the model's own cache.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from anybit import AnyBitCache
from anybit.hf import evaluate
from anybit.hf.loading import load_model
from anybit.kernels.attention.kv_page import PageLayout
from anybit.scheme import KVFormat
from timing import RESULTS, merge_rows, stamp

FORMATS = (
    "kv16", "kv8", "kv8t", "kv4", "kv4t", "kv4rot", "kv4trot", "kv2", "kv2t", "kv2rot", "kv2trot", "kv4g32", "kv2g32",
    "kv2g32t", "kv2g32rot", "kv2g32trot", "k4v2", "k2v4", "k4v2g32", "k2v4g32", "k8v4", "k4v8", "k16v4",
    "k4v16", "k16v2", "k2v16",
)  # fmt: skip
CONTEXT, PIECE = 2048, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "kv_accuracy.json")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype=torch.float16)
    model, text = loaded.model, evaluate.read_text(arguments.text)
    ids = loaded.tokenizer(text[: 8 * CONTEXT * (arguments.windows + 1)])["input_ids"]
    windows = evaluate.windows_of(ids, CONTEXT, min(arguments.windows, len(ids) // CONTEXT))
    model.set_attn_implementation("sdpa")
    plain = evaluate.perplexity(model, windows).perplexity
    model.set_attn_implementation("anybit")
    for kv in arguments.formats:
        cache = partial(AnyBitCache, kv, config=model.config, capacity=CONTEXT)
        value = evaluate.perplexity(model, windows, cache=cache, chunk=PIECE).perplexity
        assert kv != "kv16" or abs(value / plain - 1) < 5e-3, (value, plain)
        bits = PageLayout(KVFormat.parse(kv), model.config.head_dim, PIECE).bits_per_element
        row = {
            "case": "perplexity", "model": "SmolLM2-135M-Instruct", "kv": kv, "context": CONTEXT,
            "bits": round(bits, 3), "perplexity": round(value, 4), "plain": round(plain, 4), "windows": len(windows),
            "checked": True,
        }  # fmt: skip
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        merge_rows(arguments.out, [row | stamp()], ("case", "model", "kv", "context"))


if __name__ == "__main__":
    main()
