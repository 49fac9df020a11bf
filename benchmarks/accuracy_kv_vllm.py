"""accuracy_kv.py inside vLLM: perplexity over windows of 2,048 tokens, and the needle, one engine per KV cache.

    python benchmarks/accuracy_kv_vllm.py --model FOLDER --text FILE [--formats kv16 kv8 kv4 kv2]

The windows and cases of accuracy_kv.py at the same context, and rows beside its own ("perplexity in vLLM", "needle
in vLLM"). Prompts are prefilled in chunks, so all pages but a token's own are read quantized. Engines
run concurrently.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, merge_rows, stamp

PARTS = ("perplexity", "needle")


def engine(args: argparse.Namespace, kv: str) -> Any:
    """An engine with vLLM's own cache ("kv16") or anybit's."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    from anybit.vllm import register

    register()
    own = {} if kv == "kv16" else {"additional_config": {"anybit_kv_cache": kv}}
    return LLM(
        args.model, dtype=args.dtype, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=args.budget,
        gpu_memory_utilization=args.memory, kv_cache_memory_bytes=args.cache << 20, enforce_eager=True,
        enable_prefix_caching=False, **own,
    )  # fmt: skip


def perplexity(args: argparse.Namespace, kv: str, llm: Any, tokenizer: Any, text: str) -> float:
    """Perplexity of a text's first windows, from the engine's prompt logprobs."""
    from vllm import SamplingParams

    from anybit.hf import evaluate

    ids = tokenizer(text[: 8 * 2048 * (args.windows + 1)])["input_ids"]
    windows = evaluate.windows_of(ids, 2048, args.windows).tolist()
    sampling, total, begin = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), 0.0, time.time()
    for i, window in enumerate(windows):
        (out,) = llm.generate([{"prompt_token_ids": window}], sampling, use_tqdm=False)
        said = out.prompt_logprobs[1:]
        total -= sum(entry[token].logprob for entry, token in zip(said, window[1:], strict=True))
        so_far = math.exp(total / ((i + 1) * 2047))
        print(f"{kv}: perplexity {so_far:.4f} of {i + 1} windows, {time.time() - begin:.0f} s", flush=True)
    return so_far


def needle(args: argparse.Namespace, kv: str, llm: Any, tokenizer: Any, text: str) -> list[bool]:
    """Whether greedy answers contain the numbers."""
    from vllm import SamplingParams

    from accuracy_kv import haystack

    draw = random.Random(args.context)
    cases = [haystack(tokenizer, text, args.context, draw) for _ in range(args.trials)]
    sampling, found, begin = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), [], time.time()
    for ids, question, number in cases:
        (out,) = llm.generate([{"prompt_token_ids": ids + question}], sampling, use_tqdm=False)
        answer = out.outputs[0].text.replace(" ", "").replace(",", "")
        found.append(number in answer)
        print(f"{kv}: {number} of {len(ids)} tokens: {answer!r}, {time.time() - begin:.0f} s", flush=True)
    return found


def measure(args: argparse.Namespace, kv: str) -> dict[str, Any]:
    """Measure one engine, by part."""
    from transformers import AutoTokenizer

    from anybit.hf import evaluate

    llm, tokenizer = engine(args, kv), AutoTokenizer.from_pretrained(args.model)
    text = evaluate.read_text(args.text)
    parts = {"perplexity": perplexity, "needle": needle}
    return {part: parts[part](args, kv, llm, tokenizer, text) for part in args.parts}


def rows(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of kv_accuracy.json, each compared with 16 bits."""
    exact, all_rows = found.get("kv16", {}), list[dict[str, Any]]()
    for kv, parts in found.items():
        same = {"model": args.name, "kv": kv}
        if "perplexity" in parts and "perplexity" in exact:
            row = {"case": "perplexity in vLLM", **same, "context": 2048, "perplexity": round(parts["perplexity"], 4)}
            all_rows.append({**row, "plain": round(exact["perplexity"], 4), "windows": args.windows})
        if "needle" in parts and "needle" in exact:
            hits, plain = parts["needle"], exact["needle"]
            row = {"case": "needle in vLLM", **same, "context": args.context, "found": sum(hits)}
            both = sum(a and b for a, b in zip(plain, hits, strict=True))
            all_rows.append({**row, "found_of_exact": both, "exact": sum(plain), "trials": args.trials})
    return all_rows


def main() -> None:
    """Run one format here, several in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the model, in rows")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["kv16", "kv8", "kv4", "kv2"], help="kv16: vLLM's own cache")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step")
    parser.add_argument("--memory", type=float, default=0.03, help="fraction of the GPU that must be free, per engine")
    parser.add_argument("--cache", type=int, default=1024, help="MiB of keys and values")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "kv_accuracy.json")
    args = parser.parse_args()
    if len(args.formats) == 1:
        print("FOUND", json.dumps(measure(args, args.formats[0])), flush=True)
        os._exit(0)  # a clean engine shutdown takes seconds
    asked = {kv: [sys.executable, *sys.argv, "--formats", kv] for kv in args.formats}
    running = {kv: subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for kv, command in asked.items()}
    said = {kv: child.communicate()[0] for kv, child in running.items()}
    found = {}
    for kv, text in said.items():
        lines = text.splitlines()
        print(*(line for line in lines if line.startswith(f"{kv}: ")), sep="\n", flush=True)
        results = [json.loads(line[6:]) for line in lines if line.startswith("FOUND ")]
        if results:
            found[kv] = results[0]
        else:
            print(f"{kv} failed, exit {running[kv].returncode}", *lines[-20:], sep="\n", flush=True)
    for row in rows(args, found):
        print(row, flush=True)
        row |= {"checked": True, "check": f"an engine's own answers, {args.budget} tokens a step"}
        merge_rows(args.out, [{**row, **stamp()}], ("case", "model", "kv", "context", "dtype"))


if __name__ == "__main__":
    main()
