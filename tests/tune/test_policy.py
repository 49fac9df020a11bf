"""Config spaces, and maps on disk: what is followed, what is only a hint, what is ignored with a message."""

import contextlib
import json
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.choose import dispatch as dispatching
from anybit.choose import policy as policies
from anybit.choose.builtin import bucket, builtin, step
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import FAMILIES, KernelFamily
from anybit.choose.policy import SHIPPED, Measured, Point, PolicyError, read, save, usable
from anybit.choose.registry import GRID, STEPS
from anybit.choose.space import promising, space, why_not_split
from anybit.device import Device
from anybit.errors import KernelError
from cases_tune import point, policy, product

H200 = Device.named("sm_90a")


# -------- spaces


@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a8", "w2a4", "w3a4bipolar-xasym", "w8a8", "w4a8fp", "w1a1"])
@pytest.mark.parametrize("m", [1, 12, 64, 1024])
def test_a_space_is_what_why_not_leaves(scheme: str, m: int) -> None:
    one = product(scheme, m)
    whole = space(one)
    assert whole.candidates
    for candidate in whole.candidates[:: max(1, len(whole.candidates) // 40)]:
        assert candidate.why_not(one) is None
        rebuilt = Measured.of(candidate, 1.0).candidate(one)
        assert rebuilt == candidate
    assert builtin(one) in promising(one, 2)
    split = next(e for e in whole.excluded if e.strategy == "split")
    assert "emulated" in split.reason or "16-bit floats" in split.reason or "8-bit floats" in split.reason


def test_split_is_a_strategy_where_int4_tensor_cores_exist() -> None:
    one = product(m=32, device=Device.named("sm_80"))
    strategies = {candidate.strategy for candidate in space(one).candidates}
    assert {"split", "bitwise", "padding to int8"} <= strategies
    for other, reason in (
        (product("w4a16g128"), "16-bit floats"),
        (product("w8a8"), "emulated on the integer units of sm_90a"),
        (product("w4a4", device=Device.named("sm_80")), "nothing to split"),
        (product("w4a8s24", device=Device.named("sm_80")), "2:4 sparse"),
        (product("w4a16g32e2m1"), "not integers"),
    ):
        assert reason in str(why_not_split(other))
    assert why_not_split(one) is None


def test_space_keeps_the_activations() -> None:
    one = product("w4a16g128", 1024)
    assert {c.activations.bits for c in space(one).candidates} == {16}
    assert any("which changes results" in e.reason for e in space(one).excluded)


def test_buckets() -> None:
    assert [bucket(m) for m in (1, 3, 5, 7, 9, 13, 17, 4097, 8192, 8193, 20000)] == [
        1, 3, 6, 8, 12, 16, 24, 5120, 8192, 16384, 32768,
    ]  # fmt: skip
    assert len(GRID) == 26 + 14
    assert [bucket(m) for m in (64, 65, 81, 97, 113, 1100, 7169)] == [64, 80, 96, 112, 128, 1280, 8192]


def test_plans_are_made_for_token_counts_within_three_percent() -> None:
    assert [step(m) for m in (1, 5, 13, 17, 21, 25, 35, 64, 65, 130, 1038, 2198, 8192, 9000)] == [
        1, 6, 16, 18, 22, 28, 40, 64, 66, 132, 1056, 2240, 8192, 16384,
    ]  # fmt: skip
    assert set(GRID) <= set(STEPS) and len(STEPS) == 18 + 7 * 32


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_search_chooses_no_fact_of_the_problem(family: KernelFamily) -> None:
    """A map's configs apply to every problem: other dtypes, widths or codes have the same choices."""
    for scheme in ("w4a8", "w2a16g128", "w4a16g128", "w2a2"):
        few, other = product(scheme, 4), product(scheme, 4, n=4088, k=4088, dtype=torch.bfloat16)
        if family.configs(few) and family.configs(other):
            base = family.default(few)
            assert family.why_not(other, family.rebuild(other, family.fields(base))) is None
            return


# -------- files


def test_a_map_survives_the_disk(tmp_path: Path) -> None:
    one = product()
    times = point(one, {"sm90_bitplane_skinny": 9.5, "sm90_packed_gemm": 8.25})
    written = policy((one, times), (replace(one, m=8), Point(7.5)))
    written.excluded = {"w4a8 sm90_packed_gemm(tokens=16)": "it hung for 20 s"}
    save(written, tmp_path / "map.json")
    found = read(tmp_path / "map.json")
    assert found.layers == written.layers
    assert found.excluded == written.excluded
    assert found.origin == written.origin
    content = json.loads((tmp_path / "map.json").read_text())
    assert content["measured"]["gpu"] == "NVIDIA H200"
    assert content["layers"][0]["tokens"]["16"]["padding to int8"]["us"] == 8.25
    assert content["layers"][0]["built_in"] == {"8": 7.5}


def _spoiled(text: str) -> dict[str, str]:
    content = json.loads(text)
    spoiled = {"truncated": text[: len(text) // 2], "empty": "", "binary": "\0\1", "list": "[]", "number": "3"}
    spoiled["deep"] = "[" * 200_000
    for name, change in {
        "another format": {"format": "anybit policy map 99"},
        "no origin": {"measured": None},
        "config of objects": {"configs": {"bitwise/1": {"tokens": {}}}},
        "no layers": {"layers": {"x": 1}},
        "part of a row": {"layers": [content["layers"][0] | {"n": 576.7}]},
        "endless rows": {"layers": [content["layers"][0] | {"n": 10**400}]},
        "odd dtype": {"layers": [content["layers"][0] | {"dtype": "float61"}]},
    }.items():
        spoiled[name] = json.dumps(content | change)
    for name, (field, value) in {
        "negative time": ("us", -1.0),
        "time is a word": ("us", "fast"),
        "time is infinite": ("us", float("inf")),
        "time beyond all floats": ("us", 10**400),
        "missing config": ("config", "sm90_packed_gemm/77"),
    }.items():
        broken = json.loads(text)
        broken["layers"][0]["tokens"]["16"]["padding to int8"][field] = value
        spoiled[name] = json.dumps(broken)
    return spoiled


def test_a_file_that_is_no_map_is_named_and_ignored(tmp_path: Path) -> None:
    one = product()
    whole = policies.text(policy((one, point(one, {"sm90_packed_gemm": 8.25}))))
    for name, text in _spoiled(whole).items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        with pytest.raises(PolicyError, match=r"map"):
            read(path)
        with pytest.warns(UserWarning, match=f"{name}.json.*ignored"):
            assert usable(path) is None
        with pytest.warns(UserWarning, match="ignored"):  # and is replaced by what is measured
            save(policy((one, point(one, {"sm90_packed_gemm": 8.0}))), path)
        assert read(path).points == 1
        assert (tmp_path / f"{name}.json.bad").read_text() == text, "the old file may be somebody's"


@pytest.mark.parametrize("what", ["family", "field", "kind of field", "size below 0", "size beyond int", "strategy"])
def test_a_name_that_is_unknown_drops_its_point(what: str, tmp_path: Path) -> None:
    """Not the file: a map may be of a later version; fields of changed kernels are not read."""
    one, other = product(), product(m=64)
    map_ = policy((one, point(one, {"sm90_packed_gemm": 8.25})), (other, point(other, {"sm90_bitplane_skinny": 8.25})))
    content = json.loads(policies.text(map_))
    (name,) = (name for name in content["configs"] if name.startswith("sm90_packed_gemm/"))
    measured = content["layers"][0]["tokens"]["16"]
    if what == "family":
        content["configs"]["sm99_packed_gemm/1"] = content["configs"][name]
        measured["padding to int8"]["config"] = "sm99_packed_gemm/1"
    elif what == "strategy":
        measured["padding to int7"] = measured.pop("padding to int8")
    else:
        odd = {"kind of field": "many", "size below 0": -2, "size beyond int": 2**31}
        content["configs"][name] |= {"deeper": 3} if what == "field" else {"stages": odd[what]}
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"map.json: 1 points are dropped; the first: w4a8 16 x 4096 x 4096: .*"):
        found = read(path)
    assert found.points == 1 and found.exact(other) is not None
    if what == "field":
        content["measured"]["kernels"]["sm90_packed_gemm"] = 0
        path.write_text(json.dumps(content))
        assert read(path).why_hint("NVIDIA H200")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_config_with_a_size_of_zero_is_illegal_or_runs(name: str) -> None:
    """Legality divides by some sizes; a map with a 0 must not crash a model's step."""
    for one in (product(m=m, scheme=scheme) for m in (4, 64) for scheme in ("w4a8", "w4a16g128")):
        family = FAMILIES[name]
        if family.why_not(one) is None:
            fields = family.fields(family.default(one))
            for field in (field for field, value in fields.items() if type(value) is int):
                with contextlib.suppress(KernelError):
                    Measured(1.0, name, tuple({**fields, field: 0}.items())).candidate(one)


@pytest.mark.parametrize("kind", ["folder", "dangling", "itself", "unreadable"])
def test_a_users_own_map_that_cannot_be_read_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policies" / "nvidia-h200.json"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "unreadable":
        path.write_text("{}")

        def refuse(self: Path) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "lstat", refuse)
    else:
        path.symlink_to(path if kind == "itself" else tmp_path / "nowhere")
    monkeypatch.setattr(dispatching, "own_file", lambda gpu: path)
    with pytest.warns(UserWarning, match=r"policies/nvidia-h200.json .*ignored"):
        found = list(dispatching._files("NVIDIA H200"))
    assert [one.path for one in found] == [SHIPPED / "nvidia-h200.json"]


def test_no_map_of_ones_own_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "policies" / "none.json", tmp_path / "file" / "none.json"):
        (tmp_path / "file").touch()
        monkeypatch.setattr(dispatching, "own_file", lambda gpu, path=path: path)
        with warnings.catch_warnings(action="error"):
            assert len(list(dispatching._files("NVIDIA H200"))) == 1


def _add(path: Path, first: int) -> None:
    for m in range(first, first + 20):
        one = product(m=m)
        save(policy((one, Point(1.0, {}))), path)


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / "map.json"
    both = [context.Process(target=_add, args=(path, first)) for first in (1, 101)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert read(path).points == 40
    assert [file.name for file in tmp_path.iterdir() if "lock" not in file.name] == ["map.json"]


def test_a_foreign_map_is_only_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = product()
    foreign = policy((one, point(one, {"sm90_packed_gemm": 1.0})), gpu="NVIDIA H100 80GB HBM3")
    assert "measured on NVIDIA H100" in str(foreign.why_hint("NVIDIA H200"))
    assert Dispatcher("NVIDIA H200", [foreign]).choose(one).origin == "built in"
    own = policy((one, point(one, {"sm90_packed_gemm": 1.0})))
    stale = replace(own, origin=replace(own.origin, kernels={"sm90_packed_gemm": 0}), path=Path("stale.json"))
    assert "other kernels" in str(stale.why_hint("NVIDIA H200"))
    older = replace(own, origin=replace(own.origin, library="0.0.1"))
    assert older.why_hint("NVIDIA H200") is None  # another release of anybit invalidates nothing
    monkeypatch.setattr(dispatching, "_given", [stale])
    monkeypatch.setattr(dispatching, "_dispatchers", {})
    monkeypatch.setattr(dispatching, "_told", set())
    monkeypatch.setattr(dispatching, "_files", lambda gpu: iter(()))
    with pytest.warns(UserWarning, match=r"stale.json is only a hint .* other kernels"):
        found = dispatching.dispatcher("NVIDIA H200")
    assert found.choose(one).origin == "built in"
    monkeypatch.setattr(dispatching, "_given", [replace(foreign, path=Path("h100.json"))])
    monkeypatch.setattr(dispatching, "_dispatchers", {})
    with pytest.warns(UserWarning, match=r"h100.json is only a hint .* measured on NVIDIA H100"):
        dispatching.dispatcher("NVIDIA H200")
    # New measurements do not mix with it.
    save(stale, tmp_path / "map.json")
    save(policy((product(m=2), Point(1.0, {}))), tmp_path / "map.json")
    assert read(tmp_path / "map.json").points == 1


def test_points_hold_while_the_kernels_that_they_name_do(tmp_path: Path) -> None:
    few, many = product("w2a4", 1), product("w2a4", 1024)
    found = policy((few, point(few, {"sm90_bitplane_skinny": 3.0})), (many, point(many, {"sm90_packed_gemm": 40.0})))
    found.excluded = {f"w2a4 {name}(tokens=8)": "it crashed" for name in ("sm90_bitplane_skinny", "sm90_packed_gemm")}
    assert found.current() is found
    assert found.why_hint("NVIDIA H200") is None
    found.origin.kernels["sm90_bitplane_skinny"] = 0
    assert found.current().points == 1
    assert not found.current().excluded, "crashed configs are retried with other kernels"
    assert "1 of its 2 points" in str(found.why_hint("NVIDIA H200"))
    by = Dispatcher("NVIDIA H200", [found])
    assert (by.choose(few).origin, by.choose(many).origin) == ("built in", "map")
    save(found, tmp_path / "map.json")
    save(policy((product(m=2), Point(1.0, {}))), tmp_path / "map.json")
    assert read(tmp_path / "map.json").points == 2  # the stale one is dropped, the other is kept
    found.origin.kernels["quantize_activations"] = 0  # the quantizer's time is part of each
    assert found.current().points == 0
