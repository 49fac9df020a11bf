"""The examples of docs/python.md, README.md and docs/quickstart.md run unchanged, in order, on a CPU."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from anybit.choose import dispatch
from anybit.cli import app
from anybit.ops.reference import ReferenceDecoded
from cases_models import save_byte_tokenizer

ROOT = Path(__file__).parent.parent.parent
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
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["y"].shape == (5, 256)  # type: ignore[attr-defined]
    assert not names["error"].any()  # type: ignore[attr-defined]
    assert names["out"].shape == (2, 1, 8, 64)  # type: ignore[attr-defined]


def test_readme_and_quickstart_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_the_page_names_is_there() -> None:
    import anybit

    assert callable(dispatch.use) and callable(anybit.ops.allow_fallback)
    assert issubclass(anybit.errors.KernelError, RuntimeError) and issubclass(anybit.errors.LayerError, ValueError)
    assert ReferenceDecoded.name == "reference-decoded"
