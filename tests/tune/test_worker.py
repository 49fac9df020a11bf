"""How a search evaluates times; the timing itself needs a GPU (tests/gpu/test_tune.py)."""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from anybit import jit
from anybit.choose.space import space
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.scheme import Scheme, WeightFormat
from anybit.tune import worker
from cases import random_weight


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_calls_and_more_stand_first_as_often(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(stream: Any, calls: Sequence[Callable[[int], Any]], *_: Any) -> list[float]:
        return [5.0 + 0.5 * (place == 0) for place, _ in enumerate(calls)]

    monkeypatch.setattr(worker, "race", race)
    calls: Any = [lambda i: None] * count
    found = worker.race_in_orders(None, calls, [1] * count, 5)  # type: ignore[arg-type]
    assert found == pytest.approx([found[0]] * count)


@pytest.mark.parametrize(("us", "orders"), [(5.0, 3), (50.0, 3), (70.0, 1)])
def test_what_short_calls_take_does_not_depend_on_where_they_stand(
    us: float, orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, seen = {"a": us, "b": us - 0.2, "c": us + 0.2, "d": us + 0.1}, []

    def race(stream: Any, calls: Sequence[Callable[[int], Any]], counts: Sequence[int], replays: int) -> list[float]:
        order = [call(0) for call in calls]
        seen.append((order, list(counts), replays))
        return [times[name] + 0.5 * (place == 0) for place, name in enumerate(order)]  # the first is slow

    monkeypatch.setattr(worker, "race", race)
    calls: Any = [lambda i, name=name: name for name in times]
    found = worker.race_in_orders(None, calls, [1, 2, 3, 4], 5)  # type: ignore[arg-type]
    assert found[1:] == pytest.approx(list(times.values())[1:])
    assert found[0] == pytest.approx(us if orders == 3 else us + 0.5)
    assert [set(order) for order, _, _ in seen] == [set(times)] * orders
    assert all(counts == [list(times).index(name) + 1 for name in order] for order, counts, _ in seen)
    assert all(replays == 5 for *_, replays in seen)


class _FakeLauncher:
    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, params: Any, grid: Any) -> None:
        pass

    def last(self) -> bytes:
        return bytes(8)


def test_a_recorded_launch_keeps_the_memory_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """marlin's sums and locks have no other owner: relaunched, it waited on others' writes."""
    scratch, made = sm80_packed_gemm.scratch, []

    def watched(*arguments: Any) -> tuple[torch.Tensor, ...]:
        found = scratch(*arguments)
        made.extend(weakref.ref(one) for one in found if one is not None)
        return found

    monkeypatch.setattr(sm80_packed_gemm, "scratch", watched)
    monkeypatch.setattr(sys.modules["anybit.jit.launch"], "Launcher", _FakeLauncher)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("sm_80")))
    weight = packed_tiles.prepare(random_weight(64, 128, WeightFormat(4, "sym", 128)))
    x, y = torch.zeros(4, 128, dtype=torch.half), torch.empty(4, 64, dtype=torch.half)
    tape = jit.record(lambda: sm80_packed_gemm.launch(weight, x, y))
    moved = [launch.moved(0, 1) for launch in tape]
    gc.collect()
    assert made and all(one() is not None for one in made)
    del tape
    gc.collect()
    assert all(one() is not None for one in made), "those that were moved keep it, too"
    del moved
    gc.collect()
    assert all(one() is None for one in made)


def test_candidates_of_marlin_share_one_set_of_sums_and_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to keep its own, some 10 GB for one product with many tokens."""
    device, scheme = Device.named("sm_80"), Scheme.parse("w4a8")
    monkeypatch.setattr(sys.modules["anybit.jit.launch"], "Launcher", _FakeLauncher)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: device))
    rooms: list[Any] = []
    launch = sm80_packed_gemm.launch
    monkeypatch.setattr(sm80_packed_gemm, "launch", lambda *a, **more: rooms.append(more["room"]) or launch(*a, **more))
    product = LinearProblem(16, 192, 256, scheme.weights, scheme.activations, device=device)
    layer = worker.Layer.random(192, 256, scheme.weights, torch.device("cpu"))
    bench = worker.Bench(product, layer, None)  # type: ignore[arg-type]
    candidates = [one for one in space(product).candidates if one.kernel == "sm80_packed_gemm"][:12]
    for one in candidates:
        bench._record(one)
        needed = sm80_packed_gemm.scratch(product, one.config, torch.device("cpu"))
        assert all(given.numel() >= least.numel() for given, least in zip(rooms[-1], needed, strict=True))
    assert len(candidates) == 12 and len({id(room) for room in rooms}) == 1
