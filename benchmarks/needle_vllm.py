"""The needle of accuracy_kv.py inside vLLM: a sentence with a number at a random depth of prose, asked for at its end.

    python benchmarks/needle_vllm.py --model FOLDER --text FILE [--formats kv16 kv8 kv4 kv2]

The same cases as accuracy_kv.py of the same context, and its rows beside them (case "needle in vLLM"). Prompts go
through vLLM's scheduler in chunks, so that all but a token's own page is read packed. An engine a format, all at once.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, merge_rows, stamp

CHECK = "greedy answers of vLLM's engine"


def answers(args: argparse.Namespace, kv: str) -> list[bool]:
    """Whether the greedy answers of an engine hold the numbers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from accuracy_kv import haystack
    from anybit import evaluate
    from anybit.integrations.vllm import register

    register()
    tokenizer, draw = AutoTokenizer.from_pretrained(args.model), random.Random(args.context)
    text = evaluate.read_text(args.text)
    cases = [haystack(tokenizer, text, args.context, draw) for _ in range(args.trials)]
    own = {} if kv == "kv16" else {"additional_config": {"anybit_kv_cache": kv}}
    llm = LLM(
        args.model, dtype=args.dtype, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=args.budget,
        gpu_memory_utilization=args.memory, enforce_eager=True, **own,
    )  # fmt: skip
    sampling, found, begin = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), [], time.time()
    for ids, question, number in cases:
        (out,) = llm.generate([{"prompt_token_ids": ids + question}], sampling, use_tqdm=False)
        answer = out.outputs[0].text.replace(" ", "").replace(",", "")
        found.append(number in answer)
        print(f"{kv}: {number} of {len(ids)} tokens: {answer!r}, {time.time() - begin:.0f} s", flush=True)
    return found


def main() -> None:
    """One format here, several in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["kv16", "kv8", "kv4", "kv2"], help="kv16: vLLM's own cache")
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--memory", type=float, default=0.1, help="of the GPU, for each engine")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "kv_accuracy.json")
    args = parser.parse_args()
    if len(args.formats) == 1:
        print("FOUND", json.dumps(answers(args, args.formats[0])), flush=True)
        os._exit(0)  # a clean end of an engine takes seconds
    asked = {kv: [sys.executable, *sys.argv, "--formats", kv] for kv in args.formats}
    running = {kv: subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for kv, command in asked.items()}
    said = {kv: child.communicate()[0] for kv, child in running.items()}
    found = {}
    for kv, text in said.items():
        lines = text.splitlines()
        print(*(line for line in lines if line.startswith(f"{kv}: ")), sep="\n", flush=True)
        found[kv] = next((json.loads(line[6:]) for line in lines if line.startswith("FOUND ")), None)
        if found[kv] is None:
            print(f"{kv} failed, exit {running[kv].returncode}", *lines[-20:], sep="\n", flush=True)
    exact = found.get("kv16") or []
    for kv, hits in found.items():
        if hits is not None and exact:
            both = sum(a and b for a, b in zip(exact, hits, strict=True))
            row = {"case": "needle in vLLM", "model": Path(args.model).name, "kv": kv, "context": args.context}
            row |= {"found": sum(hits), "found_of_exact": both, "exact": sum(exact), "trials": args.trials}
            print(row, flush=True)
            row |= {"checked": True, "check": CHECK}
            merge_rows(args.out, [{**row, **stamp()}], ("case", "model", "kv", "context", "dtype"))


if __name__ == "__main__":
    main()
