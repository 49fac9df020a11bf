"""The search with a runner that needs no GPU: times are made up, and some candidates fail."""

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from anybit.choose import policy as policies
from anybit.choose.builtin import builtin
from anybit.choose.choose import Map
from anybit.choose.families import Candidate
from anybit.choose.policy import Policy, read
from anybit.choose.space import preserves_pdl_overlap, space
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.linear_problem import LinearProblem
from anybit.tune import search as searching
from anybit.tune.processes import Worker
from anybit.tune.search import Options, candidates_of, excluded_name, point_of, search
from anybit.tune.worker import Time, TimingBudget, WrongResultError, finalists
from cases_tune import product

H200 = Device.named("sm_90a")
NONE = Map([])


def made_up_us(candidate: Candidate) -> float:
    """A time determined by a config's name."""
    return 5 + sum(candidate.name.encode()) % 97 / 10


class FakeBench:
    def __init__(self, runner: "FakeRunner", product: LinearProblem) -> None:
        self.runner, self.product = runner, product

    def check(self, candidate: Candidate) -> None:
        what = self.runner.troubles.get(excluded_name(self.product, candidate))
        if what == "crash":
            os._exit(139)
        if what == "hang":
            time.sleep(60)
        if what == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        if what == "wrong":
            raise WrongResultError("its mean relative error is 1.0")
        if what == "fault":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    def times(
        self, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget, guess_us: float
    ) -> list[Time]:
        for candidate in candidates:
            if self.runner.troubles.get(excluded_name(self.product, candidate)) == "crash while timed":
                os._exit(1)
        us = [made_up_us(candidate) for candidate in candidates]
        last = finalists([candidate.strategy for candidate in candidates], us, keep, effort)
        return [Time(value, i in last) for i, value in enumerate(us)]


class FakeRunner:
    troubles: ClassVar[dict[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        return {"device": H200, "driver": "1.2", "torch": "0"}

    def prepare(self, product: LinearProblem) -> FakeBench:
        if self.troubles.get(str(product)) == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        return FakeBench(self, product)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "compile_one", _compiled)
    monkeypatch.setattr(FakeRunner, "troubles", {})


def _compiled(kernel: Any, arch: str) -> str | None:
    return None


def run(products: list[LinearProblem], path: Path | None, **options: Any) -> Policy:
    return search(products, path, Options(**{"each": 3, "jobs": 1, "limit": 1.0, **options}), factory=FakeRunner)


def test_a_time_of_few_tokens_below_its_bound_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.tune.search.floor_us", lambda product: 1e9)
    found = run([product(m=1), product(m=64)], tmp_path / "map.json")
    assert [list(points) for points in found.layers.values()] == [[64]]


def test_the_best_of_every_strategy_is_found(tmp_path: Path) -> None:
    wanted = [product(m=m) for m in (1, 64)]
    found = run(wanted, tmp_path / "map.json")
    assert found.points == 2
    for one in wanted:
        # A search has no candidates that keep the next layer's kernels from starting (preserves_pdl_overlap).
        candidates = [
            c for c in candidates_of(one, NONE, Options(each=3)) if preserves_pdl_overlap(one, c, builtin(one))
        ]
        point = found.exact(one)
        assert point is not None
        assert set(point.strategies) == {"bitwise", "padding to int8"}
        best = min(made_up_us(c) for c in candidates)
        assert min(m.us for m in point.strategies.values()) <= best * 1.01 + 1e-3
        assert point.default_us == pytest.approx(made_up_us(builtin(one)), abs=1e-3)
        assert min(m.us for m in point.strategies.values()) <= point.default_us
    assert policies.text(read(tmp_path / "map.json")) == policies.text(found)


@pytest.mark.parametrize("trouble", ["crash", "hang", "wrong", "fault", "crash while timed"])
def test_a_candidate_that_misbehaves_is_excluded_by_name(trouble: str, tmp_path: Path) -> None:
    one = product(m=64)
    bad = excluded_name(one, candidates_of(one, NONE, Options(each=3))[2])
    FakeRunner.troubles = {bad: trouble}
    found = run([one, product(m=96)], tmp_path / "map.json")
    assert list(found.excluded) == [bad]
    said = {"hang": "hung", "wrong": "relative error", "fault": "illegal memory access"}.get(trouble, "crashed")
    assert said in found.excluded[bad]
    assert found.points == 2
    assert read(tmp_path / "map.json").excluded == found.excluded


@pytest.mark.parametrize("who", ["candidate", "built in", "product"])
def test_what_finds_no_memory_is_not_excluded_and_tried_again(who: str, tmp_path: Path) -> None:
    """Another program may have used it."""
    one = product(m=64)
    tried = candidates_of(one, NONE, Options(each=3))
    bad = {"candidate": excluded_name(one, tried[-1]), "built in": excluded_name(one, tried[0]), "product": str(one)}[
        who
    ]
    FakeRunner.troubles = {bad: "no memory"}
    with pytest.warns(UserWarning, match="out of GPU memory"):
        found = run([one, product(m=96)], tmp_path / "map.json")
    assert not found.excluded
    known = {m for points in found.layers.values() for m in points}
    assert known == ({64, 96} if who == "candidate" else {96})
    FakeRunner.troubles = {}
    assert run([one, product(m=96)], tmp_path / "map.json").points == 2


def test_a_search_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    run([product(m=m) for m in (1, 2)], path)
    seen: list[str] = []
    found = search(
        [product(m=m) for m in (1, 2, 4)],
        path,
        Options(each=2, jobs=1),
        report=lambda text, *_: seen.append(text),
        factory=FakeRunner,
    )
    assert seen == [str(product(m=4))]
    assert found.points == read(path).points == 3


def test_no_product_is_begun_after_its_time(tmp_path: Path) -> None:
    assert run([product(m=1)], tmp_path / "map.json", seconds=-1.0).points == 0


def test_a_kernel_that_does_not_compile_is_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = product(m=1)
    refused = candidates_of(one, NONE, Options(each=3))[1]
    *_, multiplies = refused.kernels(one)
    monkeypatch.setattr(searching, "compile_one", _Refusing({multiplies.config}))
    found = run([one], None)
    assert any("does not compile" in reason for reason in found.excluded.values())
    assert found.points == 1


class _Refusing:
    def __init__(self, configs: set[Any]) -> None:
        self.configs = configs

    def __call__(self, kernel: Any, arch: str) -> str | None:
        return "it does not compile: no" if kernel.config in self.configs else None


def test_hints_of_a_foreign_map_are_tried_first(tmp_path: Path) -> None:
    one = product(m=16)
    own = run([one], None)
    own.origin = replace(own.origin, gpu="NVIDIA H100")
    hints = candidates_of(product(m=12), Map([own]), Options(each=0))
    winners = {measured.candidate(product(m=12)).name for measured in own.exact(one).strategies.values()}  # type: ignore[union-attr]
    assert winners <= {candidate.name for candidate in hints}


def test_successive_halving_keeps_built_in_choices_and_drops_hopeless_strategies() -> None:
    names = ["a", "a", "a", "b", "b"]
    assert finalists(names, [10, 11, 30, 14, 15], [2], TimingBudget()) == [0, 1, 2, 3, 4]
    assert finalists(names, [10, 11, 30, 21, 22], [2], TimingBudget()) == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert finalists(["a"], [1.0], [], TimingBudget()) == [0]
    many = [10 + 0.01 * i for i in range(20)]
    assert finalists(["a"] * 20, many, [19], TimingBudget()) == [*range(10), 19]


def _search_into(path: Path, tokens: Sequence[int]) -> None:
    run([product(m=m) for m in tokens], path)


def test_two_searches_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_search_into, args=(path, tokens)) for tokens in ((1, 4, 16, 64), (2, 8, 32))]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    found = read(path)
    assert sorted(found.layers["w4a8", "float16", 4096, 4096]) == [1, 2, 4, 8, 16, 32, 64]


class DyingBench(FakeBench):
    """A bench whose process dies shortly after its answer, as by an asynchronous fault."""

    def times(self, *arguments: Any) -> list[Time]:
        found = super().times(*arguments)
        threading.Timer(0.05, lambda: os._exit(1)).start()
        return found


class DyingRunner(FakeRunner):
    def prepare(self, product: LinearProblem) -> FakeBench:
        return DyingBench(self, product)


class SlowRunner(FakeRunner):
    def __init__(self) -> None:
        time.sleep(30)


def test_a_child_that_dies_between_two_jobs_is_begun_anew() -> None:
    products = [product(m=m) for m in (1, 2, 4)]
    options = Options(each=1, jobs=1, limit=1.0)
    found = search(products, None, options, factory=DyingRunner, report=lambda *_: time.sleep(0.3))
    assert found.points == len(products)


def test_a_child_that_never_begins_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Worker.start
    monkeypatch.setattr(Worker, "start", lambda self: start(self, limit=0.5))
    before = set(multiprocessing.active_children())
    with pytest.raises(KernelError, match="could not start"):
        search([product(m=1)], None, Options(each=1, jobs=1), factory=SlowRunner)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(
    ("m", "built_in", "us", "own"),
    [
        (2, 10.0, 9.6, True),
        (2, 10.0, 9.4, False),
        (8, 10.0, 9.6, True),
        (16, 10.0, 9.6, False),
        (2, 40.0, 39.1, True),
        (2, 40.0, 38.9, False),
    ],
)
def test_few_tokens_leave_the_built_in_config_for_a_clear_gain_alone(m, built_in, us, own) -> None:
    """A chain of one product is off by up to a microsecond from its time in a step, however long it is."""
    here = product("w4a8", m)
    rooms = (c for c in space(here).candidates if c.kernel == builtin(here).kernel and c != builtin(here))
    other = next(c for c in rooms if preserves_pdl_overlap(here, c, builtin(here)))
    found = point_of(here, [builtin(here)], [(builtin(here), Time(built_in, True)), (other, Time(us, True))])
    assert found is not None and found.default_us == built_in
    assert found.strategies["padding to int8"].candidate(here) == (builtin(here) if own else other)
