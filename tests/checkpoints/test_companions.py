"""Files beside a model's weights: copied with them or named if left out; a user's own are never replaced."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tests.cases_models import save_byte_tokenizer, save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import anybit
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.write import convert, convert_into
from anybit.checkpoints.source import local_folder
from anybit.cli import app
from anybit.errors import CheckpointError
from anybit.hf.check import check_folder
from anybit.hf.loading import load_model, stored_scheme
from anybit.quantization.methods.registry import quantize_folder

TOOLS = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
COPIED = ("additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "figures/a/b.png", "README.md")
LEFT = ("code.py", "nested/run.py", "pytorch_model.bin", "original/params.json", "original/model.pth", "onnx/m.onnx")
HIDDEN = (".gitattributes", ".cache/x", "nested/.secret")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with everything that hub folders have."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("model") / "source")
    save_byte_tokenizer(folder)
    for name in (*COPIED, *LEFT, *HIDDEN):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TOOLS if name.endswith(".jinja") else name)
    return folder


def by_quantizing(source: Path, out: Path, overwrite: bool) -> None:
    quantize_folder(source, out, "w4a16g32", overwrite=overwrite)


def by_the_command(source: Path, out: Path, overwrite: bool) -> None:
    arguments = ["quantize", str(source), "-o", str(out), "-s", "w4a16g32", *["--overwrite"] * overwrite]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0


def by_converting(source: Path, out: Path, overwrite: bool) -> None:
    if not overwrite:
        with pytest.warns(UserWarning):
            quantize_folder(source, out.parent / "first", "w4a16g32")
        for name in LEFT:
            (out.parent / "first" / name).parent.mkdir(exist_ok=True)
            shutil.copy(source / name, out.parent / "first" / name)
    convert_into(out.parent / "first", "anybit", out, overwrite)


@pytest.mark.parametrize("write", [by_quantizing, by_the_command, by_converting])
def test_a_models_files_come_along_and_the_rest_is_named(source, tmp_path, write) -> None:
    out = tmp_path / "out"
    for overwrite in (False, True):
        with pytest.warns(UserWarning, match="not copied from") as said:
            write(source, out, overwrite)
        (words,) = {str(w.message) for w in said if "not copied from" in str(w.message)}
        assert all(name in words for name in ("code.py", "nested/run.py", "onnx/", "original/", "pytorch_model.bin"))
        assert "model.safetensors" not in words
        assert all((out / name).read_text() == (source / name).read_text() for name in COPIED)
        assert not [name for name in (*LEFT, *HIDDEN) if (out / name).exists()]
        listed = json.loads((out / ".anybit-files.json").read_text())["files"]
        assert set(COPIED) <= set(listed)
    tool = {"type": "function", "function": {"name": "clock", "description": "the time", "parameters": {}}}
    said = AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "hm"}], tools=[tool], tokenize=False
    )
    assert said == "clock hm"


def test_a_users_files_in_sub_folders_are_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    by_quantizing(source, out, False)
    template = out / COPIED[0]
    for name, text in (("figures/mine.png", "x"), ("mine/notes", "x"), (COPIED[0], TOOLS.upper())):
        before = (out / name).read_text() if (out / name).exists() else None
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
        stamp = (out / ".anybit-files.json").stat().st_mtime + 5
        os.utime(out / name, (stamp, stamp))
        with pytest.raises(CheckpointError, match=f"it holds {name}, which would be lost"):
            by_quantizing(source, out, True)
        (out / name).unlink()
        if before is not None:
            template.write_text(before)
        elif not any((out / name).parent.iterdir()):
            (out / name).parent.rmdir()
    (out / ".anybit-files.json").unlink()  # as other tools write a folder: what the source has, too, is kept
    by_quantizing(source, out, True)
    (out / "figures" / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="it holds figures/link, which"):
        by_quantizing(source, out, True)


def test_a_result_inside_the_source_is_written_again(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(source, model)
    by_quantizing(model, model / "w4", False)
    by_quantizing(model, model / "w4", True)
    assert not (model / "w4" / "w4").exists()
    with pytest.raises(CheckpointError, match="holds the model that is read"):
        by_quantizing(model, model / "figures", True)


@pytest.mark.parametrize("name", ["notes.txt", "figures/link.txt", "figures/link"])
def test_a_link_out_of_the_folder_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(source, model)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (model / name).symlink_to(tmp_path / "secret" / "key" if name.endswith(".txt") else tmp_path / "secret")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*secret.*, outside of its folder"):
        by_quantizing(model, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()
    (model / name).unlink()
    (model / name).symlink_to(model / ("README.md" if name.endswith(".txt") else "1_Pooling"))
    by_quantizing(model, tmp_path / "out", False)
    assert (tmp_path / "out" / name).exists() == name.endswith(".txt")  # a linked folder is there by its own name


def test_files_in_sub_folders_are_durable_before_old_ones_go(source, tmp_path, monkeypatch) -> None:
    by_quantizing(source, tmp_path / "out", False)
    flushed, fsync = [], os.fsync

    def watched(number: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{number}").readlink()))
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)
    by_quantizing(source, tmp_path / "out", True)
    assert any(file.endswith(COPIED[0]) for file in flushed)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_a_model_is_to_be_merged_first(source: Path, tmp_path: Path, file: str) -> None:
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    shutil.copytree(source, plain)
    by_quantizing(source, coded, False)
    for folder in (plain, coded):
        if file.endswith("json"):
            (folder / file).write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
        else:
            save_file({}, folder / file)
    run = CliRunner()
    doors: dict[str, Callable[[], object]] = {
        "quantize": lambda: quantize_folder(plain, tmp_path / "out", "w4a16g32"),
        "the command": lambda: by_the_command(plain, tmp_path / "out", False),
        "load": lambda: anybit.load(coded),
        "load_model": lambda: load_model(plain, device="cpu"),
        "stored_scheme": lambda: stored_scheme(coded),
        "from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(coded),
        "while loading": lambda: AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=anybit.AnyBitConfig("w4a16g32")
        ),
        "convert": lambda: convert(coded, "compressed-tensors"),
        "convert -o": lambda: convert_into(coded, "gptq", tmp_path / "out"),
        "info": lambda: run.invoke(app, ["info", str(plain)], catch_exceptions=False),
        "explain": lambda: run.invoke(app, ["explain", str(coded)], catch_exceptions=False),
        "eval": lambda: run.invoke(app, ["eval", str(coded), "-t", str(plain / "README.md")], catch_exceptions=False),
        "serve": lambda: local_folder(plain).__enter__(),
        "vLLM": lambda: check_folder(coded),
    }
    for door in doors.values():
        with pytest.raises(CheckpointError, match=rf"holds a PEFT adapter \({file}\).*merge it .*merge_and_unload\(\)"):
            door()
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds a PEFT adapter"):
        Folder(tmp_path)
