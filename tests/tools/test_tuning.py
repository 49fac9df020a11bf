"""Replays of rows, and what the yardstick of the chooser counts."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from anybit.choose.policy import Origin

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of tools/tuning."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "tuning"))
    return importlib.import_module


def test_judge_scores_a_row_by_name_by_frozen_times_or_not_at_all(tool: Any, tmp_path: Path) -> None:
    names = {"map": "a(tile_m=16)", "tuned": "a(tile_m=16)", "built in": "a(tile_m=32)"}
    row = {"seed": 1, "scheme": "w4a8", "m": 3, "n": 64, "k": 64, "best": "a(tile_m=64)", "chosen": names}
    row["ratios"] = {"map": 1.1, "tuned": 1.1, "built in": 1.5}
    frozen = {"defaults": {"a": {"stages": 4}}, "configs": ["a(tile_m=8)", "a(tile_m=24)"]}
    frozen["problems"] = [[1, "w4a8", 3, 64, 64, [0, 1200], [1, 1050]]]
    path = tmp_path / "judge.json"
    path.write_text(json.dumps(frozen))
    judge = tool("check_policy").Judge(path)
    assert judge.ratio(row, "a(tile_m=64, stages=4)") == (1.0, "named"), "a field at its frozen default is left out"
    assert judge.ratio(row, "a(tile_m=8)") == (1.2, "map times")
    assert judge.ratio(row, "a(tile_m=24)") == (1.05, "estimate")
    assert judge.ratio(row, "a(tile_m=8, stages=5)") == (1.5, "unscored")
    assert judge.ratio(row | {"seed": 2}, "a(tile_m=8)") == (1.5, "unscored")


def test_without_own_leaves_out_a_shape_in_every_scheme(tool: Any) -> None:
    check = tool("check_policy")
    policy = check.Policy(Origin("NVIDIA H200", "sm_90a"))
    policy.layers = {(scheme, "float16", n, 64): {1: None} for scheme in ("w4a8", "w2a2") for n in (64, 128)}
    assert {key[2] for key in check.without(policy, 64, 64).layers} == {128}


def test_only_what_decides_counts(tool: Any, tmp_path: Path) -> None:
    module = tmp_path / "kernel.py"
    module.write_text(
        "_AHEAD = 3\nOTHER = 4\n\n\ndef why_not():\n    return 5\n\n\ndef default():\n    return 6, 7.5, True\n"
    )
    assert tool("count_chooser").counted(module) == (3, 3)


def test_chooser_stays_small(tool: Any) -> None:
    count = tool("count_chooser")
    found = [count.counted(path) for path in count.files()]
    lines, literals = (sum(one) for one in zip(*found, strict=True))
    assert lines <= count.MOST_LINES and literals <= count.MOST_LITERALS
