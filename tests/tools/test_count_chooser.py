"""What the yardstick of the chooser counts."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "tuning"))
    return importlib.import_module("count_chooser")


def test_only_what_decides_counts(count: Any, tmp_path: Path) -> None:
    module = tmp_path / "kernel.py"
    module.write_text(
        "_AHEAD = 3\nOTHER = 4\n\n\ndef why_not():\n    return 5\n\n\ndef default():\n    return 6, 7.5, True\n"
    )
    assert count.counted(module) == (3, 3)


def test_chooser_stays_small(count: Any) -> None:
    found = [count.counted(path) for path in count.files()]
    lines, literals = (sum(one) for one in zip(*found, strict=True))
    assert lines <= count.MOST_LINES and literals <= count.MOST_LITERALS
