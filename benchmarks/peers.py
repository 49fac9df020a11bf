"""auto-round on the same model, text and budget as benchmarks/quantizers.py.

    python benchmarks/peers.py --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt [SCHEME ...]

In an environment of its own: anybit's requirements and auto-round (pip install auto-round). Its tuned weights are
evaluated as they leave it, dequantized, in float32. Rows go to peers.json in benchmarks/results/h200 or cpu.
"""

import argparse
import datetime
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

from anybit import Scheme, evaluate
from anybit.quantize.calibrate import tokenized
from quantizers import RESULTS, add

SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w2a16g64asym")


def measure(model: Path, text: Path, scheme: str, sequences: int, iterations: int) -> dict[str, Any]:
    """Tune on the second half of the text, evaluate on the first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    content = evaluate.read_text(text)
    cut = len(content) // 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [s[None] for s in tokenized(content[cut:], tokenizer, 512, 512 * sequences) if len(s) == 512]
    format = Scheme.parse(scheme).weights
    started = time.perf_counter()
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    tuner = AutoRound(
        source,
        tokenizer,
        bits=format.bits,
        group_size=format.group or -1,
        sym=format.code == "sym",
        iters=iterations,
        nsamples=len(samples),
        seqlen=512,
        batch_size=8,
        dataset=samples,
        enable_torch_compile=False,
        device_map=device,
    )
    tuned, _ = tuner.quantize()
    seconds = time.perf_counter() - started
    windows = evaluate.windows_of(tokenizer(content[:cut][:100_000]).input_ids, 512, 16)
    result = evaluate.perplexity(tuned.to(device).float().eval(), windows)
    return {
        "case": "smollm2-135m wikipedia, first half",
        "scheme": scheme,
        "method": "auto-round",
        "options": {"tokens": 512 * len(samples), "iterations": iterations},
        "perplexity": round(result.perplexity, 4),
        "scored": result.scored,
        "quantize_seconds": round(seconds, 1),
        "auto_round": metadata.version("auto-round"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=512, help="of 512 tokens")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS / ("h200" if torch.cuda.is_available() else "cpu"))
    arguments = parser.parse_args()
    for scheme in arguments.schemes:
        row = measure(arguments.model, arguments.text, scheme, arguments.sequences, arguments.iterations)
        print(json.dumps(row), flush=True)
        add(row, arguments.output / "peers.json")


if __name__ == "__main__":
    main()
