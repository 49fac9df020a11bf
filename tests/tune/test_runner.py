"""What a search makes of times; the timing itself needs a GPU (tests/gpu/test_tune.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anybit.tune import runner
from anybit.tune.runner import Bench


def bench(us: dict[str, float], log: list[str], company: Sequence[tuple[Any, Any]] = (), anchor: Any = None) -> Any:
    """One whose candidates are names; a call writes its name down."""

    def again(name: str) -> Callable[[int], object]:
        return lambda i: log.append(name)

    made: Any = object.__new__(Bench)
    made.stream, made.company, made.anchor, made.again = None, company, anchor, again
    return made


def test_times_in_company_are_what_the_chain_takes_beside_the_built_in_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    us, log = {"own": 5.0, "quick": 4.0, "deep": 4.5, "next": 8.0}, []

    def race(stream: Any, calls: Sequence[Callable[[int], object]], counts: Sequence[int], replays: int) -> list[float]:
        found = []
        for call in calls:
            log.clear()
            call(0)
            # Alone nothing waits; among others a deep ring keeps the next one waiting, and chains start late.
            waits = 2.0 * (log == ["deep", "next"]) + 3.0 * (len(log) > 1)
            found.append(sum(us[name] for name in log) + waits)
        return found

    monkeypatch.setattr(runner, "_race", race)
    other = bench(us, log)
    made = bench(us, log, [(other, "next")], "own")
    calls = [made.again(name) for name in ("own", "quick", "deep")]
    assert made._race(calls, [4, 4, 4], 2) == pytest.approx([5.0, 4.0, 6.5])
    assert bench(us, log)._race(calls, [4, 4, 4], 2) == pytest.approx([5.0, 4.0, 4.5])
    us["quick"] = -9.0
    assert made._race(calls, [4, 4, 4], 2)[1] == pytest.approx(1.5)  # no call takes nothing
    assert made._count(60.0, 2.0) == 6
    assert bench(us, log)._count(60.0, 2.0) == 16


def test_the_careful_round_in_company_does_not_depend_on_where_a_call_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    us, orders = {"a": 5.0, "b": 4.8, "c": 5.2, "d": 5.1}, []

    def race(self: Any, calls: Sequence[Callable[[int], object]], counts: Sequence[int], replays: int) -> list[float]:
        order = [call(0) for call in calls]
        orders.append((order, list(counts), replays))
        return [us[name] + 0.5 * (place == 0) for place, name in enumerate(order)]  # the first is slow, whoever it is

    monkeypatch.setattr(Bench, "_race", race)
    calls: Any = [lambda i, name=name: name for name in us]
    made = bench(us, [], [(None, "next")], "a")
    assert made._carefully(calls, [1, 2, 3, 4], 5) == pytest.approx(list(us.values()))
    assert [set(order) for order, _, _ in orders] == [set(us)] * 3
    assert all(counts == [list(us).index(name) + 1 for name in order] for order, counts, _ in orders)
    assert bench(us, [])._carefully(calls, [1, 2, 3, 4], 5)[0] == 5.5  # alone once, as it stands
