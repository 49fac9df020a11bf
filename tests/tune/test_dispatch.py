"""How a dispatcher uses maps: the rules of docs/tuning.md, explain's reasons, and the cost of a look-up."""

from dataclasses import replace

import pytest
import torch

from anybit.choose import dispatch as dispatching
from anybit.choose.builtin import MOST_TOKENS, builtin, builtin_layout
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import FAMILIES, Candidate, Layout
from anybit.choose.policy import Measured, Point
from anybit.choose.space import preserves_pdl_overlap, promising, space
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.scheme import Scheme
from anybit.tune.explain import explain
from cases_tune import point, policy, product

H200 = Device.named("sm_90a")


# -------- choices


def test_the_fastest_measured_config_runs() -> None:
    one = product()
    map_ = policy((one, point(one, {"sm90_bitplane_skinny": 9.5, "sm90_packed_gemm": 8.25})))
    choice = Dispatcher("NVIDIA H200", [map_]).choose(one)
    assert (choice.origin, choice.candidate.kernel, choice.us) == ("map", "sm90_packed_gemm", 8.25)
    by = explain(replace(one, m=13), Dispatcher("NVIDIA H200", [map_]))
    assert "at M = 16, by" in by.why, "the count that was measured, not the one that was asked for"
    # In one layout, its fastest; for 13 tokens, the measurement at 16.
    choice = Dispatcher("NVIDIA H200", [map_]).choose(replace(one, m=13), [Layout.planes])
    assert (choice.origin, choice.candidate.kernel, choice.us) == ("map", "sm90_bitplane_skinny", 9.5)
    # Halfway to a power of two, the power's point.
    assert Dispatcher("NVIDIA H200", [map_]).choose(replace(one, m=11)).origin == "map"
    # Integer products take the same time with either 16-bit output type.
    assert Dispatcher("NVIDIA H200", [map_]).choose(replace(one, dtype=torch.bfloat16)).origin == "map"


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
    won = policy((one, point(one, {"sm90_packed_gemm": 5.0}, default_us=10.0)))
    choice = Dispatcher("NVIDIA H200", [won]).choose(near)
    assert choice.origin == "expected"
    assert choice.candidate.why_not(near) is None
    assert Dispatcher("NVIDIA H200", [won]).choose(far).origin == "built in"
    tied = policy((one, point(one, {"sm90_packed_gemm": 9.9}, default_us=10.0)))
    assert Dispatcher("NVIDIA H200", [tied]).choose(near).origin == "built in"
    lost = policy((one, point(one, {"sm90_bitplane_skinny": 8.0, "sm90_packed_gemm": 12.0}, default_us=10.0)))
    assert Dispatcher("NVIDIA H200", [lost]).choose(near).candidate == builtin(near)


def test_between_two_measured_token_counts_runs_what_fills_the_last_round() -> None:
    """Times of an H200: tiles of 192 tokens take one wave at 1056 tokens, and two at 1280."""
    upper, here = product("w4a4", 1280, 4096, 16384), product("w4a4", 1056, 4096, 16384)
    large = {c.config.tile_m: c for c in space(upper).candidates if _tile(c, 2, 160) or _tile(c, 3, 192)}
    narrow, wide = (Measured.of(large[tokens], us) for tokens, us in ((160, 122.6), (192, 178.0)))
    lower = replace(here, m=1024)
    rival = Point(130.0, {"padding to int8": replace(wide, us=90.0)})
    found = policy((upper, Point(130.0, {"padding to int8": narrow})), (lower, rival))
    by = Dispatcher("NVIDIA H200", [found])
    assert by.choose(upper).candidate == large[160] and by.choose(upper).origin == "map"
    choice = by.choose(here)
    assert choice.candidate == large[192] and choice.origin == "expected" and "1280" in choice.source
    found.put(here, Point(130.0, {"padding to int8": narrow}))
    assert by.choose(here).candidate == large[160], "what was measured here decides"
    assert by.choose(here, [Layout.planes]).candidate.layout is Layout.planes


def test_5_and_6_tokens_of_4_bits_have_a_built_in_choice_of_their_own() -> None:
    down = {m: builtin(product("w4a16g128", m, k=14336)).kernel for m in (4, 5, 6, 7, 8)}
    assert down == {
        4: "sm90_packed_skinny_f16",
        5: "sm90_packed_skinny_f16",
        6: "sm90_packed_skinny_f16",
        7: "sm90_packed_gemm",
        8: "sm90_packed_gemm",
    }


@pytest.mark.parametrize(
    ("m", "us", "kernel"),
    [(1, 8.9, "sm90_bitplane_skinny"), (1, 8.7, "sm90_packed_skinny"), (16, 9.2, "sm90_packed_gemm")],
)
def test_few_tokens_change_their_layout_for_a_clear_gain_alone(m: int, us: float, kernel: str) -> None:
    one = product("w2a4", m)
    tiles = "sm90_packed_skinny" if m == 1 else "sm90_packed_gemm"
    measured = point(one, {"sm90_bitplane_skinny": 9.42, tiles: us}, 9.42)
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    assert by.choose(one).candidate.kernel == kernel
    assert by.choose(one, [Layout.tiles_a8]).candidate.kernel == tiles, "a layer in tiles runs from them"


@pytest.mark.parametrize(("us", "kernel"), [(8.6, "sm90_bitplane_skinny"), (8.2, "sm90_packed_skinny")])
def test_few_tokens_take_another_config_rather_than_another_layout(us: float, kernel: str) -> None:
    one = product("w2a4", 1)
    measured = point(one, {"sm90_bitplane_skinny": 9.0, "sm90_packed_skinny": us}, 9.9)
    other = next(
        c
        for c in space(one).candidates
        if c.kernel == "sm90_bitplane_skinny" and c != builtin(one) and preserves_pdl_overlap(one, c)
    )
    strategies = measured.strategies | {"bitwise": Measured.of(other, 9.0)}
    measured = replace(measured, strategies=strategies)
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    chosen = by.choose(one).candidate
    assert chosen.kernel == kernel and (kernel != "sm90_bitplane_skinny" or chosen == other)


@pytest.mark.parametrize(
    ("tiles", "kernel"), [(None, "sm90_bitplane_skinny"), (9.42, "sm90_bitplane_skinny"), (8.8, "sm90_packed_skinny")]
)
def test_another_layout_does_not_keep_the_built_in_config(tiles: float | None, kernel: str) -> None:
    """The winner by 5 % in the built-in layout runs, whatever wins by less than 6 % of it in another."""
    one = product("w2a4", 1)
    configs = (c for c in space(one).candidates if c.kernel == "sm90_bitplane_skinny" and c != builtin(one))
    other = next(c for c in configs if preserves_pdl_overlap(one, c))
    measured = point(
        one, {"sm90_bitplane_skinny": 9.45} | ({} if tiles is None else {"sm90_packed_skinny": tiles}), 10.0
    )
    strategies = measured.strategies | {"bitwise": Measured.of(other, 9.45)}
    measured = replace(measured, strategies=strategies)
    chosen = Dispatcher("NVIDIA H200", [policy((one, measured))]).choose(one).candidate
    assert chosen.kernel == kernel and (kernel != "sm90_bitplane_skinny" or chosen == other)


@pytest.mark.parametrize(("us", "origin"), [(200.0, "expected"), (100.0, "built in")])
def test_between_two_measured_token_counts_the_built_in_choice_must_be_beaten(us: float, origin: str) -> None:
    upper, here = product("w4a16g128", 1280, 4096, 16384), product("w4a16g128", 1056, 4096, 16384)
    other = next(c for c in space(upper).candidates if c.kernel == "sm90_packed_gemm" and c != builtin(upper))
    won = Measured.of(other, 150.0)
    found = policy((upper, Point(us, {"dequantize": won})))
    choice = Dispatcher("NVIDIA H200", [found]).choose(here)
    assert choice.origin == origin
    assert choice.candidate == (other if origin == "expected" else builtin(here))
    # The same decides for the other 16-bit type.
    alike = Dispatcher("NVIDIA H200", [found]).choose(replace(here, dtype=torch.bfloat16))
    assert alike.origin == ("expected" if origin == "expected" else "built in")
    assert (alike.candidate == builtin(replace(here, dtype=torch.bfloat16))) == (origin == "built in")


def _tile(one: Candidate, row_warpgroups: int, tokens: int) -> bool:
    if one.kernel != "sm90_packed_gemm" or one.config.tile_m != tokens:
        return False
    shape = one.config.row_warpgroups, one.config.split_k_warpgroups, one.config.cluster_k, one.config.cluster_n
    return shape == (row_warpgroups, 1, 1, 1)


def test_no_illegal_config_ever_runs() -> None:
    """Whatever a map says, for every shape around it."""
    one = product(m=16)
    for candidate in space(one).candidates[::25]:
        found = policy((one, Point(50.0, {candidate.strategy: Measured.of(candidate, 1.0)})))
        for k in (576, 4096, 4224, 28672):
            for m in (12, 16, 32):
                other = product(m=m, k=k)
                chosen = Dispatcher("NVIDIA H200", [found]).choose(other).candidate
                assert chosen.why_not(other) is None


def test_unknown_fields_fall_back() -> None:
    one = product()
    strange = Measured(1.0, "sm90_packed_gemm", (("tile_m", 16), ("speed", 11)))
    map_ = policy((one, Point(9.0, {"padding to int8": strange})))
    assert Dispatcher("NVIDIA H200", [map_]).choose(one).origin == "built in"
    with pytest.raises(KernelError, match="has no field 'speed'"):
        strange.candidate(one)
    with pytest.raises(KernelError, match=r"is of type int from 0 to 2\^31 - 1, not 'many'"):
        FAMILIES["sm90_packed_gemm"].rebuild(one, {"tile_m": "many"})


def test_few_tokens_run_no_config_that_leaves_others_less_room_than_the_built_in_one() -> None:
    one = product("w4a8", 4, n=28672)
    own = builtin(one)
    assert own.kernel == "sm90_packed_skinny"
    deeper = replace(own, config=replace(own.config, stages=own.config.stages + 2))
    least = min(own.config.prologue_stages, own.config.stages - 2)
    flatter = replace(own, config=replace(own.config, stages=own.config.stages - 2, prologue_stages=least))
    share = 0.75 * one.device.shared_bytes  # another kernel's limit
    large = {
        c: sm90_packed_gemm.shared_bytes(c.config) for c in space(one).candidates if c.kernel == "sm90_packed_gemm"
    }
    within = next(c for c, size in large.items() if size <= share)
    family = FAMILIES["sm90_packed_gemm"]
    most = family.module.shared_bytes(family.default(one))
    beyond = next(c for c, size in large.items() if share < size <= most and c.config.min_blocks_per_sm == 1)
    for won, runs in ((deeper, own), (flatter, flatter), (within, within), (beyond, own)):
        assert won.why_not(one) is None
        assert preserves_pdl_overlap(one, won) is (runs is not own)
    assert preserves_pdl_overlap(replace(one, m=64), deeper)
    eight = product("w4a8", 8, n=28672)
    assert builtin(eight).kernel == "sm90_packed_gemm" and preserves_pdl_overlap(eight, builtin(eight))


def test_bit_planes_of_few_tokens_may_take_half_of_a_multiprocessor() -> None:
    """Several of their blocks share one: w4a4 5120 x 5120 took 5.8 us with longer pipelines, 6.4 by default."""
    one = product("w4a4", 3, n=5120, k=5120)
    family = FAMILIES["sm90_bitplane_skinny"]
    own, half = family.module.shared_bytes(family.default(one)), one.device.shared_bytes // 2 - 1024
    sizes = {c: family.module.shared_bytes(c) for c in family.configs(one) if c.min_blocks_per_sm == 1}
    larger = next(c for c, size in sizes.items() if own < size <= half)
    largest = next(c for c, size in sizes.items() if size > max(own, half))
    assert [preserves_pdl_overlap(one, Candidate(family.name, c, one.activations)) for c in (larger, largest)] == [
        True,
        False,
    ]


def test_a_layer_is_kept_in_the_layout_that_loses_least() -> None:
    few, many = product("w2a4", 1), product("w2a4", 1024)
    won = policy(
        (few, Point(4.0, point(few, {"sm90_bitplane_skinny": 3.0, "sm90_packed_skinny": 4.0}).strategies)),
        (many, Point(40.0, point(many, {"sm90_bitplane_skinny": 60.0, "sm90_packed_gemm": 40.0}).strategies)),
    )
    assert Dispatcher("NVIDIA H200", [won]).layout(few) is Layout.tiles_a8  # 1.33 and not 1.5 times
    lost = policy(
        (few, Point(4.0, point(few, {"sm90_bitplane_skinny": 3.0, "sm90_packed_skinny": 6.0}).strategies)),
        (many, Point(40.0, point(many, {"sm90_bitplane_skinny": 60.0, "sm90_packed_gemm": 40.0}).strategies)),
    )
    assert Dispatcher("NVIDIA H200", [lost]).layout(few) is Layout.planes


@pytest.mark.parametrize(("scheme", "m"), [("w2a2", 1), ("w2a4", 24), ("w1a1", 200), ("w4a4", 2000)])
def test_a_search_tries_every_kind_of_bit_plane_tile(scheme: str, m: int) -> None:
    one = product(scheme, m, n=28672)
    families = [FAMILIES[f"sm90_bitplane_{name}"] for name in ("gemm", "skinny", "resident")]
    many, few, resident = ([*family.kinds(one)] for family in families)
    kinds = many + few + resident
    assert len(kinds) == len(set(kinds)) <= 100
    assert ({64, 128} <= {config.tile_m for config in many}) == (m > 8)
    assert bool(few + resident) == (m <= 64)
    whole = {config for family in families for config in family.configs(one)}
    assert whole.issuperset(kinds)
    tried = {c.config for c in promising(one, 4)}
    assert tried.issuperset(kinds)
    assert not FAMILIES["sm90_packed_gemm"].kinds(one)
    rings = {config for family in families for config in family.kinds(one, rings=True)}
    assert set(kinds) <= rings <= whole
    if 8 < m <= 64:  # the best on an H200, previously untried: two stages, and more chunks in the prologue
        assert {2, 4, 6, 8} <= {config.a_stages for config in families[1].kinds(one, rings=True)}
        of_tokens = {one for one in families[2].configs(one) if one.a_operand.name == "activations"}
        assert of_tokens <= rings and max(config.prologue_stages for config in of_tokens) > 2
    assert families[2].kinds(product(scheme, 100, n=576, k=576))  # large tiles leave SMs idle


def test_few_tokens_of_16_bit_activations_run_by_times_of_their_own_weights_alone() -> None:
    """There the built-in kernel depends on the weights' bits; float16 and bfloat16 have the same."""
    one = product("w4a16g128", 4, n=4096, k=14336)
    rooms = (c for c in space(one).candidates if c.kernel == builtin(one).kernel and c != builtin(one))
    other = next(c for c in rooms if preserves_pdl_overlap(one, c))
    measured = Point(20.0, {"dequantize": Measured.of(other, 15.0)})
    by = Dispatcher("NVIDIA H200", [policy((one, measured))])
    assert by.choose(one).candidate == other
    for scheme in ("w3a16g128", "w4a16g64", "w4a16g128asym"):
        there = product(scheme, 4, n=4096, k=14336)
        assert by.choose(there).candidate == builtin(there), scheme
        assert explain(there, by).why == "nothing was measured for it: it is the built-in choice"
    near = product("w4a16g128", 4, n=4096, k=12288)
    assert by.choose(near).candidate == builtin(near)
    assert by.choose(replace(one, dtype=torch.bfloat16)).candidate.fields == other.fields


@pytest.mark.parametrize(("m", "origin"), [(1, "built in"), (8, "built in"), (16, "expected")])
def test_few_tokens_do_not_run_by_times_of_another_layer(m: int, origin: str) -> None:
    """A config that had won for 10,240 x 8,192 made a quarter of 70B's layers 10 % slower at one token."""
    there, here = product("w4a8", m, n=10240, k=8192), product("w4a8", m, n=8192, k=7168)
    other = next(
        c for c in space(there).candidates
        if c.kernel == builtin(there).kernel and c.fields not in (builtin(there).fields, builtin(here).fields)
        and c.why_not(here) is None and preserves_pdl_overlap(here, c)
    )  # fmt: skip
    by = Dispatcher("NVIDIA H200", [policy((there, Point(20.0, {"padding to int8": Measured.of(other, 1.0)})))])
    assert by.choose(there).candidate == other
    assert by.choose(here).origin == origin


def test_fewer_bits_run_on_tiles_what_was_measured_with_eight() -> None:
    """The kernels are the same: bytes, whatever their rounding."""
    measured, one = product("w4a8", 256), product("w4a4", 256)
    by = Dispatcher("NVIDIA H200", [policy((measured, point(measured, {"sm90_packed_gemm": 5.0})))])
    choice = by.choose(one)
    assert choice.origin == "expected" and choice.candidate.fields == by.choose(measured).candidate.fields
    assert choice.candidate.activations == one.activations and choice.candidate.why_not(one) is None
    assert by.choose(product("w2a2", 256)).origin == "built in"  # bit planes
    assert by.choose(product("w4a4-xasym", 256)).origin == "built in"
    assert by.choose(one, [Layout.planes]).candidate.layout is Layout.planes


def test_bfloat16_runs_what_won_clearly_in_float16() -> None:
    """The kernels differ only in how codes are converted; the shipped map is of float16, and models are bfloat16."""
    measured, one = product("w4a16g128", 64), product("w4a16g128", 64, dtype=torch.bfloat16)
    won = policy((measured, point(measured, {"sm90_packed_gemm": 10.0})))
    choice = Dispatcher("NVIDIA H200", [won]).choose(one)
    expected = won.exact(measured).strategies["dequantize"]
    assert (choice.origin, choice.us) == ("expected", 0.0) and "float16" in choice.source
    assert choice.candidate == expected.candidate(one) != builtin(one)
    hardly = policy((measured, point(measured, {"sm90_packed_gemm": 19.8})))
    assert Dispatcher("NVIDIA H200", [hardly]).choose(one).candidate == builtin(one)
    both = policy(
        (measured, point(measured, {"sm90_packed_gemm": 10.0})), (one, point(one, {"sm90_packed_gemm": 19.0}))
    )
    assert Dispatcher("NVIDIA H200", [both]).choose(one).us == 19.0, "what was measured in its own type decides"
    few = replace(measured, m=4), replace(one, m=4)
    decided = policy((few[0], point(few[0], {"sm90_packed_skinny": 1.0})))
    assert Dispatcher("NVIDIA H200", [decided]).choose(few[1]).candidate.kernel == "sm90_packed_skinny"


def test_other_codes_and_groups_run_what_won_clearly_with_those_of_maps() -> None:
    """Maps hold 4 symmetric bits in groups of 128; checkpoints have zero points, smaller groups, or fewer bits."""
    measured = product("w4a16g128", 64)
    won = policy((measured, point(measured, {"sm90_packed_gemm": 10.0})))
    expected = won.exact(measured).strategies["dequantize"]
    for scheme in ("w4a16g128asym", "w4a16g64", "w4a16g32"):
        for dtype in (torch.float16, torch.bfloat16):
            one = product(scheme, 64, dtype=dtype)
            choice = Dispatcher("NVIDIA H200", [won]).choose(one)
            assert choice.origin == "expected" and "w4a16g128" in choice.source, (scheme, dtype)
            assert choice.candidate == expected.candidate(one) != builtin(one)
    hardly = policy((measured, point(measured, {"sm90_packed_gemm": 19.8})))
    for scheme in ("w4a16g128asym", "w8a16g128", "w4a16", "w4a16g128bipolar"):
        one = product(scheme, 64)
        maps = [hardly] if scheme.endswith("asym") else [won]
        assert Dispatcher("NVIDIA H200", maps).choose(one).candidate == builtin(one), scheme
    eight, groups = product("w4a8", 64), product("w4a8g128", 64)  # its sums are kept differently
    bytes_ = policy((eight, point(eight, {"sm90_packed_gemm": 10.0})))
    assert Dispatcher("NVIDIA H200", [bytes_]).choose(groups).candidate == builtin(groups)


def test_what_every_family_runs_can_be_read_back_where_it_was_measured() -> None:
    """Also for families that only run many tokens: a map's points of stacked planes were ignored."""
    for scheme, m, n, k in (("w2a2", 4096, 16384, 4096), ("w4a8", 1, 4096, 4096), ("w4a16g128", 4096, 4096, 4096)):
        parsed = Scheme.parse(scheme)
        one = LinearProblem(m, n, k, parsed.weights, parsed.activations)
        seen = set()
        for candidate in space(one).candidates:
            if candidate.kernel not in seen:
                seen.add(candidate.kernel)
                assert Measured.of(candidate, 1.0).candidate(one) == candidate
        assert scheme != "w2a2" or "sm90_bitplane_stacked" in seen


def test_beyond_all_counts_of_a_map_no_time_is_claimed() -> None:
    here = product("w4a8", MOST_TOKENS)
    measured = point(here, {"sm90_packed_gemm": 199.4}, 199.4)
    by = Dispatcher("NVIDIA H200", [policy((here, measured))])
    assert explain(here, by).us == 199.4
    beyond = explain(replace(here, m=2 * MOST_TOKENS), by)
    assert beyond.us is None and beyond.builtin_us is None and beyond.runner_up == "not measured"
    assert "at M = 8192" in beyond.why
    assert beyond.config == explain(here, by).config


def test_use_forgets_what_was_decided() -> None:
    memories = (bitwise._plans, packed._plans)
    for memory in memories:
        memory[()] = None  # type: ignore[index]
    dispatching.use()
    assert not any(memories)
