"""Shared by all tests: import paths of cases and helpers, settings, and the model that make fetches."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# cases and kernels, the emulator (import emulate), the checks of machine code (from machine_code import check)
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("", "emulate", "compile")]

# Test machines are shared and small: a slow example is not a failure.
settings.register_profile("anybit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
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
