"""A real vLLM on the CPU, started by `anybit serve`, and what OpenAI's client and strangers ask of it.

One server of a small random model, whose answers are held against anybit's own. `make test` ends with these tests.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

import httpx
import openai
from vllm.engine.arg_utils import EngineArgs

import cases_serving as cases
from anybit.hf.loading import Loaded, load_model
from anybit.quantization.methods.registry import quantize_folder

pytestmark = pytest.mark.serve
PROMPT = "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model; its embedding and head, too."""
    root = tmp_path_factory.mktemp("served")
    overrides = {"model.embed_tokens": "w8a16", "lm_head": "w8a16"}
    quantize_folder(cases.save_small_llama(root / "plain"), root / "q", "w4a16g64", overrides=overrides)
    return root / "q"


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapter(loaded: Loaded, folder: Path) -> Path:
    """A LoRA adapter of random weights for every quantized layer."""
    tensors, draw, place = {}, torch.Generator().manual_seed(1), folder.parent / "adapter"
    layers = {name: one for name, one in loaded.model.named_modules() if name.endswith("_proj")}
    for name, one in layers.items():
        for part, shape in (("A", (8, one.in_features)), ("B", (one.out_features, 8))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=draw)
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    words = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM"}
    words["target_modules"] = sorted({name.rpartition(".")[2] for name in layers})
    (place / "adapter_config.json").write_text(json.dumps(words))
    return place


@pytest.fixture(scope="module")
def server(folder: Path, adapter: Path) -> Iterator[cases.Running]:
    flags = ("--dtype", "float32", "--max-length", "256", "--memory", "0.2", "--", "--enforce-eager", "--enable-lora")
    flags += ("--lora-modules", f"a={adapter}", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_API_KEY": ""})
    with cases.served(folder, folder / "log", *flags, seconds=900) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: cases.Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def ask(client: openai.OpenAI, server: cases.Running) -> Callable[..., Any]:
    """A completion of PROMPT, greedy unless words say otherwise."""

    def asked(**words: Any) -> Any:
        extra = {"return_token_ids": True, **words.pop("extra_body", {})}
        words = {"model": server.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | words
        return client.completions.create(**words, extra_body=extra)

    return asked


def greedy(loaded: Loaded, new: int = 12) -> tuple[list[int], list[float]]:
    """Tokens after PROMPT by anybit without vLLM, and their log-probabilities."""
    ids, found = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids, list[float]()
    start = ids.shape[1]
    for _ in range(new):
        with torch.no_grad():
            chances = loaded.model(ids).logits[0, -1].float().log_softmax(-1)
        found.append(float(chances.max()))
        ids = torch.cat([ids, chances.argmax()[None, None]], -1)
    return ids[0, start:].tolist(), found


def metric(server: cases.Running, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_answers_streams_and_the_line_to_paste(server: cases.Running, ask: Any, loaded: Loaded) -> None:
    assert f"vLLM loads {server.model}, to serve it at {server.url}" in server.said
    cases.check_answers(server)
    tokens, scores = greedy(loaded)
    whole = ask(logprobs=2)
    assert whole.choices[0].token_ids == tokens and whole.usage.completion_tokens == len(tokens)
    assert whole.choices[0].logprobs.token_logprobs == pytest.approx(scores, abs=1e-3)
    pieces = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == len(tokens)


def test_many_at_once_and_clients_that_hang_up(server: cases.Running) -> None:
    cases.check_many_at_once(server, 24)


def test_tools_and_structured_answers(client: openai.OpenAI, server: cases.Running, ask: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    chat = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(**chat, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    answer = client.chat.completions.create(**chat, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    assert ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0].text in ("yes", "no")


def test_an_adapter_beside_quantized_weights(ask: Any, loaded: Loaded, adapter: Path) -> None:
    plain, _ = greedy(loaded)
    tensors = load_file(adapter / "adapter_model.safetensors")

    def added(name: str) -> Any:
        a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        return lambda layer, given, output: output + given[0] @ a.T @ b.T

    hooks = [m.register_forward_hook(added(n)) for n, m in loaded.model.named_modules() if n.endswith("_proj")]
    expected, _ = greedy(loaded)
    for hook in hooks:
        hook.remove()
    assert ask(model="a").choices[0].token_ids == expected != plain
    assert ask().choices[0].token_ids == plain


def test_a_prompt_is_not_computed_twice(server: cases.Running, ask: Any) -> None:
    prompt = "the same words " * 14
    first = ask(prompt=prompt).choices[0].token_ids
    before = metric(server, "prefix_cache_hits_total")
    assert ask(prompt=prompt).choices[0].token_ids == first
    assert metric(server, "prefix_cache_hits_total") - before >= 128


@pytest.mark.parametrize(
    ("model", "method", "found"),
    [
        ("q", None, "anybit"),
        ("q", "anybit", "anybit"),
        ("q", "compressed-tensors", "compressed-tensors"),
        ("q", "gptq", "does not match"),
        ("plain", "anybit", "--quantization anybit alone does not say how to quantize it"),
    ],
)
def test_a_method_that_is_named_by_hand_runs_or_is_refused(
    folder: Path, model: str, method: str | None, found: str
) -> None:
    words = {"dtype": "float32", "max_model_len": 64, "quantization": method}
    try:
        got = EngineArgs(model=str(folder.parent / model), **words).create_engine_config().model_config.quantization
    except ValueError as error:
        got = str(error)
    assert found in got


def test_strangers_get_answers_of_the_one_model(server: cases.Running) -> None:
    cases.check_strangers(server)


def test_a_shutdown_in_the_middle_leaves_the_port_to_the_next(
    server: cases.Running,
) -> None:  # last: it ends the server
    cases.check_shutdown(server)
    with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        pass


def test_a_damaged_folder_is_refused_before_vllm_starts(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-m", "anybit", "serve", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(cases.ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert f"tensor {name} has a value that is not finite" in done.stderr and len(done.stderr.splitlines()) == 1
