"""A real vLLM on the CPU over models that anybit saved: outputs match anybit's own generate, token for token.

Every engine is a separate process and takes a minute or more: `make vllm` runs these, and plain `make test` skips them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

import cases_serving as cases
from anybit import AnyBitConfig
from anybit.checkpoints.formats.write import convert_into
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder
from cases_vllm_experts import save_mixture

SCHEMES = ("w4a16g128", "w4a16g32", "w3a16g64asym", "w5a16", "w2a16g32asym")
"""Not with quantized activations: noise of 1e-6 in SmolLM2's embeddings moves w4a8's logits by 2.7, since values
near rounding boundaries get other codes, and two exact programs soon diverge. test_vllm.py compares layers."""
PROMPTS = ["The capital of France is", "Photosynthesis is", "Write a short poem about the sea:", "2, 4, 6, 8,"]
NEW = 24
OLD = sys.modules["vllm"].__version__.startswith("0.26")
CHILD = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

def main():
    given = json.loads(sys.argv[1])
    settings = dict(dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.2)
    sampling = SamplingParams(temperature=0, min_tokens=given["new"], max_tokens=given["new"])
    for model in given["models"]:
        llm = LLM(model, **{**settings, **given["options"]})
        found = llm.generate(given["prompts"], sampling, use_tqdm=False)
        print("ANSWERS", json.dumps([model, [list(one.outputs[0].token_ids) for one in found]]), flush=True)
        if model != given["models"][-1]:  # the next one's engine is in this process, too
            del llm
            cleanup_dist_env_and_memory()

if __name__ == "__main__":
    main()
"""


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a process that starts an engine."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    settings["PYTHONPATH"] = str(cases.ROOT / "src")  # this checkout's plug-in, wherever the installed one is
    env = {**os.environ, **settings}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)


def by_vllm(model: Path, tmp_path: Path, **options: Any) -> list[list[int]]:
    """Greedy outputs of an engine in a subprocess, which imports anybit only through vLLM's plug-in loader."""
    return many_by_vllm([model], tmp_path, **options)[str(model)]


def many_by_vllm(models: list[Path], tmp_path: Path, **options: Any) -> dict[str, list[list[int]]]:
    """The same for several engines, one after another."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    given = {"models": [str(model) for model in models], "prompts": PROMPTS, "new": NEW, "options": options}
    done = run(str(child), json.dumps(given))
    lines = [line.removeprefix("ANSWERS ") for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert len(lines) == len(models), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(line) for line in lines)


def by_anybit(model: Path, scheme: str | None = None) -> list[list[int]]:
    loaded = load_model(model, scheme, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        answer = loaded.model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


def quantized(source: Path, scheme: str, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=AnyBitConfig(scheme), dtype=torch.float16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save_small_llama(tmp_path_factory.mktemp("small"))


@pytest.mark.model
@pytest.mark.parametrize("scheme", SCHEMES)
def test_smollm2_answers_as_anybit_does(smollm2: Path, tmp_path: Path, scheme: str) -> None:
    folder = quantized(smollm2, scheme, tmp_path / scheme)
    assert by_vllm(folder, tmp_path) == by_anybit(folder)


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym"])
def test_two_ranks_answer_as_one(small: Path, tmp_path: Path, scheme: str) -> None:
    folder = quantized(small, scheme, tmp_path / scheme)
    assert by_vllm(folder, tmp_path, tensor_parallel_size=2) == by_anybit(folder)


@pytest.mark.parametrize("scheme", ["w4a16g64", "w3a16g64asym", "w4a16g64s24", "w4a8s24"])
def test_compiled_graphs_answer_as_eager_ones(small: Path, tmp_path: Path, scheme: str) -> None:
    folder = quantized(small, scheme, tmp_path / scheme)
    assert by_vllm(folder, tmp_path, enforce_eager=False) == by_anybit(folder)


@pytest.mark.parametrize(
    ("kind", "scheme", "options"),
    [
        ("qwen3_moe", "w4a16g64", {"enforce_eager": False}),
        ("mixtral", "w3a16g64asym", {}),
        ("phimoe", "w4a16g32", {"enforce_eager": False}),
        ("qwen2_moe", "w5a16", {}),
        ("qwen3_moe", "w4a16g128", {"tensor_parallel_size": 2}),
        ("mixtral", "w4a16g128", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen2_moe", "w4a16g64", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3_moe", "w4a16g64+w2a16g64asym", {"enforce_eager": False}),
        ("mixtral", "w4a16g64+w3a16g64asym", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_a_mixture_of_quantized_experts_answers_as_anybit_does(
    kind: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also where half of a layer's experts have another scheme."""
    scheme, _, other = scheme.partition("+")
    overrides = {"*.experts.[24].*": other, "*.experts.5.*": other} if other else None
    quantize_folder(save_mixture(kind, tmp_path / "source"), tmp_path / "q", scheme, overrides=overrides)
    expected = by_anybit(tmp_path / "q")
    assert len({token for answer in expected for token in answer}) > 10
    assert by_vllm(tmp_path / "q", tmp_path, **options) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_of_codes_and_a_tied_head(tied: bool, tmp_path: Path) -> None:
    source, overrides = cases.save_small_llama(tmp_path / "source", tied), {"model.embed_tokens": "w8a16"}
    quantize_folder(source, tmp_path / "q", "w4a16g64", overrides=overrides)
    assert by_vllm(tmp_path / "q", tmp_path, enforce_eager=tied) == by_anybit(tmp_path / "q")


def test_compressed_tensors_of_another_tool_by_choice(small: Path, tmp_path: Path) -> None:
    folder = quantized(small, "w4a16g64", tmp_path / "q")
    expected = by_anybit(folder)
    config = json.loads((folder / "config.json").read_text())
    words = config["quantization_config"]
    assert words["quant_method"] == "compressed-tensors" and words.pop("anybit")  # as another tool would write it
    (folder / "config.json").write_text(json.dumps(config))
    assert by_vllm(folder, tmp_path, quantization="anybit") == expected


@pytest.mark.parametrize("scheme", ["w4a16g64", "w8a16g32asym"])
def test_gptq_by_choice(small: Path, tmp_path: Path, scheme: str) -> None:
    folder = quantized(small, scheme, tmp_path / "q")
    convert_into(folder, "gptq", tmp_path / "gptq")
    assert by_vllm(tmp_path / "gptq", tmp_path, quantization="anybit") == by_anybit(folder)


@pytest.mark.parametrize("mixture", [False, True])
def test_floats_are_quantized_while_loading(mixture: bool, small: Path, tmp_path: Path) -> None:
    source = save_mixture("qwen3_moe", tmp_path / "source") if mixture else small
    words = {"quantization_config": {"quant_method": "anybit", "scheme": "w4a16g64"}}
    expected = by_anybit(source, "w4a16g64")
    got = by_vllm(source, tmp_path, quantization="anybit", hf_overrides=words, dtype="float32")
    assert got == expected


@pytest.mark.parametrize(
    ("format", "lives"),
    [
        ("kv8", ["everything"]),
        ("kv4", ["alone", "chunks", "hits", "preempted", "drafts"]),
        pytest.param("kv4", ["everything"], marks=pytest.mark.serve),
        ("kv2", ["everything"]),
    ],
)
def test_a_low_bit_cache_answers_as_generate_does_whatever_the_scheduler_does(format: str, lives: list[str]) -> None:
    """Token for token, with arithmetic independent of summation order: see cases_vllm_exact.py."""
    done = run(str(Path(__file__).parent.parent / "cases_vllm_exact.py"), format, *lives)
    assert done.returncode == 0, done.stderr[-3000:]  # also if nothing was preempted, hit or drafted
    found = {line["life"]: line for line in map(json.loads, re.findall(r'^{.*"life".*}$', done.stdout, re.MULTILINE))}
    assert found.keys() == set(lives)
    assert all(line["alike"] == line["tokens"] for line in found.values())


@pytest.mark.skipif(OLD, reason="vLLM's Mamba layers run on a CPU from 0.32 on")
@pytest.mark.parametrize("format", ["kv16", "kv4"])
def test_layers_that_keep_a_state_stay_as_they_are_beside_a_low_bit_cache(format: str) -> None:
    done = run(str(Path(__file__).parent.parent / "cases_vllm_hybrid.py"), "falcon-h1", format, "--new", "60")
    said = re.findall(r"^{.*}$", done.stdout, re.MULTILINE)
    assert len(said) == 1, done.stderr[-3000:]
    found = json.loads(said[0])
    assert found["distinct"] > 100
    assert found["beside its prompts"]["furthest"] < 0.01
    assert format != "kv16" or found["beside 16 bits"]["furthest"] < 0.01


def up(small: Path, tmp_path: Path, *flags: str) -> Any:
    """`anybit serve` of a quantized model, once it is ready."""
    folder = quantized(small, "w4a16g64", tmp_path / "q")
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    words = ("--dtype", "float32", "--max-length", "256", "--memory", "0.2", *flags)
    return cases.served(folder, tmp_path / "log", *words, seconds=900)


def test_embeddings_are_the_model_s(small: Path, tmp_path: Path) -> None:
    import httpx

    with up(small, tmp_path, "--", "--enforce-eager", "--runner", "pooling") as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": server.model, "input": "abc"}, timeout=60)
    found = torch.tensor(answer.json()["data"][0]["embedding"])
    loaded = load_model(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        last = loaded.model.model(**loaded.tokenizer("abc", return_tensors="pt")).last_hidden_state[0, -1]
    torch.testing.assert_close(found, last / last.norm(), rtol=0, atol=1e-4)


def test_a_killed_worker_ends_the_server_with_one_clear_error(small: Path, tmp_path: Path) -> None:
    import psutil

    with up(small, tmp_path, "--tensor-parallel", "2", "--", "--enforce-eager") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (worker,) = [one for one in family if "Worker_TP1" in " ".join(one.cmdline())]
        worker.kill()
        assert server.process.wait(timeout=60) == 1
        told = [line for line in server.said.splitlines() if line.startswith("error: ")]
        assert len(told) == 1 and told[0].startswith("error: vLLM's server ended by itself"), server.said[-3000:]
        assert "VllmWorker-1 died unexpectedly" in server.said
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
