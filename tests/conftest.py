"""Shared by all tests: import paths of cases and helpers, settings, and the model that make fetches."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# cases, the emulator (import emulate), the checks of machine code (from machine_code import check)
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("", "emulator", "kernels")]

# Test machines are shared and small: a slow example is not a failure. New examples are looked for by `make fuzz`.
settings.register_profile(
    "anybit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True,
    derandomize=os.environ.get("ANYBIT_EXHAUSTIVE") != "1",
)  # fmt: skip
settings.load_profile("anybit")

CACHE = Path(os.environ.get("ANYBIT_CACHE", Path(__file__).parent.parent / ".cache"))
"""Where ``make`` puts models and texts."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in 16-bit floats, as ``make`` prepares it."""
    folder = CACHE / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is absent: make fetches it")
    return folder


@pytest.fixture(scope="session")
def wikipedia() -> Path:
    """The Wikipedia sample as plain text, as ``make`` prepares it."""
    file = CACHE / "wikipedia.txt"
    if not file.is_file():
        pytest.skip(f"{file} is absent: make fetches it")
    return file


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of tiny models by architecture: ``cases_folders.Sources``."""
    from cases_folders import Sources

    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def llama(sources: Any) -> Path:
    return sources["llama"]


TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer."""
    import torch
    import transformers

    from cases_models import save_byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    size = save_byte_tokenizer(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command: (exit code, stdout, stderr in one line)."""
    from anybit import cli

    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["anybit", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code = stop.value.code
        captured = capfd.readouterr()
        return int(code or 0), captured.out, " ".join(captured.err.split())

    return command


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Every fixture and every test draws the same random numbers in each run, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        import numpy
        import torch

        numpy.random.seed(0)
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    pytest_fixture_setup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's name says what its tests need: ``_gpu`` a GPU, ``_emulated`` the emulator."""
    for item in items:
        if item.path.stem.endswith("_emulated"):
            item.add_marker("emulate")
        if item.path.stem.endswith("_gpu"):
            import torch

            item.add_marker("gpu")
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
