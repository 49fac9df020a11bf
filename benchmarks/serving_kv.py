"""Serving long contexts through vLLM: step time and TTFT of a Llama-3-8B shape by KV cache.

    python benchmarks/serving_kv.py fp16 bf16-fp8 fp16-kv2g128 --shapes 32x7900 4x64000 1x32768 32x128
    python benchmarks/serving_kv.py w4a8 w4a8-kv4g128       # one engine after another, a process each

A mode is weights (fp16, bf16, or a scheme of anybit) and a KV cache: vLLM's own in 16 bits, vLLM's fp8 (which needs
bf16), or a format of anybit. The rest is as in serving.py, with the engine core in this process. That engines over a
low-bit cache answer as they should is for tests/cases_vllm_exact.py --kernels to show.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rows import RESULTS, Row, add
from serving import KEY, check_first, engine, greedy, prompt_of, row

if TYPE_CHECKING:
    from vllm import LLM

STEPS, MORE = 24, 40
"""Timed steps, and steps in which requests decode beside others' prefills: none may end in between."""
PLAIN = {"fp16": "float16", "bf16": "bfloat16"}
SHAPE = argparse.Namespace(model="llama-3-8b", layers=None, ranks=1, engine={})


def start(mode: str, shapes: list[tuple[int, int]], budget: int) -> "LLM":
    """The engine of a mode; prints how many tokens fit, for a cache of anybit."""
    weights, _, cache = mode.partition("-")
    counts = sorted({1, *(requests for requests, _ in shapes)})
    longest = max(prompt for _, prompt in shapes) + STEPS + 4 + MORE
    options: dict[str, object] = {
        "dtype": PLAIN.get(weights, "float16"), "max_num_batched_tokens": budget, "max_num_seqs": counts[-1],
        "max_model_len": -(-longest // 128) * 128 + 128,
    }  # fmt: skip
    own = cache.startswith("k")
    options |= {"additional_config": {"anybit_kv_cache": cache}} if own else {"kv_cache_dtype": cache or "auto"}
    args = argparse.Namespace(**vars(SHAPE), captured=counts)
    llm = engine("fp16" if weights in PLAIN else weights, args, in_process=True, **options)
    if weights not in PLAIN:
        check_first(llm, mode)
    if own:
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
        packed, plain = groups[0].kv_cache_spec.tokens_that_fit(blocks, 8192)
        print(f"{mode}: {packed} tokens fit at 8,192 a request, {packed / plain:.2f} of 16 bits'", flush=True)
    return llm


def steps(llm: "LLM", mode: str, requests: int, prompt: int) -> Row:
    """The decode step of requests of equal length, and the time until all have their first token."""
    core, new, known = llm.llm_engine, STEPS + 4 + MORE, dict[str, int]()
    for i in range(requests):
        core.add_request(f"{requests}x{prompt}_{i}", prompt_of(prompt), greedy(new))

    def step() -> float:
        begin = time.perf_counter()
        for answer in core.step():
            known[answer.request_id] = len(answer.outputs[0].token_ids)
        return (time.perf_counter() - begin) * 1e3

    first = 0.0
    while len(known) < requests or not all(known.values()):
        first += step()
    for _ in range(4):
        step()
    step_ms = statistics.median([step() for _ in range(STEPS)])
    if max(known.values()) >= new:
        raise SystemExit(
            f"a request of {requests} x {prompt} ended before all steps were timed: raise MORE or --budget"
        )
    core.abort_request(list(known))
    while core.has_unfinished_requests():
        core.step()
    print(f"{mode} {requests} x {prompt}: first tokens {first:.0f} ms, step {step_ms:.3f} ms", flush=True)
    weights, _, cache = mode.partition("-")
    found = row(
        mode, SHAPE, weights not in PLAIN, requests=requests, prompt=prompt, new_tokens=STEPS,
        step_ms=round(step_ms, 3), ttft_ms=round(first, 1), tokens_per_second=round(requests / step_ms * 1e3, 1),
    )  # fmt: skip
    return found | ({} if weights not in PLAIN or cache.startswith("k") else {"engine": "vllm"})


def shape(text: str) -> tuple[int, int]:
    """Parse "32x7900"."""
    requests, prompt = map(int, text.split("x"))
    return requests, prompt


def main() -> None:
    """Run one mode here, several in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(32, 7900)], help="requests x prompt tokens")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200" / "serving.json")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    args = parser.parse_args()
    if len(args.modes) > 1:
        rest = [a for a in sys.argv[1:] if a not in args.modes]
        for mode in args.modes:
            subprocess.run([sys.executable, __file__, mode, *rest], check=False)
        return
    (mode,) = args.modes
    llm = start(mode, args.shapes, args.budget)
    for requests, prompt in [(1, 128), (1, 300), *args.shapes]:  # the first two warm up
        found = steps(llm, mode, requests, prompt)
        if (requests, prompt) in args.shapes:
            add(args.output, [found], KEY)


if __name__ == "__main__":
    main()
