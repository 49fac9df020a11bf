"""A tiny model, a text and the command line, shared by these tests."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from anybit import cli
from cases_models import save_byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    size = save_byte_tokenizer(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["anybit", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code = stop.value.code
        captured = capfd.readouterr()
        return int(code or 0), captured.out, " ".join(captured.err.split())

    return command


@pytest.fixture
def vllm_config() -> Iterator[None]:
    """vLLM's layers must be created within a configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process rank I of N for vLLM's layers."""
    import cases_vllm

    return cases_vllm.ranks(monkeypatch)
