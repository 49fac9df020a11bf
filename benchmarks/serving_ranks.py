"""One model's outputs in vLLM over two and four GPUs against one, and against anybit's own generate.

    python benchmarks/serving_ranks.py MODEL --schemes w4a16g32 w3a16g64asym w5a16 --graphs w4a16g128

SmolLM2 has 9 query and 3 KV heads, which two GPUs cannot share: except for --kinds one, a copy is padded to 12 and 4
with zero heads, which change nothing. It is quantized in each scheme; engines run on one GPU, with tensor parallelism
over two or four, and with pipeline parallelism over two, all prompts in a batch and each alone. Where
tokens diverge from generate's, it prints how far the engine's token is below the largest logit after the same tokens:
near it for rounding.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving_check import CONTEXT, NEW, Answers, Generated, prompts_of

KINDS = {
    "one": {}, "tensor": {"tensor_parallel_size": 2}, "four": {"tensor_parallel_size": 4},
    "pipeline": {"pipeline_parallel_size": 2},
}  # fmt: skip


def padded(source: Path, folder: Path) -> Path:
    """Copy a Llama, padded with zero heads so that four ranks can share them."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    more = -(-keys // 4) * 4
    sizes = {"q": more * (heads // keys) * dim, "k": more * dim, "v": more * dim}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        part = name.partition("self_attn.")[2]
        if part == "o_proj.weight":
            tensors[name] = torch.nn.functional.pad(tensor, (0, sizes["q"] - tensor.shape[1]))
        elif part.endswith("_proj.weight"):
            tensors[name] = torch.nn.functional.pad(tensor, (0, 0, 0, sizes[part[0]] - tensor.shape[0]))
    config |= {"num_attention_heads": more * (heads // keys), "num_key_value_heads": more, "head_dim": dim}
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", ".anybit-files.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def answer(folder: Path, found: Path, **options: Any) -> None:
    """Start an engine, and write its greedy outputs to a file."""
    from vllm import LLM, SamplingParams

    begin, prompts = time.time(), prompts_of(folder)
    settings = {
        "dtype": "float16", "max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "enable_prefix_caching": False, "enforce_eager": True, "distributed_executor_backend": "mp",
        "disable_log_stats": True, "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 256 << 20,
    }  # fmt: skip
    llm = LLM(str(folder), **{**settings, **options})
    up = time.time() - begin
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = {}
    for how, asked in (("together", [given]), ("alone", [[one] for one in given])):
        done = [one for some in asked for one in llm.generate(some, sampling, use_tqdm=False)]
        answers[how] = [list(one.outputs[0].token_ids) for one in done]
    part = found.with_suffix(".part")
    part.write_text(json.dumps({"up": round(up, 1), "took": round(time.time() - begin, 1), **answers}))
    part.rename(found)


Job = tuple[Path, dict[str, Any]]
"""A folder, and its engine's options; the folder contains a file "ready" once it may be read."""


def engines(work: Path, jobs: dict[str, Job], at_once: int, limit: float) -> None:
    """Run many engines, some at a time, each in a fork that has vLLM imported: writes NAME.json and NAME.log.

    NAME.failed if there are no outputs after ``limit`` seconds.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine core in the fork; its ranks are subprocesses
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # it uses NVLink's multicast
    for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_USE_FLASHINFER_SAMPLER", "0")):
        os.environ.setdefault(name, value)
    from vllm import LLM  # noqa: F401

    from anybit.vllm import register

    register()
    running: dict[int, tuple[str, float]] = {}
    rest = dict(jobs)
    while rest or running:
        for name, (folder, options) in list(rest.items()):
            if len(running) < at_once and (folder / "ready").exists():
                del rest[name]
                do = functools.partial(answer, folder, work / f"{name}.json", **options)
                running[fork(work / f"{name}.log", do)] = name, time.time()
        for child, (name, began) in list(running.items()):
            ended = os.waitpid(child, os.WNOHANG)[0]
            if not ended and time.time() - began < limit:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and its ranks
            if not ended:
                os.waitpid(child, 0)
            del running[child]
            if not (work / f"{name}.json").exists():
                (work / f"{name}.failed").touch()
        time.sleep(0.1)


def fork(log: Path, do: Callable[[], None]) -> int:
    """Call ``do`` in a process and process group of its own that logs to a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        from anybit.tune.processes import die_with_parent

        die_with_parent()
        with log.open("wb", buffering=0) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        do()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def quantize(source: Path, work: Path, schemes: list[str]) -> None:
    """Quantize the folders that engines read."""
    from anybit.quantization.methods.registry import quantize_folder

    for scheme in schemes:
        quantize_folder(source, work / scheme, scheme)
        (work / scheme / "ready").touch()


def own(folder: Path) -> Generated:
    """Load a model in anybit."""
    import torch

    from anybit.hf.loading import load_model

    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return Generated(load_model(folder, dtype=dtype, device=device).model, prompts_of(folder))


def compare(work: Path, names: list[str], here: Generated, expected: dict[str, Answers]) -> None:
    """Wait for engines, and print how each differs from generate, and from the first."""
    first: dict[str, Any] = {}
    for name in names:
        file = work / f"{name}.json"
        while not file.exists() and not (work / f"{name}.failed").exists():
            time.sleep(0.2)
        if not file.exists():
            print(f"{name}: no outputs; {last_words(work / f'{name}.log')}", flush=True)
            continue
        got = json.loads(file.read_text())
        first = first or {"name": name, **got}
        for how in ("together", "alone"):
            below = [gap for i, answer in enumerate(got[how]) for gap in here.below(i, answer)[0]]
            beside = expected if name == first["name"] else {**expected, first["name"]: first[how]}
            alike = ", ".join(f"{same(got[how], answers)} are {way}'s" for way, answers in beside.items())
            said = f"{name}, {how}: of {len(below)} tokens {alike}, {below.count(0.0)} the largest logit after the same"
            print(f"{said} tokens, {max(below):.4f} the furthest below; up after {got['up']} s", flush=True)


def same(some: Answers, others: Answers) -> int:
    """Number of tokens that match."""
    return sum(x == y for a, b in zip(some, others, strict=True) for x, y in zip(a, b, strict=True))


def last_words(log: Path) -> str:
    """The last error in an engine's log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no log")


def main() -> None:
    """Prepare, start, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Llama's folder, 16-bit safetensors in one file")
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["one", "tensor", "pipeline"], help="engines besides the first"
    )
    parser.add_argument("--graphs", nargs="*", default=[], help="schemes to run also with compilation and CUDA graphs")
    parser.add_argument("--fused", action="store_true", help="compare with fused generate and vLLM's attention, too")
    parser.add_argument("--work", type=Path, help="a folder for models and engine logs")
    parser.add_argument("--at-once", type=int, default=6, help="engines at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds per engine")
    parser.add_argument("--engine", type=json.loads, default={}, help="more vLLM engine arguments, as JSON")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="ranks-"))
    work.mkdir(parents=True, exist_ok=True)
    begin, jobs, names = time.time(), dict[str, Job](), dict[str, list[str]]()
    for scheme in dict.fromkeys((*args.schemes, *args.graphs)):
        for graphs in [among is args.graphs for among in (args.schemes, args.graphs) if scheme in among]:
            for kind in args.kinds:
                name = f"{scheme}.{kind}{'.graphs' * graphs}"
                jobs[name] = work / scheme, {**KINDS[kind], "enforce_eager": not graphs, **args.engine}
                names.setdefault(scheme, []).append(name)

    def source() -> Path:  # unpadded if no ranks share heads
        return args.model if args.kinds == ["one"] else padded(args.model, work / "padded")

    children = [
        fork(work / "engines.log", lambda: engines(work, jobs, args.at_once, args.limit)),
        fork(work / "quantize.log", lambda: quantize(source(), work, list(names))),
    ]
    try:
        for scheme, those in names.items():
            while not (work / scheme / "ready").exists():
                time.sleep(0.1)
                if os.waitpid(children[1], os.WNOHANG)[0] and not (work / scheme / "ready").exists():
                    raise SystemExit(f"{scheme} was not quantized: {last_words(work / 'quantize.log')}")
            here = own(work / scheme)
            expected = here.all_answers(static=False) if args.fused else {"generate": here.answers()}
            compare(work, those, here, expected)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)
    print(f"{time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
