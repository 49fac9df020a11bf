"""The command line: long runs, what a model would take, models compared."""

import importlib.util
import json
import re
import string
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from anybit.cli import common, memory
from anybit.cli import quantize as quantizing
from anybit.hf.loading import load_model
from anybit.hf.tasks import Accuracy, accuracies
from anybit.quantization.methods.registry import METHODS, quantize_folder


def test_a_log_shows_what_is_left(run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[i % 200 for i in range(64)]] * 16))
    monkeypatch.setattr(common, "_SAY_SECONDS", -1.0)
    slow = replace(METHODS["distill"], pace=(4e3, 4e3))
    monkeypatch.setitem(METHODS, "distill", slow)
    words = ("-s", "w4a16g32", "--method", "distill", "-t", ids, "--set", "learn_tokens=600", "--device", "cpu")
    code, out, err = run("quantize", model, "-o", tmp_path / "out", *words)
    assert code == 0 and out.count("\n") == 2 and "learned from 0.00102 million tokens" in out
    assert "distill of 0 million weights: about 5 min on two CPU cores 50%: block 1 of 2," in err
    assert re.search(r"100%: block 2 of 2, 0 s left \d+%: learning, KL divergence \d\.\d+ nats, \d+ s left", err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "interrupted; nothing was saved"),
        (("--method", "gptq", "-t", "x.json"), "goes on if it is run again: anybit quantize m -o out --method gptq "),
        (("--method", "gptq", "-t", "x.json", "--set", "resume=kept"), "the same command goes on after the blocks in "),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(run, model, monkeypatch, words, says) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(quantizing, "quantize_folder", interrupted)
    (model.parent / "m").exists() or (model.parent / "m").symlink_to(model)
    code, out, err = run("quantize", "m", "-o", "out", *words)
    assert (code, out) == (130, "") and says in err
    assert ("--set resume=out-blocks" in err) == ("run again" in says)


def test_info_scheme_says_what_a_model_would_take(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = tmp_path / "half"
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, dtype="bfloat16", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(half)
    schemes = ("w4a16g32", "w3a16g64asym-kv4")
    asked: list[Any] = []

    def fetched(name: str, allow_patterns: Any, **_: Any) -> str:
        asked.append((name, allow_patterns))
        return str(half)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    words = [word for scheme in schemes for word in ("-s", scheme)]
    code, out, err = run("info", "owner/model", *words, "--context", 100, "--json")
    assert code == 0, err
    assert asked == [("owner/model", ["config.json"])]
    plain, four, three = json.loads(out)["schemes"]
    saved = quantize_folder(half, tmp_path / "w4", "w4a16g32")
    assert (plain["weight_bytes"], four["weight_bytes"]) == (saved.bytes_before, saved.bytes_after)
    assert plain["cache_bytes"] == four["cache_bytes"] == 2 * 2 * 128 * 100 * 2  # layers, K and V, channels, bytes
    assert three["cache_bytes"] < four["cache_bytes"] / 3 and three["weight_bytes"] < four["weight_bytes"]
    assert plain["tokens"] == {"24": 2048, "48": 2048, "80": 2048}  # all of its positions
    code, out, _ = run("info", half, "-s", "w4a16g32")
    assert code == 0 and " ".join(out.splitlines()[0].split()) == "scheme weights 8,192 tokens 24 GB 48 GB 80 GB"
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # as on a terminal
    for what in (half, tmp_path / "w4", "w3a16g64asym-kv4"):
        cells = run("info", what)[1].splitlines()[1:]  # without the path
        assert max(map(len, cells)) <= 80 and any(cell.startswith(" " * 10) for cell in cells)
    monkeypatch.setattr(memory, "_GPUS", (6e-4,))  # GiB
    few = json.loads(run("info", half, *words, "--json")[1])["schemes"]
    first, second, third = (next(iter(need["tokens"].values())) for need in few)
    assert 0 == first < second < third < 2048
    assert "is quantized already" in run("info", tmp_path / "w4", "-s", "w4a8")[2]


def test_tasks_are_those_of_lm_eval(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    """A model prefers its own most likely tokens."""
    words = ("eval", model, "--device", "cpu", "--tasks", tmp_path / "own.yaml")
    assert "leave out --text" in run(*words, "-t", text)[2]
    assert "leave out --windows, --context" in run(*words, "--windows", 4, "--context", 64)[2]
    assert "--limit is of the questions of --tasks" in run("eval", model, "-t", text, "--limit", 1)[2]
    if importlib.util.find_spec("lm_eval") is None:
        code, _, err = run(*words)
        assert code == 1 and "pip install 'anybit[eval]'" in err
        return
    assert "there is no such file" in run(*words)[2]
    loaded = load_model(model, device="cpu")
    letters = {one: loaded.tokenizer.convert_tokens_to_ids(one) for one in string.ascii_letters}
    rows = []
    for letter, token in letters.items():
        logits = loaded.model(torch.tensor([[token]])).logits[0, -1].tolist()
        likely = sorted(letters, key=lambda one: logits[letters[one]])
        rows.append({"question": letter, "choices": [likely[0], likely[-1]], "answer": 1})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"""task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "own.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
    )
    code, out, err = run(*words, "--json")
    assert code == 0, err
    (found,) = json.loads(out[out.index("{") :])["tasks"]
    assert (found["task"], found["metric"], found["questions"]) == ("own", "acc", len(rows))
    assert found["value"] == 1
    (tmp_path / "all.yaml").write_text("group: all\ntask: [own]\n")
    out = run(*words[:-1], tmp_path / "all.yaml", "--limit", 1)[1]
    assert "own (1)" in out and "100.0%" in out and "±" not in out
    assert "lm-eval knows no such task" in run("eval", model, "--device", "cpu", "--tasks", "nosuchtask")[2]


def test_groups_of_tasks_without_an_accuracy_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval lists them with a blank key, and since 0.4.13 by name alone."""
    results: dict[str, dict[str, object]] = {
        "older": {" ": " ", "alias": "a, b"},
        "newer": {"name": "newer", "alias": "a, b", "sample_len": 2},
        "own": {"alias": "own", "acc,none": 0.75, "acc_stderr,none": 0.125},
    }
    manager = SimpleNamespace(match_tasks=lambda names: names)
    for name, value in {
        "lm_eval": SimpleNamespace(simple_evaluate=lambda *_, **__: {"results": results}),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=lambda **_: None),
        "lm_eval.tasks": SimpleNamespace(TaskManager=lambda **_: manager),
    }.items():
        monkeypatch.setitem(sys.modules, name, value)
    loaded: Any = SimpleNamespace(model=None, tokenizer=None)
    assert accuracies(loaded, ["all"]) == [Accuracy("own", "acc", 0.75, 0.125, 0)]


def test_models_are_compared_in_a_table(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    folders = [model]
    for scheme in ("w8a16g32", "w2a16g32"):
        folders.append(tmp_path / scheme)
        assert run("quantize", model, "-s", scheme, "-o", folders[-1])[0] == 0
    words = ("-t", text, "--context", 64, "--windows", 2, "--device", "cpu", "--baseline", model)
    code, out, err = run("eval", *folders, *words, "--json")
    assert code == 0, err
    found = json.loads(out)["models"]
    assert [one["scheme"] for one in found] == [None, "w8a16g32", "w2a16g32"]
    assert found[0]["divergence"] < found[1]["divergence"] < found[2]["divergence"]
    code, out, err = run("eval", *folders, *words)
    lines = out.splitlines()
    assert " ".join(lines[0].split()) == "model scheme bits per weight perplexity same token KL, nats"
    assert lines[2].split()[1:4] == ["w8a16g32", "8.50", f"{found[1]['perplexity']:.2f}"]
    assert lines[-1].startswith("2 windows of 64 tokens (126 scored, without BOS); same token")
    if importlib.util.find_spec("matplotlib") is None:
        code, _, err = run("eval", *folders, *words, "--picture", tmp_path / "x.svg")
        assert (code, err) == (1, "error: --picture draws with matplotlib: pip install 'anybit[plots]'")
        return
    assert run("eval", *folders, *words, "--picture", tmp_path / "x.svg")[0] == 0
    assert "w2a16g32" in (tmp_path / "x.svg").read_text() or (tmp_path / "x.svg").stat().st_size > 5000
    assert "must end in one of" in run("eval", *folders, *words, "--picture", tmp_path / "x.doc")[2]
