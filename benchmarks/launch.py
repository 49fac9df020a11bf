"""Host time of repeated calls, by scheme: a layer, a fused decoder layer, a layer of a vLLM step with a low-bit cache.

    python benchmarks/launch.py                     # into results/h200/launch.json
    python benchmarks/launch.py --against TREE      # beside another tree, whose sources are in TREE/src

Only names that users and vLLM's plug-in have, so the same file measures a tree before and after a change. Tensors are
small: kernels end before Python has launched the next, and the time of a call is Python's alone. A tree is measured in
a process of its own. The processes take turns, round by round and case by case, since a host's speed changes from one
second to the next: rows have the least and the median of all rounds. Other processes compile the kernels first.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anybit
from anybit.ops import kv_rows
from anybit.ops.kv import NO_MASKS
from anybit.scheme import KVFormat
from anybit.vllm import kv_step
from timing import RESULTS, merge_rows, stamp

WIDTH, LAYERS, CALLS = 1024, 16, 200
ROOT = Path(__file__).parent.parent

Call = tuple[Callable[[], object], int]
"""What is timed, and how many calls of a layer it makes."""


def linear(scheme: str, tokens: int) -> Call:
    """A ``QuantLinear``, after its result was compared with the reference's."""
    weight = anybit.quantize_weight(torch.randn(WIDTH, WIDTH) * 0.05, anybit.Scheme.parse(scheme).weights)
    reference = anybit.QuantLinear.from_weight(weight, scheme, torch.randn(WIDTH).half())
    layer = copy.deepcopy(reference).cuda()
    host = torch.randn(tokens, WIDTH).half()
    x = host.cuda()
    expected, y = reference(host).float(), layer(x).cpu().float()
    assert (y - expected).norm() < 3e-2 * expected.norm(), f"{scheme}, {tokens} tokens"
    return lambda: layer(x), 1


def block(scheme: str, tokens: int) -> Call:
    """A fused decoder layer in an eager forward, transformers' part included; logits are compared with unfused ones."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 8, "num_key_value_heads": 2}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=LAYERS, **shape)).half().eval()
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            weight = anybit.quantize_weight(module.weight.detach(), anybit.Scheme.parse(scheme).weights)
            model.model.layers.set_submodule(name, anybit.QuantLinear.from_weight(weight, scheme))
    ids = torch.arange(tokens, device="cuda")[None]
    expected = model(ids, use_cache=False).logits.float()
    anybit.fuse(model)
    logits = model(ids, use_cache=False).logits.float()
    assert (logits - expected).norm() < 5e-2 * expected.norm(), f"{scheme}, {tokens} tokens"
    return lambda: model(ids, use_cache=False), LAYERS


def step(format: str, requests: int) -> Call:
    """A layer of a step of vLLM in which each request decodes a token: the first of a batch plans for the others."""
    heads, kv_heads, dim, length = 32, 8, 128, 1000
    rows = kv_rows.layout(KVFormat.parse(format), dim)
    width = rows.front + -(-length // kv_rows.PAGE)
    table = torch.arange(1, 1 + requests * width, dtype=torch.int32, device="cuda").view(requests, width)
    pages = torch.zeros(
        LAYERS, 1 + requests * width, kv_heads, rows.layout.page_bytes, dtype=torch.uint8, device="cuda"
    )
    layers = pages.unbind()
    lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    q = torch.randn(requests, heads, dim, device="cuda").half()
    k, v = torch.randn(2, requests, kv_heads, dim, device="cuda").half()
    out = torch.empty_like(q)

    def whole() -> None:
        batch = kv_step.Batch(table, lengths, starts, requests, requests, requests)
        for layer in layers:
            kv_step.run(
                batch, rows, layer, q, k, v, NO_MASKS, out, capacity=4096, space=torch.empty, prompts=lambda *_: None
            )

    whole()
    assert bool(out.isfinite().all()), format
    return whole, LAYERS


CASES = [
    (name, make, scheme, tokens)
    for name, make, schemes in (
        ("fused layer", block, ("w4a16g128", "w4a8")),
        ("linear", linear, ("w4a16g128", "w2a16g64asym", "w4a8", "w8a8", "w4a8fp", "w2a2", "w4a4")),
        ("vLLM step", step, ("kv8", "kv4g128", "kv2g32")),
    )
    for scheme in schemes
    for tokens in (1, 16)
]


def host_us(call: Callable[[], object], each: int) -> float:
    """Microseconds of host time of a call of a layer, in one round."""
    calls = max(1, CALLS // each)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / (calls * each) * 1e6


@torch.inference_mode()
def work() -> None:
    """Prepare all cases, then time one round of each case whose index standard input has."""
    calls = [make(scheme, tokens) for _, make, scheme, tokens in CASES]
    print("ready", flush=True)
    for line in sys.stdin:
        print(host_us(*calls[int(line)]), flush=True)


@torch.inference_mode()
def compile_some(part: int, parts: int) -> None:
    """Prepare some cases, for the kernels that this leaves on disk."""
    for _, make, scheme, tokens in CASES[part::parts]:
        make(scheme, tokens)


def start(tree: Path, *arguments: str) -> subprocess.Popen[str]:
    """Run this file in a process of its own, over the sources of a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree.resolve() / "src")}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(worker: subprocess.Popen[str], line: str = "") -> str:
    """What a worker answers to a line."""
    assert worker.stdin is not None and worker.stdout is not None
    if line:
        print(line, file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"{worker.args} ended with {worker.wait()}")
    return answer.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="TREE", help="another tree, named after its commit")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "launch.json")
    parser.add_argument("--part", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        compile_some(*options.part) if options.part else work()
        return
    began, marks = time.monotonic(), stamp()
    trees = [ROOT, *([options.against] if options.against else [])]
    workers = [start(tree, "--part") for tree in trees]
    parts = max(1, min(len(CASES), (os.cpu_count() or 1) // len(trees) - 1))
    compilers = [start(tree, "--part", str(part), str(parts)) for tree in trees for part in range(parts)]
    for process in compilers:
        process.wait()
    for worker in workers:
        ask(worker)
    print(f"all cases are prepared after {time.monotonic() - began:.0f} s", flush=True)
    times: dict[tuple[int, int], list[float]] = {}
    for turn in range(options.rounds):
        for case in range(len(CASES)):
            for tree in sorted(range(len(trees)), reverse=turn % 2 == 1):
                times.setdefault((tree, case), []).append(float(ask(workers[tree], str(case))))
    for case, (name, _, scheme, tokens) in enumerate(CASES):
        row = {"case": name, "scheme": scheme, "m": tokens, "n": WIDTH, "k": WIDTH}
        found = [
            {"host_us": round(min(mine), 2), "median_us": round(statistics.median(mine), 2)}
            for mine in (times[tree, case] for tree in range(len(trees)))
        ]
        row |= found[0] | {"rounds": options.rounds, "checked": True}
        if options.against:
            row["against"] = {"tree": options.against.resolve().name, **found[1]}
        print(*row.values(), flush=True)
        merge_rows(options.out, [row | marks])
    print(f"{time.monotonic() - began:.0f} s in total", flush=True)


if __name__ == "__main__":
    main()
