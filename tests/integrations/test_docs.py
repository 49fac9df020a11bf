"""The examples of docs/python.md run as they stand there, one after the other; that of README does on a CPU."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from anybit.ops.reference import ReferenceDecoded
from anybit.tune import dispatch
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
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["y"].shape == (5, 256)  # type: ignore[attr-defined]
    assert not names["error"].any()  # type: ignore[attr-defined]
    assert names["out"].shape == (2, 1, 8, 64)  # type: ignore[attr-defined]


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for there, here in (("Qwen/Qwen3-4B", "model"), ("cuda", "cpu"), ("max_new_tokens=64", "max_new_tokens=3")):
        assert there in block
        block = block.replace(there, here)
    exec(compile(block, "README.md", "exec"), {})
    again = transformers.AutoModelForCausalLM.from_pretrained("qwen3-4b-w4")
    assert str(again.config.quantization_config.scheme) == "w4a16g128"


def test_what_the_page_names_is_there() -> None:
    import anybit

    assert callable(dispatch.use) and callable(dispatch.allow) and callable(anybit.ops.allow_fallback)
    assert issubclass(anybit.errors.KernelError, RuntimeError) and issubclass(anybit.errors.LayerError, ValueError)
    assert ReferenceDecoded.name == "reference-decoded"
