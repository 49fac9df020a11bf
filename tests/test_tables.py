"""The tables in README.md and docs/ are those of the rows in benchmarks/results: nobody types them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_tables_are_those_of_the_rows() -> None:
    script = BENCHMARKS / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python benchmarks/tables.py"


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results" / "h200").glob("*.json")), ids=lambda path: path.stem)
def test_every_time_is_of_a_result_that_was_checked(path: Path) -> None:
    for row in json.loads(path.read_text()):
        if "us" in row or "ms" in row:
            assert row["checked"] is True or (row["checked"] is False and row["ablation"]), row


@pytest.mark.parametrize("checked", [None, False, "failed", "as its neighbours", 1])
def test_a_result_that_was_not_checked_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import timing

    good = {"case": "a", "us": 1.0, "checked": True}
    left_out = {"case": "b", "us": 1.0, "checked": False, "ablation": "softmax is left out"}
    timing.merge_rows(tmp_path / "rows.json", [good, left_out], ("case",))
    before = (tmp_path / "rows.json").read_text()
    with pytest.raises(ValueError, match=r"a: checked is .*, and only a checked result is written down"):
        timing.merge_rows(tmp_path / "rows.json", [{"case": "a", "us": 0.5, "checked": checked}], ("case",))
    assert (tmp_path / "rows.json").read_text() == before
