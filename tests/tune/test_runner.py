"""What a search makes of times; the timing itself needs a GPU (tests/gpu/test_tune.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anybit.tune import runner


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_calls_and_more_stand_first_as_often(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(stream: Any, calls: Sequence[Callable[[int], Any]], *_: Any) -> list[float]:
        return [5.0 + 0.5 * (place == 0) for place, _ in enumerate(calls)]

    monkeypatch.setattr(runner, "_race", race)
    calls: Any = [lambda i: None] * count
    found = runner._carefully(None, calls, [1] * count, 5)  # type: ignore[arg-type]
    assert found == pytest.approx([found[0]] * count)


@pytest.mark.parametrize(("us", "orders"), [(5.0, 3), (50.0, 1)])
def test_what_short_calls_take_does_not_depend_on_where_they_stand(
    us: float, orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, seen = {"a": us, "b": us - 0.2, "c": us + 0.2, "d": us + 0.1}, []

    def race(stream: Any, calls: Sequence[Callable[[int], Any]], counts: Sequence[int], replays: int) -> list[float]:
        order = [call(0) for call in calls]
        seen.append((order, list(counts), replays))
        return [times[name] + 0.5 * (place == 0) for place, name in enumerate(order)]  # the first is slow

    monkeypatch.setattr(runner, "_race", race)
    calls: Any = [lambda i, name=name: name for name in times]
    found = runner._carefully(None, calls, [1, 2, 3, 4], 5)  # type: ignore[arg-type]
    assert found[1:] == pytest.approx(list(times.values())[1:])
    assert found[0] == pytest.approx(us if orders == 3 else us + 0.5)
    assert [set(order) for order, _, _ in seen] == [set(times)] * orders
    assert all(counts == [list(times).index(name) + 1 for name in order] for order, counts, _ in seen)
    assert all(replays == 5 for *_, replays in seen)
