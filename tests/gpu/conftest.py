"""Compiles kernels of the collected tests in parallel, before the first of them runs (see precompile.py)."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch


def pytest_collection_finish(session: pytest.Session) -> None:
    """A few selected tests compile for themselves, as xdist's workers do; whole files are worth the pool."""
    if hasattr(session.config, "workerinput"):
        return
    files = Counter(
        item.module.__name__
        for item in session.items
        if isinstance(item, pytest.Function) and hasattr(item.module, "kernels_used")
    )
    names = [name for name, count in files.items() if count > 5]
    if names and torch.cuda.is_available() and not session.config.option.collectonly:
        subprocess.run([sys.executable, str(Path(__file__).parent / "precompile.py"), *names], check=False)
