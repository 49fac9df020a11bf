"""Maps on disk: what is obeyed, what is only a hint, what is ignored by name; and what a dispatcher makes of them."""

import json
import multiprocessing
import timeit
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.device import Device
from anybit.errors import KernelError
from anybit.ops import bitwise
from anybit.ops.backend import LinearSpec
from anybit.scheme import Scheme
from anybit.tune import dispatcher as dispatching
from anybit.tune import policy as policies
from anybit.tune.between import scaled
from anybit.tune.dispatcher import Dispatcher
from anybit.tune.explain import explain
from anybit.tune.families import FAMILIES, GRID, MOST_TOKENS, STEPS, Layout, Product, bucket, step, steps_to
from anybit.tune.policy import SHIPPED, Measured, Origin, Point, Policy, PolicyError, read, save, usable
from anybit.tune.space import Candidate, builtin, builtin_layout, leaves_room, promising, space

H200 = Device.named("sm_90a")


def product(scheme: str = "w4a8", m: int = 16, n: int = 4096, k: int = 4096, **more: Any) -> Product:
    parsed = Scheme.parse(scheme)
    return Product(m, n, k, parsed.weights, parsed.activations, **more)


def other_than_default(one: Product, kernel: str) -> Candidate:
    own = builtin(one)
    return next(c for c in space(one).candidates if c.kernel == kernel and c != own)


def point(one: Product, us: dict[str, float], default_us: float = 20.0) -> Point:
    """A point whose kernels take these microseconds, none of them by a built-in config."""
    found = {}
    for kernel, time in us.items():
        candidate = other_than_default(one, kernel)
        found[candidate.strategy] = Measured.of(candidate, one, time)
    return Point(default_us, 1.0, found)


def policy(*points: tuple[Product, Point], gpu: str = "NVIDIA H200") -> Policy:
    found = Policy(Origin.here(gpu, "sm_90a", "1.0", "2.0"))
    for one, what in points:
        found.put(one, what)
    return found


# -------- spaces


@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a8", "w2a4", "w3a4bipolar-xasym", "w8a8", "w4a8fp", "w1a1"])
@pytest.mark.parametrize("m", [1, 12, 64, 1024])
def test_a_space_is_what_why_not_leaves(scheme: str, m: int) -> None:
    one = product(scheme, m)
    whole = space(one)
    assert whole.candidates
    for candidate in whole.candidates[:: max(1, len(whole.candidates) // 40)]:
        assert candidate.why_not(one) is None
        rebuilt = Measured.of(candidate, one, 1.0).candidate(one)
        assert rebuilt == candidate
    assert builtin(one) in promising(one, 2)
    assert "legal candidates" in whole.text()
    split = next(e for e in whole.excluded if e.strategy == "split")
    assert "emulated" in split.reason or "16-bit floats" in split.reason or "8-bit floats" in split.reason


def test_split_is_a_strategy_where_int4_tensor_cores_exist() -> None:
    one = product(m=32, device=Device.named("sm_80"))
    strategies = {candidate.strategy for candidate in space(one).candidates}
    assert {"split", "bitwise", "padding to int8"} <= strategies


def test_activations_are_re_chosen_only_where_that_is_allowed() -> None:
    one = product("w4a16g128", 1024)
    assert {c.activations.bits for c in space(one).candidates} == {16}
    assert {c.activations.bits for c in space(one, ["a8"]).candidates} == {16, 8}
    assert any("allow a8" in e.reason for e in space(one).excluded)
    with pytest.raises(KernelError, match="allowance 'a4' is unknown"):
        space(one, ["a4"])


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
    assert steps_to(1280, GRID) == (1280, 1216, 1152, 1088)
    assert steps_to(1280, STEPS) == (1280,) and steps_to(64, GRID) == (64,)


# -------- files


def test_a_map_survives_the_disk(tmp_path: Path) -> None:
    one = product()
    default = Measured.of(builtin(one), one, 20.0)
    also = Measured.of(other_than_default(one, "packed_small"), one, 8.5)
    times = point(one, {"bitwise": 9.5, "packed_large": 8.25})
    written = policy((one, replace(times, default=default, also=(also,))))
    written.excluded = {"w4a8 packed_large(tokens=16)": "it hung for 20 s"}
    save(written, tmp_path / "map.json")
    found = read(tmp_path / "map.json")
    assert found.layers == written.layers
    assert found.excluded == written.excluded
    assert found.origin == written.origin
    content = json.loads((tmp_path / "map.json").read_text())
    assert content["measured"]["gpu"] == "NVIDIA H200"
    assert content["layers"][0]["tokens"]["16"]["padding to int8"]["us"] == 8.25


def _spoiled(text: str) -> dict[str, str]:
    content = json.loads(text)
    spoiled = {"truncated": text[: len(text) // 2], "empty": "", "binary": "\0\1", "list": "[]", "number": "3"}
    spoiled["deep"] = "[" * 200_000
    for name, change in {
        "another format": {"format": "anybit policy map 99"},
        "no origin": {"measured": None},
        "unknown kernel": {"configs": {"fastest/1": {}}},
        "config of objects": {"configs": {"bitwise/1": {"tokens": {}}}},
        "no layers": {"layers": {"x": 1}},
        "part of a row": {"layers": [content["layers"][0] | {"n": 576.7}]},
        "endless rows": {"layers": [content["layers"][0] | {"n": 10**400}]},
        "unknown field": {"configs": {name: fields | {"deeper": 1} for name, fields in content["configs"].items()}},
        "field of another kind": {
            "configs": {name: fields | {"tokens": "8"} for name, fields in content["configs"].items()}
        },
        "odd dtype": {"layers": [content["layers"][0] | {"dtype": "float61"}]},
    }.items():
        spoiled[name] = json.dumps(content | change)
    for name, (field, value) in {
        "negative time": ("us", -1.0),
        "time is a word": ("us", "fast"),
        "time is infinite": ("us", float("inf")),
        "time beyond all floats": ("us", 10**400),
        "missing config": ("config", "packed_large/77"),
        "odd activations": ("activations", "4"),
    }.items():
        broken = json.loads(text)
        broken["layers"][0]["tokens"]["16"]["padding to int8"][field] = value
        spoiled[name] = json.dumps(broken)
    return spoiled


def test_a_file_that_is_no_map_is_named_and_ignored(tmp_path: Path) -> None:
    one = product()
    whole = policies.text(policy((one, point(one, {"packed_large": 8.25}))))
    for name, text in _spoiled(whole).items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        with pytest.raises(PolicyError, match=r"map"):
            read(path)
        with pytest.warns(UserWarning, match=f"{name}.json.*ignored"):
            assert usable(path) is None
        with pytest.warns(UserWarning, match="ignored"):  # and is replaced by what is measured
            save(policy((one, point(one, {"packed_large": 8.0}))), path)
        assert read(path).points == 1
        assert (tmp_path / f"{name}.json.bad").read_text() == text, "what was there may be somebody's"


def test_fields_of_kernels_that_have_changed_since_make_a_hint(tmp_path: Path) -> None:
    """A map of before may name fields that are no more; one that says it is of these kernels may not."""
    one = product()
    content = json.loads(policies.text(policy((one, point(one, {"packed_large": 8.25})))))
    (name,) = (name for name in content["configs"] if name.startswith("packed_large/"))
    content["configs"][name]["deeper"] = 3
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match="packed_large has no field 'deeper'"):
        read(path)
    content["measured"]["kernels"]["packed_large"] = "of before"
    path.write_text(json.dumps(content))
    assert read(path).why_hint("NVIDIA H200")


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
        save(policy((one, Point(1.0, 1.0, {}))), path)


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


# -------- choices


def test_the_fastest_measured_config_runs() -> None:
    one = product()
    map_ = policy((one, point(one, {"bitwise": 9.5, "packed_large": 8.25})))
    choice = Dispatcher("NVIDIA H200", [map_]).choose(one)
    assert (choice.origin, choice.candidate.kernel, choice.us) == ("map", "packed_large", 8.25)
    by = explain(replace(one, m=13), Dispatcher("NVIDIA H200", [map_]))
    assert "at M = 16, by" in by.why, "the count that was measured, not the one that was asked for"
    # In one layout, the fastest that reads it; for 13 tokens, what was measured for 16.
    choice = Dispatcher("NVIDIA H200", [map_]).choose(replace(one, m=13), [Layout.planes])
    assert (choice.origin, choice.candidate.kernel, choice.us) == ("map", "bitwise", 9.5)
    # Half way to a power of two, the power's point.
    assert Dispatcher("NVIDIA H200", [map_]).choose(replace(one, m=11)).origin == "map"
    # Integer products take the same time whichever 16 bits their results have.
    assert Dispatcher("NVIDIA H200", [map_]).choose(replace(one, dtype=torch.bfloat16)).origin == "map"


def test_a_point_whose_built_in_choice_is_another_now_does_not_decide() -> None:
    one = product()
    found = point(one, {"bitwise": 9.5, "packed_large": 8.25})
    own = Measured.of(builtin(one), one, 20.0)
    same = policy((one, replace(found, default=own)))
    assert Dispatcher("NVIDIA H200", [same]).choose(one).origin == "map"
    assert Dispatcher("NVIDIA H200", [same]).choose(replace(one, m=13)).origin == "map"
    older = Measured.of(other_than_default(one, "packed_large"), one, 20.0)
    stale = policy((one, replace(found, default=older)))
    assert Dispatcher("NVIDIA H200", [stale]).choose(one).candidate == builtin(one)


def test_without_a_map_the_built_in_choice_runs() -> None:
    for scheme in ("w4a8", "w2a2", "w4a16g128", "w2a16", "w4a8fp"):
        for m in (1, 3, 9, 100, 20000):
            one = product(scheme, m)
            choice = Dispatcher("NVIDIA H200", []).choose(one)
            assert choice.origin == "built in"
            assert choice.candidate == builtin(one)
            assert choice.candidate.layout is builtin_layout(one)


def test_a_nearby_config_runs_if_it_is_legal_and_won_clearly() -> None:
    one, near, far = product(m=16), product(m=16, n=4608), product(m=16, n=16384)
    won = policy((one, point(one, {"packed_large": 5.0}, default_us=10.0)))
    choice = Dispatcher("NVIDIA H200", [won]).choose(near)
    assert choice.origin == "nearest"
    assert choice.candidate.why_not(near) is None
    assert Dispatcher("NVIDIA H200", [won]).choose(far).origin == "built in"
    tied = policy((one, point(one, {"packed_large": 9.9}, default_us=10.0)))
    assert Dispatcher("NVIDIA H200", [tied]).choose(near).origin == "built in"
    lost = policy((one, point(one, {"bitwise": 8.0, "packed_large": 12.0}, default_us=10.0)))
    assert Dispatcher("NVIDIA H200", [lost]).choose(near).candidate == builtin(near)


def test_between_two_measured_token_counts_runs_what_fills_the_last_round() -> None:
    """Times of an H200: tiles of 192 tokens take one round of multiprocessors at 1056 tokens, and two at 1280."""
    upper, here = product("w4a4", 1280, 4096, 16384), product("w4a4", 1056, 4096, 16384)
    large = {c.config.tokens: c for c in space(upper).candidates if _tile(c, 2, 160) or _tile(c, 3, 192)}
    narrow, wide = (Measured.of(large[tokens], upper, us) for tokens, us in ((160, 122.6), (192, 178.0)))
    found = policy((upper, Point(130.0, 50.0, {"padding to int8": narrow}, also=(wide,))))
    by = Dispatcher("NVIDIA H200", [found])
    assert by.choose(upper).candidate == large[160] and by.choose(upper).origin == "map"
    choice = by.choose(here)
    assert choice.candidate == large[192] and choice.origin == "between" and "1280" in choice.source
    found.put(here, Point(130.0, 50.0, {"padding to int8": narrow}))
    assert by.choose(here).candidate == large[160], "what was measured here decides"
    assert by.choose(here, [Layout.planes]).candidate.layout is Layout.planes


def test_5_and_6_tokens_of_4_bits_have_a_built_in_choice_of_their_own() -> None:
    down = {m: builtin(product("w4a16g128", m, k=14336)).kernel for m in (4, 5, 6, 7, 8)}
    assert down == {4: "packed_mid", 5: "packed_mid", 6: "packed_mid", 7: "packed_large", 8: "packed_large"}


@pytest.mark.parametrize(
    ("m", "us", "kernel"), [(1, 8.9, "bitwise"), (1, 8.7, "packed_small"), (16, 9.2, "packed_large")]
)
def test_few_tokens_change_their_layout_for_a_clear_gain_alone(m: int, us: float, kernel: str) -> None:
    one = product("w2a4", m)
    tiles = "packed_small" if m == 1 else "packed_large"
    measured = point(one, {"bitwise": 9.42, tiles: us}, 9.42)
    measured = replace(measured, default=Measured.of(builtin(one), one, 9.42))
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    assert by.choose(one).candidate.kernel == kernel
    assert by.choose(one, [Layout.tiles_a8]).candidate.kernel == tiles, "where it lies in tiles it runs from them"


@pytest.mark.parametrize(("us", "kernel"), [(8.6, "bitwise"), (8.2, "packed_small")])
def test_few_tokens_take_another_config_rather_than_another_layout(us: float, kernel: str) -> None:
    one = product("w2a4", 1)
    measured = point(one, {"bitwise": 9.0, "packed_small": us}, 9.9)
    other = next(
        c for c in space(one).candidates if c.kernel == "bitwise" and c != builtin(one) and leaves_room(one, c)
    )
    strategies = measured.strategies | {"bitwise": Measured.of(other, one, 9.0)}
    measured = replace(measured, default=Measured.of(builtin(one), one, 9.9), strategies=strategies)
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    chosen = by.choose(one).candidate
    assert chosen.kernel == kernel and (kernel != "bitwise" or chosen == other)
    assert ("the fastest of the built-in layout" in explain(one, by).why) == (kernel == "bitwise")


@pytest.mark.parametrize(("m", "us", "own"), [(2, 9.4, True), (2, 9.2, False), (8, 9.4, True), (16, 9.4, False)])
def test_few_tokens_leave_the_built_in_config_for_a_clear_gain_alone(m: int, us: float, own: bool) -> None:
    """In steps of a model built-in configs of w4a8 and w2a4 were faster than those that had won by 1 to 5 %."""
    here = product("w4a8", m)
    rooms = (c for c in space(here).candidates if c.kernel == builtin(here).kernel and c != builtin(here))
    other = next(c for c in rooms if leaves_room(here, c))
    found = Point(10.0, 5.0, {"padding to int8": Measured.of(other, here, us)}, Measured.of(builtin(here), here, 10.0))
    choice = Dispatcher("NVIDIA H200", [policy((here, found))]).choose(here)
    assert choice.candidate == (builtin(here) if own else other)
    assert choice.us == (10.0 if own else us)
    why = explain(here, Dispatcher("NVIDIA H200", [policy((here, found))])).why
    assert ("nothing was clearly faster at M = " in why) == own


def test_a_tile_of_planes_that_holds_more_tokens_is_expected_to_take_longer() -> None:
    """Of w2a2 at 16384 x 2048 tiles of 256 tokens took 10.3 us with 128 of them and 13.4 with 140."""
    there = product("w2a2", 128, n=16384, k=2048)
    config = next(c for c in FAMILIES["bitwise"].configs(there) if c.tokens == 256)
    wide = Candidate("bitwise", "bitwise", config, there.activations)
    assert scaled(wide, 10.0, there, replace(there, m=140)) == pytest.approx(15.0)
    assert scaled(wide, 10.0, replace(there, m=160), replace(there, m=140)) == pytest.approx(10.0)
    assert scaled(wide, 10.0, replace(there, m=1024), replace(there, m=1020)) == pytest.approx(10.0)


def test_tiles_of_mma_sync_are_expected_between_two_token_counts_too() -> None:
    there = product("w2a2", 112, device=Device.named("sm_80"))
    own = builtin(there)
    assert own.kernel == "bitwise_sync"
    assert scaled(own, 10.0, there, replace(there, m=128)) == pytest.approx(10.0)


@pytest.mark.parametrize(("us", "origin"), [(200.0, "between"), (100.0, "built in")])
def test_between_two_measured_token_counts_the_built_in_choice_must_be_beaten(us: float, origin: str) -> None:
    upper, here = product("w4a16g128", 1280, 4096, 16384), product("w4a16g128", 1056, 4096, 16384)
    other = next(c for c in space(upper).candidates if c.kernel == "packed_large" and c != builtin(upper))
    won = Measured.of(other, upper, 150.0)
    found = policy((upper, Point(us, 50.0, {"dequantize": won}, default=Measured.of(builtin(upper), upper, us))))
    choice = Dispatcher("NVIDIA H200", [found]).choose(here)
    assert choice.origin == origin
    assert choice.candidate == (other if origin == "between" else builtin(here))
    # In the other 16-bit type the same decides, and says no more than is so.
    alike = Dispatcher("NVIDIA H200", [found]).choose(replace(here, dtype=torch.bfloat16))
    assert alike.origin == ("nearest" if origin == "between" else "built in")
    assert (alike.candidate == builtin(replace(here, dtype=torch.bfloat16))) == (origin == "built in")


def _tile(one: Candidate, row_warpgroups: int, tokens: int) -> bool:
    if one.kernel != "packed_large" or one.config.tokens != tokens:
        return False
    shape = one.config.row_warpgroups, one.config.k_warpgroups, one.config.k_blocks, one.config.row_blocks
    return shape == (row_warpgroups, 1, 1, 1)


def test_no_illegal_config_ever_runs() -> None:
    """Whatever a map says, for every shape around it."""
    one = product(m=16)
    for candidate in space(one).candidates[::25]:
        found = policy((one, Point(50.0, 1.0, {candidate.strategy: Measured.of(candidate, one, 1.0)})))
        for k in (576, 4096, 4224, 28672):
            for m in (12, 16, 32):
                other = product(m=m, k=k)
                chosen = Dispatcher("NVIDIA H200", [found]).choose(other).candidate
                assert chosen.why_not(other) is None


def test_unknown_fields_fall_back() -> None:
    one = product()
    strange = Measured(1.0, "packed_large", (("tokens", 16), ("speed", 11)))
    map_ = policy((one, Point(9.0, 1.0, {"padding to int8": strange})))
    assert Dispatcher("NVIDIA H200", [map_]).choose(one).origin == "built in"
    with pytest.raises(KernelError, match="has no field 'speed'"):
        strange.candidate(one)
    with pytest.raises(KernelError, match="is of type int, not 'many'"):
        FAMILIES["packed_large"].rebuild(one, {"tokens": "many"})


def test_configs_of_maps_before_a_field_are_without_it() -> None:
    """They were measured so; the built-in choice at one token may have it since."""
    for n, k in ((4096, 4096), (1536, 576), (6144, 4096)):
        old = FAMILIES["packed_large"].rebuild(product(n=n, k=k), {"tokens": 64, "row_warpgroups": 1})
        assert (old.direct, old.unrolled) == (0, False)
        new = FAMILIES["packed_large"].rebuild(product(n=n, k=k), {"tokens": 64, "unrolled": True})
        assert new.unrolled


def test_few_tokens_run_no_config_that_leaves_others_less_room_than_the_built_in_one() -> None:
    one = product("w4a8", 4, n=28672)
    own = builtin(one)
    assert own.kernel == "packed_small"
    deeper = replace(own, config=replace(own.config, stages=own.config.stages + 2))
    least = min(own.config.prefetch, own.config.stages - 2)
    flatter = replace(own, config=replace(own.config, stages=own.config.stages - 2, prefetch=least))
    large = next(c for c in space(one).candidates if c.kernel == "packed_large")
    for won, runs in ((deeper, own), (flatter, flatter), (large, large)):
        assert won.why_not(one) is None
        assert leaves_room(one, won) is (won is not deeper)
        found = Point(20.0, 1.0, {won.strategy: Measured.of(won, one, 5.0)}, Measured.of(own, one, 20.0))
        choice = Dispatcher("NVIDIA H200", [policy((one, found))]).choose(one)
        assert (choice.candidate, choice.origin) == (runs, "map")
        assert choice.us == (20.0 if runs is own else 5.0)
    assert leaves_room(replace(one, m=64), deeper)


def test_few_tokens_run_no_two_blocks_on_a_multiprocessor_where_one_is_built_in() -> None:
    here = product("w4a8", 8)
    own = builtin(here)
    assert own.kernel == "packed_large" and own.config.resident == 1
    two = replace(own, config=next(c for c in FAMILIES["packed_large"].configs(here) if c.resident == 2))
    assert not leaves_room(here, two) and leaves_room(replace(here, m=16), two)
    measured = Point(5.11, 2.0, {"padding to int8": Measured.of(two, here, 4.57)}, Measured.of(own, here, 5.11))
    choice = Dispatcher("NVIDIA H200", [policy((here, measured))]).choose(here)
    assert choice.candidate == own and choice.us == 5.11


def test_a_foreign_map_is_only_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = product()
    foreign = policy((one, point(one, {"packed_large": 1.0})), gpu="NVIDIA H100 80GB HBM3")
    assert "measured on NVIDIA H100" in str(foreign.origin.foreign("NVIDIA H200"))
    assert Dispatcher("NVIDIA H200", [foreign]).choose(one).origin == "built in"
    own = policy((one, point(one, {"packed_large": 1.0})))
    stale = replace(own, origin=replace(own.origin, kernels={"packed_large": "0" * 16}), path=Path("stale.json"))
    assert "other kernels" in str(stale.why_hint("NVIDIA H200"))
    older = replace(own, origin=replace(own.origin, library="0.0.1"))
    assert "anybit 0.0.1" in str(older.origin.foreign("NVIDIA H200"))
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
    # What is measured anew does not mix with it.
    save(stale, tmp_path / "map.json")
    save(policy((product(m=2), Point(1.0, 1.0, {}))), tmp_path / "map.json")
    assert read(tmp_path / "map.json").points == 1


def test_points_hold_while_the_kernels_that_they_name_do(tmp_path: Path) -> None:
    few, many = product("w2a4", 1), product("w2a4", 1024)
    found = policy((few, point(few, {"bitwise": 3.0})), (many, point(many, {"packed_large": 40.0})))
    found.excluded = {f"w2a4 {name}(tokens=8)": "it crashed" for name in ("bitwise", "packed_large")}
    assert found.current() is found
    assert found.why_hint("NVIDIA H200") is None
    found.origin.kernels["bitwise"] = "0" * 16
    assert found.current().points == 1
    assert list(found.current().excluded) == ["w2a4 packed_large(tokens=8)"]
    assert "1 of its 2 points" in str(found.why_hint("NVIDIA H200"))
    by = Dispatcher("NVIDIA H200", [found])
    assert (by.choose(few).origin, by.choose(many).origin) == ("built in", "map")
    save(found, tmp_path / "map.json")
    save(policy((product(m=2), Point(1.0, 1.0, {}))), tmp_path / "map.json")
    assert read(tmp_path / "map.json").points == 2  # the stale one is dropped, the other is kept
    found.origin.kernels["pack"] = "0" * 16  # the quantizer's time is part of each
    assert found.current().points == 0


def test_eight_bit_activations_run_only_where_allowed() -> None:
    one = product("w4a16g128", 1024)
    narrow = next(c for c in space(one, ["a8"]).candidates if c.strategy == "padding to fp8")
    wide = other_than_default(one, "packed_large")
    both = {c.strategy: Measured.of(c, one, us) for c, us in ((narrow, 5.0), (wide, 9.0))}
    found = Dispatcher("NVIDIA H200", [policy((one, Point(10.0, 1.0, both)))])
    assert found.choose(one).candidate == wide
    assert found.choose(one, allow=["a8"]).candidate == narrow
    assert found.layouts(one) == (Layout.tiles_a16,)
    assert found.layouts(one, ["a8"]) == (Layout.tiles_a8,)


def test_two_layouts_are_kept_where_each_wins_somewhere() -> None:
    few, many = product("w2a4", 1), product("w2a4", 1024)
    won = policy(
        (few, Point(4.0, 1.0, point(few, {"bitwise": 3.0, "packed_small": 4.0}).strategies)),
        (many, Point(40.0, 1.0, point(many, {"bitwise": 60.0, "packed_large": 40.0}).strategies)),
    )
    assert set(Dispatcher("NVIDIA H200", [won]).layouts(few)) == {Layout.planes, Layout.tiles_a8}
    assert Dispatcher("NVIDIA H200", [won]).layouts(few, most=1) == (Layout.tiles_a8,)  # 1.33 and not 1.5 times
    close = policy(
        (few, Point(4.0, 1.0, point(few, {"bitwise": 3.9, "packed_small": 4.0}).strategies)),
        (many, Point(40.0, 1.0, point(many, {"bitwise": 60.0, "packed_large": 40.0}).strategies)),
    )
    assert Dispatcher("NVIDIA H200", [close]).layouts(few) == (Layout.tiles_a8,)


def test_a_look_up_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a call's input to its plan, as every eager call goes: the count's bucket, and a dictionary."""
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: H200))
    rows = torch.zeros(37, 512, dtype=torch.float16)
    spec = LinearSpec.parse("bitwise:64x512:w2a2")
    plan = bitwise._plan(spec, rows)
    assert bitwise._plan(spec, rows) is plan
    seconds = min(timeit.repeat(lambda: bitwise._plan(spec, rows), number=2000, repeat=5)) / 2000
    assert seconds < 5e-6  # below 1 us on an idle core (docs/tuning.md); this machine may be busy


@pytest.mark.parametrize(("scheme", "m"), [("w2a2", 1), ("w2a4", 24), ("w1a1", 200), ("w4a4", 2000)])
def test_a_search_tries_every_kind_of_bit_plane_tile(scheme: str, m: int) -> None:
    one = product(scheme, m, n=28672)
    kinds = FAMILIES["bitwise"].kinds(one)
    assert len(kinds) == len(set(kinds)) <= 100
    assert ({64, 128} <= {config.tokens for config in kinds if config.path.name == "large"}) == (m > 8)
    assert any(config.path.name != "large" for config in kinds) == (m <= 64)
    whole = set(FAMILIES["bitwise"].configs(one))
    assert whole.issuperset(kinds)
    tried = {c.config for c in promising(one, 4)}
    assert tried.issuperset(kinds)
    assert not FAMILIES["packed_large"].kinds(one)
    rings = FAMILIES["bitwise"].kinds(one, rings=True)
    assert set(kinds) <= set(rings) <= whole
    if 8 < m <= 64:  # what won on an H200 and had not been tried: two slots, and products that begin with more chunks
        assert {2, 4, 6, 8} <= {config.slots for config in rings}
        of_weights = {one for one in whole if one.path.name == "once" and one.walk.name == "tokens"}
        assert of_weights <= set(rings) and max(config.early for config in of_weights) > 2
    small = FAMILIES["bitwise"].kinds(product(scheme, 100, n=576, k=576))  # large tiles leave multiprocessors idle
    assert any(config.path.name == "once" for config in small)


def test_few_tokens_of_16_bit_activations_run_by_times_of_their_own_weights_alone() -> None:
    """Which kernel is built in depends on the weights' bits there; float16 and bfloat16 have the same."""
    one = product("w4a16g128", 4, n=4096, k=14336)
    rooms = (c for c in space(one).candidates if c.kernel == builtin(one).kernel and c != builtin(one))
    other = next(c for c in rooms if leaves_room(one, c))
    measured = Point(20.0, 5.0, {"dequantize": Measured.of(other, one, 15.0)}, Measured.of(builtin(one), one, 20.0))
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    assert by.choose(one).candidate == other
    for scheme in ("w3a16g128", "w4a16g64", "w4a16g128asym"):
        there = product(scheme, 4, n=4096, k=14336)
        assert by.choose(there).candidate == builtin(there), scheme
        assert explain(there, by).why == "nothing was measured for it: it is the built-in choice"
    near = product("w4a16g128", 4, n=4096, k=12288)
    assert by.choose(near).candidate == builtin(near)
    assert by.choose(replace(one, dtype=torch.bfloat16)).candidate.fields == other.fields


def test_fewer_bits_run_on_tiles_what_was_measured_with_eight() -> None:
    """The kernels are the same: bytes, whatever they were rounded to."""
    measured, one = product("w4a8", 256), product("w4a4", 256)
    by = Dispatcher("NVIDIA H200", [policy((measured, point(measured, {"packed_large": 5.0})))])
    choice = by.choose(one)
    assert choice.origin == "nearest" and choice.candidate.fields == by.choose(measured).candidate.fields
    assert choice.candidate.activations == one.activations and choice.candidate.why_not(one) is None
    assert by.choose(product("w2a2", 256)).origin == "built in"  # planes
    assert by.choose(product("w4a4-xasym", 256)).origin == "built in"
    assert by.choose(one, [Layout.planes]).candidate.layout is Layout.planes


def test_bfloat16_runs_what_won_clearly_in_float16() -> None:
    """The kernels differ in how codes are widened alone; the shipped map is of float16, and models are of bfloat16."""
    measured, one = product("w4a16g128", 64), product("w4a16g128", 64, dtype=torch.bfloat16)
    won = policy((measured, point(measured, {"packed_large": 10.0})))
    choice = Dispatcher("NVIDIA H200", [won]).choose(one)
    expected = won.exact(measured).strategies["dequantize"]
    assert (choice.origin, choice.us) == ("nearest", 0.0) and "float16" in choice.source
    assert choice.candidate == expected.candidate(one) != builtin(one)
    hardly = policy((measured, point(measured, {"packed_large": 19.8})))
    assert Dispatcher("NVIDIA H200", [hardly]).choose(one).candidate == builtin(one)
    both = policy((measured, point(measured, {"packed_large": 10.0})), (one, point(one, {"packed_large": 19.0})))
    assert Dispatcher("NVIDIA H200", [both]).choose(one).us == 19.0, "what was measured in its own type decides"
    few = replace(measured, m=4), replace(one, m=4)
    decided = policy((few[0], point(few[0], {"packed_small": 1.0})))
    assert Dispatcher("NVIDIA H200", [decided]).choose(few[1]).candidate == builtin(few[1])


def test_a_tile_that_would_lack_many_rows_runs_where_it_won_by_much() -> None:
    """32 tokens a tile: 11.3 us with 24 of them, 14.2 with 17, where the built-in choice takes the same with both."""
    measured = product("w4a8", 24)
    configs = [one for one in space(measured).candidates if one.kernel == "packed_large"]
    wide = next(one for one in configs if one.config.tokens == 32)
    own = Measured.of(builtin(measured), measured, 12.0)
    assert builtin(measured).config.tokens <= 24
    for us, m, expected in ((11.4, 24, wide), (11.4, 20, None), (11.4, 17, None), (10.0, 17, wide)):
        won = Point(12.0, 1.0, {wide.strategy: Measured.of(wide, measured, us)}, own)
        choice = Dispatcher("NVIDIA H200", [policy((measured, won))]).choose(replace(measured, m=m))
        assert choice.candidate == (expected or builtin(measured)), (us, m)
        assert choice.origin == ("map" if expected else "built in")


def test_other_codes_and_groups_run_what_won_clearly_with_those_of_maps() -> None:
    """Maps hold 4 symmetric bits in groups of 128; checkpoints have zero points, smaller groups, or fewer bits."""
    measured = product("w4a16g128", 64)
    won = policy((measured, point(measured, {"packed_large": 10.0})))
    expected = won.exact(measured).strategies["dequantize"]
    for scheme in ("w4a16g128asym", "w4a16g64", "w4a16g32"):
        for dtype in (torch.float16, torch.bfloat16):
            one = product(scheme, 64, dtype=dtype)
            choice = Dispatcher("NVIDIA H200", [won]).choose(one)
            assert choice.origin == "nearest" and "w4a16g128" in choice.source, (scheme, dtype)
            assert choice.candidate == expected.candidate(one) != builtin(one)
    hardly = policy((measured, point(measured, {"packed_large": 19.8})))
    for scheme in ("w4a16g128asym", "w8a16g128", "w4a16", "w4a16g128bipolar"):
        one = product(scheme, 64)
        maps = [hardly] if scheme.endswith("asym") else [won]
        assert Dispatcher("NVIDIA H200", maps).choose(one).candidate == builtin(one), scheme
    eight, groups = product("w4a8", 64), product("w4a8g128", 64)  # whose sums are kept in another way
    bytes_ = policy((eight, point(eight, {"packed_large": 10.0})))
    assert Dispatcher("NVIDIA H200", [bytes_]).choose(groups).candidate == builtin(groups)


def test_what_every_family_runs_can_be_read_back_where_it_was_measured() -> None:
    """Also of families that run many tokens alone: a map's points of planes side by side were passed over."""
    for scheme, m, n, k in (("w2a2", 4096, 16384, 4096), ("w4a8", 1, 4096, 4096), ("w4a16g128", 4096, 4096, 4096)):
        parsed = Scheme.parse(scheme)
        one = Product(m, n, k, parsed.weights, parsed.activations)
        seen = set()
        for candidate in space(one).candidates:
            if candidate.kernel not in seen:
                seen.add(candidate.kernel)
                assert Measured.of(candidate, one, 1.0).candidate(one) == candidate
        assert scheme != "w2a2" or "bitwise_wide" in seen


def test_beyond_all_counts_of_a_map_no_time_is_claimed() -> None:
    here = product("w4a8", MOST_TOKENS)
    measured = point(here, {"packed_large": 199.4}, 199.4)
    by = Dispatcher("NVIDIA H200", [policy((here, measured))])
    assert explain(here, by).us == 199.4
    beyond = explain(replace(here, m=2 * MOST_TOKENS), by)
    assert beyond.us is None and beyond.builtin_us is None and beyond.runner_up == "not measured"
    assert "measured at 8192 tokens" in beyond.why
    assert beyond.config == explain(here, by).config


def test_the_time_of_another_built_in_choice_is_not_given() -> None:
    """Where another is built in now, what was measured as built in was its predecessor's."""
    here = product("w4a8", 64)
    own = builtin(here)
    other = next(c for c in space(here).candidates if c.kernel == own.kernel and c != own)
    measured = Point(9.0, 5.0, {"padding to int8": Measured.of(other, here, 8.0)}, Measured.of(other, here, 9.0))
    found = explain(here, Dispatcher("NVIDIA H200", [policy((here, measured))]))
    assert found.builtin == own.name and found.builtin_us is None


def test_a_config_that_is_named_twice_at_a_count_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the built-in choice won it stands among the strategies, too, and its time there counted double."""
    monkeypatch.setattr(dispatching, "scaled", lambda candidate, us, there, product: us)
    monkeypatch.setattr(dispatching, "of_its_like", lambda candidate, us, there, own, product: us)
    lower, here, upper = (product("w4a8", m, 28672, 4096) for m in (1024, 1152, 1280))
    own = builtin(here)
    assert own == builtin(lower) == builtin(upper)
    other = next(c for c in space(here).candidates if c.kernel == own.kernel and c != own)

    def at(one: Product, own_us: float, other_us: float, won: Candidate) -> tuple[Product, Point]:
        default, rival = Measured.of(own, one, own_us), Measured.of(other, one, other_us)
        best, also = (default, (rival,)) if won == own else (rival, ())
        return one, Point(own_us, 5.0, {"padding to int8": best}, default, also)

    found = policy(at(lower, 30.0, 12.0, other), at(upper, 10.0, 26.0, own))  # 20 us in the mean, and 19
    assert Dispatcher("NVIDIA H200", [found]).choose(here).candidate == other
