"""transformers' continuous batching over a Llama-3-8B shape: tokens per second of concurrent requests.

    python benchmarks/serving_transformers.py fp16 w4a16g128 [--requests 64] [--new 64]

Weights are random. A quantized model's first products are compared with exact ones before timing. Needs
no vLLM. The second of two runs is timed: the first one compiles.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from anybit.codes import reference
from anybit.layers.linear import QuantLinear
from generate_models import random_model
from rows import RESULTS, Row, add, origin
from serving import KEY, LLAMA, PROMPT
from timing import worst_of


def check(model: torch.nn.Module) -> str:
    """Compare the products of a model's first layer with exact ones."""
    worst = 0.0
    for layer in [module for module in model.modules() if isinstance(module, QuantLinear)][:7]:
        for tokens in (1, 40):
            x = torch.randn(tokens, layer.in_features, device="cuda", dtype=torch.float16)
            expected = reference.linear(x.float(), layer.quantized_weight(), layer.scheme.activations).float()
            worst = worst_of((worst, float((layer(x).float() - expected).abs().max() / expected.abs().max())))
    if not worst < 0.02:
        raise SystemExit(f"a product of the first layer is off by {worst:.3f} of its largest value")
    return f"products of the first layer within {worst:.1e} of exact ones"


def measure(mode: str, args: argparse.Namespace) -> Row:
    """Tokens per second of a mode: fp16, or a scheme of anybit."""
    model = random_model(None if mode == "fp16" else mode, args.layers)
    model.set_attn_implementation("sdpa")
    if mode != "fp16":
        print(f"{mode}: {check(model)}", flush=True)
    ask = GenerationConfig(
        max_new_tokens=args.new, min_new_tokens=args.new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    few = ContinuousBatchingConfig(
        num_blocks=args.requests * 8, max_batch_tokens=args.requests * PROMPT, use_cuda_graph=args.graphs or None
    )
    times: list[float] = []
    for _ in range(2):
        prompts = [[random.randint(10, 9999) for _ in range(PROMPT)] for _ in range(args.requests)]
        begin = time.perf_counter()
        found = model.generate_batch(inputs=prompts, generation_config=ask, continuous_batching_config=few)
        times.append(round(time.perf_counter() - begin, 2))
        tokens = sum(len(answer.generated_tokens) for answer in found.values())
        if tokens != args.requests * args.new:
            raise SystemExit(f"{mode}: {tokens} tokens came of {args.requests} requests for {args.new} each")
    rate = tokens / times[-1]
    how = "continuous batching with graphs" if args.graphs else "continuous batching"
    print(f"{mode} {args.requests}: transformers' {how} {rate:.0f} tokens/s, runs of {times} s", flush=True)
    return {
        "engine": "transformers-graphs" if args.graphs else "transformers", "scheme": mode, "model": "llama-3-8b",
        "ranks": 1, "link": None, "requests": args.requests, "prompt": PROMPT, "new_tokens": args.new, "rate": None,
        "step_ms": None, "ttft_ms": None, "tpot_ms": None, "tokens_per_second": round(rate, 1),
        "checked": mode != "fp16", "gpu": torch.cuda.get_device_name(), "vllm": None, **origin(),
    }  # fmt: skip


def main() -> None:
    """Measure one mode after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200" / "serving.json")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, which transformers disables with sdpa")
    args = parser.parse_args()
    for mode in args.modes:
        found = measure(mode, args)
        print(json.dumps(found), flush=True)
        add(args.output, [found], KEY)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
