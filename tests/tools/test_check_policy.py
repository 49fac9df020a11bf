"""Whole spaces on a bench without a GPU, and replays of rows."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from anybit.tune import worker

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "tuning"))
    return importlib.import_module("check_policy")


@pytest.fixture
def bench(check: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench whose candidates are their time, with half of it as their bound; odd ones beyond 100 are wrong."""

    def race(stream: Any, calls: Sequence[Callable[[int], Any]], counts: Sequence[int], replays: int) -> list[float]:
        assert calls, "an empty graph was captured"
        return [float(call(0)) for call in calls]

    def wrong(self: Any, candidate: int) -> None:
        found.checked.append(candidate)
        if candidate > 100 and candidate % 2:
            raise worker.WrongResultError("its mean relative error is 1.0")

    monkeypatch.setattr(worker, "race", race)
    monkeypatch.setattr(worker.Bench, "check", wrong)
    monkeypatch.setattr(check, "lower_bound_us", lambda product, candidate: candidate * found.bound)
    found = object.__new__(check.SpaceBench)
    found.stream, found.product, found.checked, found.bound = None, None, [], 0.0
    found.again = lambda candidate: lambda i: candidate
    return found


def test_a_whole_space_is_timed_in_three_rounds(check: Any, bench: Any) -> None:
    us = [*range(1000, 1400, 4), 2000]
    times = bench.times(us, [len(us) - 1], check.StagedPruning(finalists=3), 10.0)
    assert [time.us for time in times] == us
    assert [i for i, time in enumerate(times) if time.final] == [0, 1, 2, len(us) - 1]
    assert bench.checked == [2000, 1000, 1004, 1008], "only finalists, and what is kept"


def test_what_cannot_be_the_best_is_not_run(check: Any, bench: Any) -> None:
    bench.bound = 1.0
    times = bench.times([200] * 48 + [300] * 60, [], check.StagedPruning(), 10.0)
    assert sum(time.us == float("inf") for time in times) == 60


def test_what_is_wrong_is_no_finalist(check: Any, bench: Any) -> None:
    times = bench.times([201, 202, 204], [], check.StagedPruning(), 10.0)
    assert [time.final for time in times] == [False, True, True]


def test_a_check_that_was_broken_off_goes_on(check: Any, tmp_path: Path) -> None:
    marks, path = {"gpu": "one", "commit": "a"}, tmp_path / "rows.json"
    assert check.rows_of(path, 1, marks) == []
    row = {"seed": 1, **marks}
    path.write_text(json.dumps([row, row | {"seed": 2}, row | {"commit": "b"}]))
    assert check.rows_of(path, 1, marks) == [row]


def test_judge_scores_a_row_by_name_by_frozen_times_or_not_at_all(check: Any, tmp_path: Path) -> None:
    names = {"map": "a(tile_m=16)", "tuned": "a(tile_m=16)", "built in": "a(tile_m=32)"}
    row = {"seed": 1, "scheme": "w4a8", "m": 3, "n": 64, "k": 64, "best": "a(tile_m=64)", "chosen": names}
    row["ratios"] = {"map": 1.1, "tuned": 1.1, "built in": 1.5}
    frozen = {"defaults": {"a": {"stages": 4}}, "configs": ["a(tile_m=8)", "a(tile_m=24)"]}
    frozen["problems"] = [[1, "w4a8", 3, 64, 64, [0, 1200], [1, 1050]]]
    path = tmp_path / "judge.json"
    path.write_text(json.dumps(frozen))
    judge = check.Judge(path)
    assert judge.ratio(row, "a(tile_m=64, stages=4)") == (1.0, "named"), "a field at its frozen default is left out"
    assert judge.ratio(row, "a(tile_m=8)") == (1.2, "map times")
    assert judge.ratio(row, "a(tile_m=24)") == (1.05, "estimate")
    assert judge.ratio(row, "a(tile_m=8, stages=5)") == (1.5, "unscored")
    assert judge.ratio(row | {"seed": 2}, "a(tile_m=8)") == (1.5, "unscored")


def test_without_own_leaves_out_a_shape_in_every_scheme(check: Any) -> None:
    policy = check.Policy(check.Origin("NVIDIA H200", "sm_90a"))
    policy.layers = {(scheme, "float16", n, 64): {1: None} for scheme in ("w4a8", "w2a2") for n in (64, 128)}
    assert {key[2] for key in check.without(policy, 64, 64).layers} == {128}
