"""The examples of docs/python.md, README.md and docs/quickstart.md run unchanged, in order, on a CPU."""

import os
import re
import shlex
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from typer.main import get_command
from typer.testing import CliRunner

from anybit.choose import dispatch
from anybit.cli import app
from anybit.ops.reference import ReferenceDecoded
from cases_models import save_byte_tokenizer

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "python.md"


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=save_byte_tokenizer(folder), hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_examples_run(tmp_path: Path) -> None:
    save_model(tmp_path)
    names: dict[str, object] = {"folder": tmp_path}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?i).*deprecated", FutureWarning)
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    assert names["y"].shape == (5, 256)  # type: ignore[attr-defined]
    assert not names["error"].any()  # type: ignore[attr-defined]
    assert names["out"].shape == (2, 1, 8, 64)  # type: ignore[attr-defined]


def test_readme_and_quickstart_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and unchanged, except for a smaller model: what `make demo` leaves, then every block."""
    monkeypatch.chdir(tmp_path)
    original, quantized = ".cache/smollm2-135m-instruct", ".cache/smollm2-w4a16g128"
    save_model(tmp_path / original)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    run = CliRunner()
    assert run.invoke(app, ["quantize", original, "--scheme", "w4a16g128", "-o", quantized]).exit_code == 0
    for page in ("README.md", "docs/quickstart.md"):
        blocks = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert {kind for kind, _ in blocks} == {"bash", "python"}
        for kind, block in blocks:
            if kind == "python":
                exec(compile(block, page, "exec"), {})
            for line in block.splitlines() if kind == "bash" else ():
                command = shlex.split(line, comments=True)
                if command[:1] == ["anybit"]:
                    done = run.invoke(app, command[1:])
                    assert done.exit_code == 0, f"{page}: {line}: {done.output}"
                else:
                    assert line.startswith(("make demo", "source .venv/bin/activate", "pip install")), line


def test_pages_name_every_option() -> None:
    pages = "\n".join(file.read_text() for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", pages))
    shown = [parameter for name, command in commands.items() if name != "serve" for parameter in command.params]
    every = {option for one in shown for option in (*one.opts, *one.secondary_opts) if option.startswith("--")}
    assert every <= named, f"no page names {sorted(every - named)}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_docs_installs_only_what_changed(tmp_path: Path) -> None:
    tools, log = tmp_path / ".venv" / "bin", tmp_path / "log"
    tools.mkdir(parents=True)
    for name in ("python", "mkdocs"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$1 $2" >> {log}\n')
        (tools / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def made() -> list[str]:
        log.unlink(missing_ok=True)
        subprocess.run(["make", "docs"], cwd=tmp_path, check=True, capture_output=True)
        return log.read_text().splitlines()

    assert made() == ["python -m pip", "mkdocs build --strict"]
    later = time.time() + 100
    os.utime(tmp_path / "pyproject.toml", (later, later))  # as a checkout of git leaves it
    assert made() == made() == ["mkdocs build --strict"]
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# changed")
    os.utime(tmp_path / "pyproject.toml", (later + 1, later + 1))
    assert made() == ["python -m pip", "mkdocs build --strict"]


def test_api_page_names_what_exists() -> None:
    import anybit

    assert callable(dispatch.use) and callable(anybit.ops.allow_fallback)
    assert issubclass(anybit.errors.KernelError, RuntimeError) and issubclass(anybit.errors.LayerError, ValueError)
    assert ReferenceDecoded.name == "reference-decoded"
