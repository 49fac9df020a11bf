"""Serving long contexts through vLLM: step time and TTFT of a Llama-3-8B shape by KV cache.

    python benchmarks/serving_kv.py fp16 bf16-fp8 fp16-kv2g128 --shapes 32x7900 4x64000 1x32768 32x128
    python benchmarks/serving_kv.py w4a8 w4a8-kv4g128 --shapes 32x7900 --answers 64x2048x512
    python benchmarks/serving_kv.py w4a8-kv4g128 --whole            # one engine, all memory: tokens that fit
    python benchmarks/serving_kv.py fp16-kv4g128+4 fp16-kv4g128     # steps with four draft tokens per request, and none

A mode is weights (fp16, bf16, or a scheme of anybit) and a KV cache: vLLM's own in 16 bits, vLLM's fp8 (which needs
bf16), or a format of anybit. All engines start at once, each a process with as much memory as its requests need, and
measure one at a time once all are up, so a table's rows come from one machine in one state. Weights are random. For
anybit's caches, packed pages are compared byte for byte with the reference, and attention with exact attention over
them. Drafts repeat what last followed a token, a fixed number per step; outputs with drafts are compared with the
logits of one prefill over them. Needs vLLM 0.26 or newer, and anybit's folder in PYTHONPATH.
"""

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rows import RESULTS, Row, add
from serving import KEY, LLAMA, check_first, greedy, prepare_vllm, row
from serving_kv_checks import LastTime, Watch, check_drafted

STEPS, MORE = 24, 40
"""Timed steps, and steps in which requests decode beside others' prefills: none may end in between."""
PLAIN = {"fp16": "float16", "bf16": "bfloat16"}
Shape = tuple[int, ...]

if TYPE_CHECKING:
    from vllm import LLM


def parts(mode: str) -> tuple[str, str, int]:
    """Weights, KV cache and draft count of a mode; "auto" is 16 bits."""
    plain, _, drafts = mode.partition("+")
    weights, _, cache = plain.partition("-")
    return weights, cache or "auto", int(drafts or 0)


def folder_of(weights: str, small: bool) -> str:
    """A folder with only a config.json."""
    config = dict(LLAMA)
    if small:
        config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 10240}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    if weights not in PLAIN:
        config["quantization_config"] = {
            "quant_method": "anybit", "scheme": weights, "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="serving-kv-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def fill(layer: torch.nn.Module, *_: object, **__: object) -> None:
    """Fill a module for vLLM's dummy loader: outputs have their inputs' size, and attention peaks."""
    named = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    for name, tensor in named.items():
        draw = torch.Generator(device=tensor.device).manual_seed(tensor.numel() % 1000 + len(name))
        if "rotary" in type(layer).__name__.lower():
            continue
        if "Norm" in type(layer).__name__:
            tensor.data.fill_(1)
        elif name == "weight_packed":
            tensor.data.random_(-(2**31), 2**31 - 1, generator=draw)
        elif name == "weight" and tensor.dim() == 2:
            wide = 1.7 if "Embedding" in type(layer).__name__ else (3 / tensor.shape[1]) ** 0.5
            tensor.data.uniform_(-wide, wide, generator=draw)
        elif name == "weight_scale":  # for 4-bit codes, whose root mean square is 4.6
            tensor.data.uniform_(0.5, 1.5, generator=draw).mul_(1 / (4.8 * layer.input_size**0.5))
    if "QKV" in type(layer).__name__:
        for tensor in (t for t in named.values() if t.is_floating_point() and t.dim() == 2):
            tensor.data[: (layer.num_heads + layer.num_kv_heads) * layer.head_size].mul_(1.5)


def needed(mode: str, shapes: list[Shape], config: dict[str, int], slack: float = 1.03) -> int:
    """KV cache bytes that concurrent requests of these shapes need."""
    _, cache, drafts = parts(mode)
    dim, heads, layers = config["head_dim"], config["num_key_value_heads"], config["num_hidden_layers"]
    most = 0
    for requests, prompt, new in shapes:
        tokens = prompt + new
        if cache.startswith("k"):
            from anybit.ops.kv_rows import layout
            from anybit.scheme import KVFormat

            rows = layout(KVFormat.parse(cache), dim, -(-drafts // 32) * 32)
            size = requests * (rows.front + tokens // 128 + 1) * rows.layout.page_bytes * heads
        else:
            size = requests * (tokens + 32) * heads * dim * (2 if cache == "fp8" else 4)
        most = max(most, size * layers)
    return int(most * slack) + (64 << 20)


def engine(mode: str, shapes: list[Shape], args: argparse.Namespace) -> "LLM":
    """An engine with its core in this process, and the memory that its shapes need."""
    begin = time.time()
    prepare_vllm(in_process=True)
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import registry
    from vllm.v1.worker import gpu_worker

    dummy_loader.initialize_dummy_weights = fill
    # Halves startup: inspects the model class here instead of in a subprocess, and leaves compiling the greedy path's
    # kernels to the first requests.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    gpu_worker.warmup_kernels = lambda *_: None
    weights, cache, drafts = parts(mode)
    folder = folder_of(weights, args.small)
    config = json.loads((Path(folder) / "config.json").read_text())
    print(f"{mode}: imported after {time.time() - begin:.1f} s", flush=True)
    while args.wait and not args.wait.exists():
        time.sleep(0.05)
    begin = time.time()
    counts = sorted({1, *(shape[0] for shape in shapes)})
    module = types.ModuleType("vllm.v1.spec_decode.ngram_proposer")
    vars(module)["NgramProposer"] = LastTime
    sys.modules[module.__name__] = module
    longest = -(-max(sum(shape[1:]) for shape in shapes) // 128) * 128 + 128
    options: dict[str, object] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest,
        "dtype": PLAIN.get(weights, "float16"),
        "max_num_seqs": counts[-1], "max_num_batched_tokens": min(args.budget, 2048 if args.small else args.budget),
        "enable_prefix_caching": False, "disable_log_stats": True,
        "gpu_memory_utilization": 0.9 if args.whole else 0.05,
        "compilation_config": {"cudagraph_capture_sizes": [n * (1 + drafts) for n in counts]},
    }  # fmt: skip
    if drafts:
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 1, "num_speculative_tokens": drafts}
        options["speculative_config"] = {"method": "ngram", **lookup}
    if not args.whole:
        options["kv_cache_memory_bytes"] = needed(mode, shapes, config)
    if args.small:
        options |= {"enforce_eager": True}
    if cache.startswith("k"):
        options["additional_config"] = {"anybit_kv_cache": cache}
    else:
        options["kv_cache_dtype"] = cache
    llm = LLM(folder, **options)
    print(f"{mode}: up after {time.time() - begin:.1f} s more", flush=True)
    return llm


class Requests:
    """Drives one engine step by step."""

    def __init__(self, llm: "LLM") -> None:
        self.core, self.answers = llm.llm_engine, dict[str, list[int]]()

    def ask(self, requests: int, prompt: int, new: int) -> list[str]:
        """Add requests; returns their ids, to which the engine adds suffixes."""
        draw = random.Random(f"{requests}x{prompt}")
        names = [f"{requests}x{prompt}x{new}_{i}" for i in range(requests)]
        for name in names:
            tokens = [draw.randint(10, 9999) for _ in range(prompt)]
            self.core.add_request(name, {"prompt_token_ids": tokens}, greedy(new))
            self.answers[name] = []
        return names

    def step(self) -> None:
        """Run one engine step; keeps its outputs."""
        for answer in self.core.step():
            self.answers[answer.request_id.partition("-")[0]] = list(answer.outputs[0].token_ids)

    def finish(self) -> None:
        """Step until no request is left."""
        while self.core.has_unfinished_requests():
            self.step()

    def end(self, names: list[str]) -> None:
        """Abort requests."""
        self.core.abort_request(names)
        self.finish()


def result(mode: str, **fields: object) -> Row:
    """A row of serving.json; its engine field includes the drafts."""
    weights, cache, drafts = parts(mode)
    own = weights not in PLAIN or cache.startswith("k")
    shape = argparse.Namespace(model="llama-3-8b", layers=None, ranks=1, engine={})
    found = row(mode.partition("+")[0], shape, own, **fields)
    engine = found["engine"] if own else "vllm"
    return {**found, "engine": f"{engine}-drafts{drafts}" if drafts else engine}


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock: no other engine measures meanwhile."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(mode: str, args: argparse.Namespace) -> None:
    """Run one engine: start, wait for the others, measure."""
    weights, cache, drafts = parts(mode)
    shapes = [(n, prompt, (STEPS + 4 + MORE) * (1 + drafts)) for n, prompt in args.shapes]
    llm = engine(mode, shapes + args.answers, args)
    own, requests = cache.startswith("k"), Requests(llm)
    watch = Watch() if own else None
    if args.gate:
        (args.gate / f"{mode}.up").touch()
        while any(not list(args.gate.glob(f"{other}.*")) for other in args.modes):
            time.sleep(0.05)
    manager = requests.core.engine_core.engine_core.scheduler.kv_cache_manager
    spec = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    blocks, room = requests.core.vllm_config.cache_config.num_gpu_blocks - 1, ""
    if own:
        packed, plain = spec.tokens_that_fit(blocks, 8192)
        room = f": {packed} tokens fit at 8,192 a request, {packed / plain:.2f} of 16 bits'"
    print(f"{mode}: {blocks} blocks of {spec.block_size} tokens, {spec.page_size_bytes} bytes{room}", flush=True)
    found: list[Row] = []
    with alone((args.gate or Path(tempfile.gettempdir())) / "measures"):
        if weights not in PLAIN and not args.small:
            check_first(llm, mode.partition("+")[0])
        for prompt in (128, 300):
            requests.ask(1, prompt, 8)
        requests.finish()
        for n, prompt, new in shapes:
            found.append(steps(mode, requests, watch, n, prompt, new))
            add(args.output, found, KEY)
        if drafts:
            print(f"{mode}: {check_drafted(requests)}", flush=True)
        for n, prompt, new in args.answers:
            for again in range(1 if args.small else 2):  # the first run warms up, if it is short
                names, begin = requests.ask(n, prompt, new if again or args.small else 2), time.time()
                requests.finish()
                took = time.time() - begin
            if any(len(requests.answers[name]) != new for name in names):
                raise SystemExit("an answer does not have the requested length")
            print(f"{mode} {n} x {prompt} + {new}: {n * new / took:.0f} tokens/s in total, {took:.2f} s", flush=True)
            shape = {"requests": n, "prompt": prompt, "new_tokens": new}
            found.append(result(mode, **shape, tokens_per_second=round(n * new / took, 1)))
            add(args.output, found, KEY)
    os._exit(0)  # a clean engine shutdown takes seconds


def steps(mode: str, requests: Requests, watch: Watch | None, n: int, prompt: int, new: int) -> Row:
    """The decode step of ``n`` requests of equal length, and the time until all have their first token."""
    if watch is not None:
        layers = list(requests.core.vllm_config.compilation_config.static_forward_context)
        watch.begin(layers, prompt)
    names, begin = requests.ask(n, prompt, new), time.time()
    while not all(requests.answers[name] for name in names):
        requests.step()
    first, times = time.time() - begin, list[float]()
    for _ in range(4):
        requests.step()
    calls, known = watch.calls if watch else 0, sum(len(requests.answers[name]) for name in names)
    for _ in range(STEPS):
        begin = time.time()
        requests.step()
        times.append((time.time() - begin) * 1e3)
    if any(len(requests.answers[name]) >= new for name in names):
        raise SystemExit(f"a request of {n} x {prompt} ended before all steps were timed: raise MORE or --budget")
    step = statistics.median(times)
    rate = (sum(len(requests.answers[name]) for name in names) - known) / STEPS  # tokens per step
    said = "" if watch is None else f"; {watch.calls - calls} calls outside graphs; " + watch.check()
    if parts(mode)[2]:
        said = f", {rate / n:.2f} tokens per request{said}"
    requests.end(names)
    print(
        f"{mode} {n} x {prompt}: first tokens {first * 1e3:.0f} ms, step {step:.3f} ms (most {max(times):.2f}){said}",
        flush=True,
    )
    shape = {"requests": n, "prompt": prompt, "new_tokens": STEPS}
    return result(
        mode, **shape, step_ms=round(step, 3), ttft_ms=round(first * 1e3, 1),
        tokens_per_second=round(rate / step * 1e3, 1),
    )  # fmt: skip


def shape(text: str) -> Shape:
    """Parse "32x7900"."""
    return tuple(int(part) for part in text.split("x"))


def main() -> None:
    """Run one mode here, several in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shapes", type=shape, nargs="*", default=[(32, 7900)], help="requests x prompt tokens")
    parser.add_argument("--answers", type=shape, nargs="*", default=[], help="requests x prompt tokens x new tokens")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200" / "serving.json")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--whole", action="store_true", help="one engine with nine tenths of the memory")
    parser.add_argument("--wait", type=Path, help="import, then wait until this file exists")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this on a CPU")
    parser.add_argument("--logs", type=Path, help="a folder for engine logs")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode or len(args.modes) == 1:
        run(args.mode or args.modes[0], args)
        return
    gate = Path(tempfile.mkdtemp(prefix="serving-kv-gate-"))
    children = {}
    for mode in args.modes:
        log = ((args.logs or gate) / f"{mode}.log").open("w")
        command = [sys.executable, *sys.argv, "--mode", mode, "--gate", str(gate)]
        children[mode] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    failed = []
    while children:
        for mode, child in list(children.items()):
            if child.poll() is not None:
                (gate / f"{mode}.ended").touch()
                del children[mode]
                lines = ((args.logs or gate) / f"{mode}.log").read_text(errors="replace").splitlines()
                print("\n".join(line for line in lines if line.startswith(mode)), flush=True)
                if child.returncode:
                    failed.append(mode)
                    print(f"{mode}: exit {child.returncode}", *lines[-30:], sep="\n", flush=True)
        time.sleep(0.1)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
