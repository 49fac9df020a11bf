"""Serving through vLLM: step time, TTFT and request rates of a Llama-3-8B shape, anybit and vLLM's own kernels.

    python benchmarks/serving.py steps fp16 fp8 machete w4a16g128 w4a8     # one engine after another, a process each
    python benchmarks/serving.py rates machete w4a8 --rates 1 4 16 64
    python benchmarks/serving.py steps w4a16g128 --profile 1 64           # also profile steps of 1 and 64 requests
    python benchmarks/serving.py steps fp8 w4a8 --model llama-3-70b --ranks 2     # over two GPUs (tensor parallelism)
    python benchmarks/serving.py steps bf16 marlin w4a16g128 --model qwen3-30b-a3b --layers 12     # experts

Modes: fp16, bf16, fp8, machete and marlin are vLLM's; everything else is a scheme of anybit, w4a8+w8a16 with the output
head's after the +. A mixture's router stays in 16 bits. Weights are random: times do not depend on them. Needs vLLM
0.26 or newer, and anybit's folder in PYTHONPATH.
The engine core is a separate process, as behind a server, except with --in-process: there, request bookkeeping
alternates with launching the next step. Engines can start concurrently and measure one at a time: with --wait, an
engine measures once it reads a line from standard input.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from kernel_times import KernelRecorder
from rows import RESULTS, Row, add, origin

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "llama-3-8b": {},
    "llama-3-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
HEAD = "lm_head"
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
OWN = {"fp16": "vllm", "bf16": "vllm", "fp8": "vllm-fp8", "machete": "vllm-machete", "marlin": "vllm-marlin"}
"""vLLM's own kernels: mode -> engine of a row. marlin: of experts, beside machete for the other layers."""
PROMPT, NEW = 128, 128
RATES = (1, 4, 16, 32, 64)
KEY = ("engine", "scheme", "model", "ranks", "executor", "requests", "prompt", "new_tokens", "rate", "gpu", "vllm")


def model(mode: str, config: dict[str, object]) -> str:
    """A folder with only the config.json of a model in a mode."""
    if mode in ("machete", "marlin"):
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [HEAD, "re:.*mlp.gate$"],
            "quantization_status": "compressed", "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4}},
        }  # fmt: skip
    elif mode not in OWN:
        scheme, _, head = mode.partition("+")
        config["quantization_config"] = {
            "quant_method": "anybit", "scheme": scheme, "modules_to_not_convert": [] if head else [HEAD],
            **({"overrides": {HEAD: head}} if head else {}),
        }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix=f"serving-{mode}-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def prepare_vllm(in_process: bool) -> None:
    """Set vLLM's environment, and register anybit. in_process: an engine's core runs in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # lets check_layers reach the engine process
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from anybit.vllm import register

    register()


def engine(mode: str, args: argparse.Namespace, folder: str = "", in_process: bool = False, **options: object) -> "LLM":
    """A vLLM engine over a model in a mode; its core in a separate process, or in this one."""
    prepare_vllm(in_process)
    from vllm import LLM

    shape = LLAMA | MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    settings: dict[str, object] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": shape["torch_dtype"], "max_model_len": 8192,
        "max_num_seqs": 256, "gpu_memory_utilization": 0.85, "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    settings |= {"quantization": "fp8"} if mode == "fp8" else {"moe_backend": mode} if mode == "marlin" else {}
    if args.captured:
        settings["compilation_config"] = {"cudagraph_capture_sizes": args.captured}
    settings["tensor_parallel_size"] = args.ranks
    begin = time.perf_counter()
    llm = LLM(folder or model(mode, shape), **{**settings, **options})
    print(f"{mode}: up after {time.perf_counter() - begin:.1f} s", flush=True)
    return llm


def start(mode: str, args: argparse.Namespace) -> "LLM":
    """The engine of a mode as the command line asks, once it is its turn."""
    shared = {"kv_cache_memory_bytes": int((args.cache or 0) * 2**30), "gpu_memory_utilization": 0.15}
    options = {**(shared if args.cache else {}), **args.engine}
    llm = engine(mode, args, in_process=args.in_process, **options)
    if args.wait:
        sys.stdin.readline()
    return llm


def prompt_of(tokens: int) -> dict[str, list[int]]:
    """A random prompt."""
    return {"prompt_token_ids": [random.randint(10, 9999) for _ in range(tokens)]}


def greedy(new: int, streamed: bool = False) -> "SamplingParams":
    """Sampling of exactly ``new`` tokens. streamed: outputs have only what is new, as a server sends them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.CUMULATIVE
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=kind)


def generate(llm: "LLM", requests: int, prompt: int, new: int) -> float:
    """Seconds for ``requests`` concurrent greedy generations of ``new`` tokens."""
    prompts = [prompt_of(prompt) for _ in range(requests)]
    begin = time.perf_counter()
    found = llm.generate(prompts, greedy(new), use_tqdm=False)
    seconds = time.perf_counter() - begin
    if sum(len(answer.outputs[0].token_ids) for answer in found) != requests * new:
        raise SystemExit("an answer does not have the requested length")
    return seconds


def check_layers(model: Module) -> str:
    """Compare the products of a model's first layer with exact ones; the largest error over the largest value."""
    import torch

    from anybit import ops
    from anybit.codes import reference
    from anybit.ops.backend import LinearSpec
    from timing import worst_of

    worst = 0.0
    layers = [module for module in model.modules() if hasattr(module, "anybit_products")][:4]
    dtype = next(model.parameters()).dtype
    print("rotary embedding and cache write in one op:", sum(hasattr(m, "anybit_paired") for m in model.modules()))
    for layer in layers:
        for product in layer.anybit_products:
            spec, tensors = LinearSpec.parse(product.spec), product.weight(layer)
            weight = ops.backends[spec.backend].restore(tensors, spec)
            for tokens in (1, 3, 40):
                x = torch.randn(tokens, spec.k, device="cuda", dtype=dtype)
                expected = reference.linear(x.float(), weight, spec.activations).float()
                got = torch.ops.anybit.linear(x, tensors, None, product.spec).float()
                worst = worst_of((worst, float((got - expected).abs().max() / expected.abs().max())))
    experts = [module for module in model.modules() if hasattr(module, "anybit_w13_0")][:1]
    worst = worst_of((worst, *map(experts_error, experts)))
    if not worst < 0.02:
        raise SystemExit(f"a product of the first layer is off by {worst:.3f} of its largest value")
    return f"products of the first layer within {worst:.1e} of exact ones"


def experts_error(layer: Module) -> float:
    """The largest error of a vLLM layer's routed experts over the largest value, for two numbers of tokens."""
    import torch

    from anybit.codes import reference
    from anybit.ops.backend import backends
    from anybit.ops.experts import ExpertsSpec
    from timing import worst_of

    method: Any = layer.quant_method
    (kind,) = method.here
    spec, products = ExpertsSpec.parse(kind.spec), [product.weight(layer) for product in kind.products]
    weights = [backends["packed"].restore(one, of) for one, of in zip(products, (spec.gate_up, spec.down), strict=True)]
    worst = 0.0
    for tokens in (1, 40):
        x = torch.randn(tokens, spec.gate_up.k, device="cuda", dtype=method.moe.in_dtype)
        routing, ids = torch.rand(tokens, spec.count, device="cuda").topk(method.moe.experts_per_token)
        expected = reference.experts(
            x.float(), ids, routing, *weights, spec.rows, spec.count, spec.gate_up.activations, spec.gate
        )
        got = method.apply(layer, x, routing, ids.int()).float()
        worst = worst_of((worst, float((got - expected).abs().max() / expected.abs().max())))
    return worst


def check_first(llm: "LLM", mode: str) -> None:
    """Have a mode's engine check the products of its first layer."""
    import serving  # not __main__, whose functions other processes cannot import

    print(mode, *llm.apply_model(serving.check_layers), flush=True)


def row(mode: str, args: argparse.Namespace, checked: bool, **fields: object) -> Row:
    """A row of serving.json."""
    import torch
    import vllm

    scheme = "w4a16g128" if mode in ("machete", "marlin") else mode
    empty = {"requests": None, "prompt": None, "new_tokens": None, "rate": None}
    empty |= {"step_ms": None, "ttft_ms": None, "tpot_ms": None, "tokens_per_second": None}
    return dict(
        engine=OWN.get(mode, "vllm-anybit"), scheme=scheme,
        model=args.model if args.layers is None else f"{args.model}, {args.layers} layers", ranks=args.ranks,
        executor=args.engine.get("distributed_executor_backend", "uni" if args.ranks == 1 else "mp"),
        **{**empty, **fields}, checked=checked, link=link(args.ranks),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", vllm=vllm.__version__,
        **origin(),
    )  # fmt: skip


def link(ranks: int) -> str | None:
    """GPU interconnect as in `nvidia-smi topo -m` (NV18: 18 NVLinks); None for one GPU."""
    if ranks == 1:
        return None
    found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    first = next((line.split() for line in found.splitlines() if line.startswith("GPU0")), [])
    return first[2] if len(first) > 2 else "unknown"


def steps(mode: str, args: argparse.Namespace) -> list[Row]:
    """Step time and throughput by concurrency, and TTFT of long prompts."""
    llm = start(mode, args)
    checked = mode not in OWN
    if checked:
        check_first(llm, mode)
    generate(llm, 1, PROMPT, 8)
    found = []
    for requests in args.requests:
        generate(llm, requests, PROMPT, 1)
        first = generate(llm, requests, PROMPT, 1)
        # The first run of a size includes one-time costs: its graph's first replay, and Triton's compilation.
        cold, whole = (generate(llm, requests, PROMPT, NEW + 1) for _ in range(2))
        step, rate = (whole - first) / NEW * 1e3, requests * (NEW + 1) / whole
        rate_cold = round(requests * (NEW + 1) / cold, 1)
        speed = f"step {step:.3f} ms, {rate:.0f} tokens/s ({rate_cold:.0f} in the first run)"
        print(f"{mode} {requests}: first {first * 1e3:.1f} ms, {speed}", flush=True)
        shape = {"requests": requests, "prompt": PROMPT, "new_tokens": NEW + 1}
        times = {"step_ms": round(step, 3), "ttft_ms": round(first * 1e3, 1), "tokens_per_second": round(rate, 1)}
        found.append(row(mode, args, checked, **shape, **times, tokens_per_second_cold=rate_cold))
    for prompt in args.prompts:
        first = min(generate(llm, 1, prompt, 1) for _ in range(4))
        print(f"{mode}: first token of a prompt of {prompt}: {first * 1e3:.1f} ms", flush=True)
        found.append(row(mode, args, checked, requests=1, prompt=prompt, new_tokens=1, ttft_ms=round(first * 1e3, 1)))
    if args.rates or args.profile:
        add(args.output, found, KEY)  # before anything that may fail
    if args.rates:
        found += arrivals(llm, mode, args)
    if args.profile:
        import serving  # not __main__, whose functions other processes cannot import

        for requests in args.profile:
            profile_steps(llm, mode, requests)
        for prompt in args.prompts:
            print(f"== {mode}, the first token of a prompt of {prompt}")
            llm.apply_model(serving.begin_table)
            generate(llm, 1, prompt, 1)
            print(*llm.apply_model(partial(serving.end_table, 1)), sep="\n", flush=True)
    return found


def rates(mode: str, args: argparse.Namespace) -> list[Row]:
    """Only requests that arrive at random."""
    llm = start(mode, args)
    if mode not in OWN:
        check_first(llm, mode)
    return arrivals(llm, mode, args)


def arrivals(llm: "LLM", mode: str, args: argparse.Namespace) -> list[Row]:
    """Requests with Poisson arrivals: TTFT, TPOT, throughput."""
    generate(llm, 8, PROMPT, 8)
    found, core = [], llm.llm_engine
    sampling = greedy(args.new, streamed=True)
    for rate in args.rates or RATES:
        draw = random.Random(0)
        count = max(16, int(rate * args.seconds))
        arrivals, at = [], 0.0
        for _ in range(count):
            at += draw.expovariate(rate)
            arrivals.append(at)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        begin, sent = time.perf_counter(), 0
        while len(last) < count:
            now = time.perf_counter() - begin
            while sent < count and arrivals[sent] <= now:
                tokens = [draw.randint(10, 9999) for _ in range(args.prompt)]
                core.add_request(str(sent), {"prompt_token_ids": tokens}, sampling)
                sent += 1
            if not core.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[sent] - now))
                continue
            for answer in core.step():
                moment, name = time.perf_counter() - begin, answer.request_id.partition("-")[0]
                if answer.outputs[0].token_ids:
                    first.setdefault(name, moment)
                if answer.finished:
                    last[name] = moment
        waits = sorted(first[str(i)] - arrivals[i] for i in range(count))
        each = sorted((last[str(i)] - first[str(i)]) / (args.new - 1) for i in range(count))
        speed = count * args.new / max(last.values())
        ttft, tpot = waits[count // 2] * 1e3, each[count // 2] * 1e3
        print(f"{mode} at {rate}/s: first {ttft:.1f} ms, then {tpot:.2f} ms, {speed:.0f} tokens/s", flush=True)
        shape = {"requests": count, "prompt": args.prompt, "new_tokens": args.new, "rate": rate}
        times = {"ttft_ms": round(ttft, 2), "tpot_ms": round(tpot, 3), "tokens_per_second": round(speed, 1)}
        found.append(row(mode, args, mode not in OWN, **shape, **times))
    return found


def profile_steps(llm: "LLM", mode: str, requests: int, count: int = 24) -> None:
    """Print what decode steps of so many concurrent requests launch, all past their prefill."""
    import serving  # not __main__, whose functions other processes cannot import

    core = llm.llm_engine
    for i in range(requests):
        core.add_request(f"profile-{requests}-{i}", prompt_of(PROMPT), greedy(400, streamed=True))
    begun: set[str] = set()
    while len(begun) < requests:
        begun |= {answer.request_id for answer in core.step() if answer.outputs[0].token_ids}

    def some_steps() -> float:
        begin, tokens = time.perf_counter(), 0
        while tokens < count * requests:
            tokens += sum(len(answer.outputs[0].token_ids) for answer in core.step())
        return (time.perf_counter() - begin) / count * 1e3

    print(f"== {mode}, {requests} requests: {some_steps():.3f} ms/step")
    llm.apply_model(serving.begin_table)
    some_steps()  # steps run between these calls: count is off by about one
    print(*llm.apply_model(partial(serving.end_table, count)), sep="\n", flush=True)
    core.abort_request(list(begun))
    while core.has_unfinished_requests():
        core.step()


_recorder = KernelRecorder()
"""Of a worker process."""


def begin_table(_: Module) -> None:
    """In the worker process: start recording the GPU's kernels."""
    _recorder.begin()


def end_table(count: int, _: Module) -> str:
    """In the worker process: the table of ``count`` steps since then."""
    return _recorder.end(count)


def main() -> None:
    """Run one mode here, several in a process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "rates"))
    parser.add_argument("modes", nargs="*")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200" / "serving.json")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (tensor parallelism)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--profile", type=int, nargs="*", help="profile steps of so many requests")
    parser.add_argument("--in-process", action="store_true", help="engine core in this process")
    parser.add_argument("--wait", action="store_true", help="once up, wait for a line on standard input")
    parser.add_argument("--cache", type=float, help="GiB of KV cache, if engines share a GPU")
    parser.add_argument("--engine", type=json.loads, default={}, help="more vLLM engine arguments, as JSON")
    parser.add_argument("--captured", type=int, nargs="+", help="CUDA graph sizes, for a quick start")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second; with steps, after them")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    if len(args.modes) == 1:
        found = {"steps": steps, "rates": rates}[args.what](args.modes[0], args)
        if found:
            add(args.output, found, KEY)
    else:
        rest = [a for a in sys.argv[1:] if a != args.what and a not in args.modes]
        for mode in args.modes:
            subprocess.run([sys.executable, __file__, args.what, mode, *rest], check=False)


if __name__ == "__main__":
    main()
