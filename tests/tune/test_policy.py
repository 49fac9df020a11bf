"""Config spaces, and maps on disk: what is followed, what is only a hint, what is ignored with a message."""

import contextlib
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.choose import dispatch as dispatching
from anybit.choose import policy as policies
from anybit.choose.builtin import bucket, builtin, step
from anybit.choose.choose import Map
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import FAMILIES, KernelFamily
from anybit.choose.policy import SHIPPED, Measured, Point, PolicyError, file_name, read, save, usable
from anybit.choose.space import GRID, STEPS, promising, space, why_not_split
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
    assert promising(one, 2, Map([]))[0] == builtin(one)
    split = whole.excluded["split"]
    assert "emulated" in split or "16-bit floats" in split or "8-bit floats" in split


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
    assert any("which changes results" in reason for reason in space(one).excluded.values())


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
    written = policy((one, times), (product("w2a2"), point(product("w2a2"), {"sm90_bitplane_skinny": 3.0})))
    written.excluded = {"w4a8 sm90_packed_gemm(tokens=16)": "it hung for 20 s"}
    save(written, tmp_path / "map.json")
    found = read(tmp_path / "map.json")
    assert found.layers == written.layers
    assert found.excluded == written.excluded
    assert found.origin == written.origin
    content = json.loads((tmp_path / "map.json").read_text())
    assert content["measured"]["gpu"] == "NVIDIA H200"
    row = content["layers"][1]["tokens"]["16"]
    assert row["default"] == times.default_us and row["padding to int8"][0] == 8.25
    assert len(content["configs"]) == 3 and set(content["fields"]) == {"sm90_bitplane_skinny", "sm90_packed_gemm"}


def _spoiled(text: str) -> dict[str, str]:
    content = json.loads(text)
    spoiled = {"truncated": text[: len(text) // 2], "empty": "", "binary": "\0\1", "list": "[]", "number": "3"}
    spoiled["deep"] = "[" * 200_000
    for name, change in {
        "another format": {"format": "anybit policy map 99"},
        "no origin": {"measured": None},
        "odd architecture": {"measured": content["measured"] | {"arch": "sm_12"}},
        "config of objects": {"configs": [["sm90_packed_gemm", *[{}] * (len(content["configs"][0]) - 1)]]},
        "config of few values": {"configs": [content["configs"][0][:-1]]},
        "fields of no config": {"fields": {}},
        "no layers": {"layers": {"x": 1}},
        "part of a row": {"layers": [content["layers"][0] | {"n": 576.7}]},
        "endless rows": {"layers": [content["layers"][0] | {"n": 10**400}]},
        "odd dtype": {"layers": [content["layers"][0] | {"dtype": "float61"}]},
    }.items():
        spoiled[name] = json.dumps(content | change)
    for name, (field, value) in {
        "negative time": (0, -1.0),
        "time is a word": (0, "fast"),
        "time is infinite": (0, float("inf")),
        "time beyond all floats": (0, 10**400),
        "missing config": (1, 77),
        "config before the first": (1, -1),
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


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("family", "no kernel family 'sm99_packed_gemm'"),
        ("field", "has no field 'deeper'"),
        ("lacks", "lack the field 'stages'"),
        ("kind of field", "is of type int"),
        ("size below 0", "is of type int"),
        ("size beyond int", "is of type int"),
        ("strategy", "'padding to int7' is none of"),
    ],
)
def test_point_is_void_by_its_names(what: str, said: str, tmp_path: Path) -> None:
    """Not the file: a map may be of another version."""
    one, other = product(), product(m=64)
    map_ = policy((one, point(one, {"sm90_packed_gemm": 8.25})), (other, point(other, {"sm90_bitplane_skinny": 8.25})))
    content = json.loads(policies.text(map_))
    names, measured = content["fields"]["sm90_packed_gemm"], content["layers"][0]["tokens"]["16"]
    (config,) = (config for config in content["configs"] if config[0] == "sm90_packed_gemm")
    if what == "family":
        content["fields"]["sm99_packed_gemm"], config[0] = names, "sm99_packed_gemm"
    elif what == "strategy":
        measured["padding to int7"] = measured.pop("padding to int8")
    elif what == "field":
        names.append("deeper")
        config.append(3)
    elif what == "lacks":
        del config[1 + names.index("stages")]
        names.remove("stages")
    else:
        odd = {"kind of field": "many", "size below 0": -2, "size beyond int": 2**31}
        config[1 + names.index("stages")] = odd[what]
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    with pytest.warns(
        UserWarning, match=r"map.json: 1 points are dropped; the first: w4a8 16 x 4096 x 4096: .*"
    ) as warned:
        found = read(path)
    assert said in str(warned[0].message)
    assert found.points == 1 and found.exact(other) is not None


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
def test_a_users_own_map_that_cannot_be_read_is_named(kind, tmp_path, monkeypatch) -> None:
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


def test_a_foreign_map_only_offers_neighbours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = product()
    foreign = policy((one, point(one, {"sm90_packed_gemm": 1.0})), gpu="NVIDIA H100 80GB HBM3")
    assert "measured on NVIDIA H100" in str(foreign.why_hint("NVIDIA H200"))
    mine = policy((one, point(one, {"sm90_bitplane_skinny": 5.0})))
    assert mine.why_hint("NVIDIA H200") is None
    assert Dispatcher("NVIDIA H200", [foreign, mine]).choose(one).candidate.kernel == "sm90_bitplane_skinny"
    monkeypatch.setattr(dispatching, "_given", [replace(foreign, path=Path("h100.json"))])
    monkeypatch.setattr(dispatching, "_dispatchers", {})
    monkeypatch.setattr(dispatching, "_files", lambda gpu: iter(()))
    with pytest.warns(UserWarning, match=r"h100.json only offers neighbours .* measured on NVIDIA H100"):
        found = dispatching.dispatcher("NVIDIA H200")
    assert found.choose(one).candidate.kernel == "sm90_packed_gemm"
    # New measurements do not mix with it.
    save(foreign, tmp_path / "map.json")
    save(policy((product(m=2), Point(1.0, {}))), tmp_path / "map.json")
    assert read(tmp_path / "map.json").points == 1


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_every_shipped_config_is_legal_where_it_was_measured(path: Path) -> None:
    found = read(path)
    assert path.name == file_name(found.origin.gpu)
    device = Device.named(found.origin.arch)
    assert device.name == found.origin.gpu
    seen = 0
    for (scheme, dtype, n, k), points in found.layers.items():
        for m, at in points.items():
            assert m in GRID
            one = product(scheme, m, n, k, dtype=getattr(torch, dtype), device=device)
            seen += 1
            for name, measured in at.strategies.items():
                assert name == measured.candidate(one).strategy  # raises if illegal
            assert at.strategies
    assert seen == found.points > 0
