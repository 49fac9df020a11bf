"""How a search evaluates times; the timing itself needs a GPU (tests/tune/test_tune_gpu.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from anybit.choose.space import space
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.scheme import Scheme
from anybit.tune import worker
from cases_launches import install


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_calls_and_more_stand_first_as_often(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(stream: Any, calls: Sequence[Callable[[int], Any]], *_: Any) -> list[float]:
        return [5.0 + 0.5 * (place == 0) for place, _ in enumerate(calls)]

    monkeypatch.setattr(worker, "race", race)
    calls: Any = [lambda i: None] * count
    found = worker.race_in_orders(None, calls, [1] * count, 5)  # type: ignore[arg-type]
    assert found == pytest.approx([found[0]] * count)


@pytest.mark.parametrize(("us", "orders"), [(5.0, 3), (50.0, 3), (70.0, 1)])
def test_what_short_calls_take_does_not_depend_on_where_they_stand(us, orders, monkeypatch) -> None:
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


def bench_of(scheme: str, m: int) -> worker.Bench:
    parsed = Scheme.parse(scheme)
    product = LinearProblem(m, 192, 256, parsed.weights, parsed.activations, device=Device.named("sm_80"))
    layer = worker.Layer.random(192, 256, parsed.weights, torch.device("cpu"))
    return worker.Bench(product, layer, None)  # type: ignore[arg-type]


def test_a_candidate_runs_on_every_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, bench = install(monkeypatch, "sm_80"), bench_of("w4a8", 16)
    for one in (
        next(one for one in space(bench.product).candidates if one.kernel == name)
        for name in ("sm80_packed_gemm", "sm80_bitplane_gemm")
    ):
        call = bench.again(one)
        copies = bench.layer.copies[one.layout]
        for i in (0, 1, len(copies)):
            call(i)
            quantize, gemm = driver.take()
            assert quantize.kernel.entry == "quantize" and gemm.kernel.entry.startswith(one.kernel)
            read = gemm.values["tiles" if "packed" in one.kernel else "weights"]
            assert read == copies[i % len(copies)].pointers[0].data_ptr()
            assert gemm.values["y"] == bench.y.data_ptr()


def test_candidates_of_marlin_share_one_set_of_sums_and_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to keep its own, some 10 GB for one product with many tokens. A plan keeps them alive."""
    install(monkeypatch, "sm_80")
    bench = bench_of("w4a8", 16)
    candidates = [one for one in space(bench.product).candidates if one.kernel == "sm80_packed_gemm"][:12]
    rooms = []
    for one in candidates:
        params: Any = bench.plan(one).launches[-1].params
        needed = sm80_packed_gemm.scratch_bytes(bench.product, one.config)
        given = params.partial, params.locks
        assert all(room.numel() >= least for room, least in zip(given, needed, strict=True))
        rooms.append(given)
    assert len(candidates) == 12 and len({id(room) for given in rooms for room in given}) == 2
