"""How maps choose: a layer's own point, its neighbours, what runs without either, explain's reasons, and the cost."""

import functools
import itertools
import time
import timeit
from dataclasses import replace

import pytest
import torch

from anybit.choose.builtin import MOST_TOKENS, builtin, builtin_layout
from anybit.choose.choose import Map, work
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import FAMILIES, Candidate, Layout
from anybit.choose.policy import SHIPPED, Measured, Point, read
from anybit.choose.space import preserves_pdl_overlap, promising, space
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.bitplane.bitplane_problem import blocks_per_sm
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.tune.explain import explain
from cases import EXHAUSTIVE, in_turn
from cases_tune import point, policy, product

H200 = Device.named("sm_90a")
SHIPPED_MAP = read(SHIPPED / "nvidia-h200.json")


# -------- a layer's own points


def test_own_point_runs_its_fastest_config() -> None:
    one = product()
    by = Dispatcher("NVIDIA H200", [policy((one, point(one, {"sm90_bitplane_skinny": 9.5, "sm90_packed_gemm": 8.25})))])
    choice = by.choose(one)
    assert (choice.source, choice.candidate.kernel, choice.us) == (one, "sm90_packed_gemm", 8.25)
    in_planes = by.choose(one, Layout.planes)
    assert (in_planes.candidate.kernel, in_planes.us) == ("sm90_bitplane_skinny", 9.5)
    assert by.choose(replace(one, dtype=torch.bfloat16)).candidate.kernel == "sm90_packed_gemm"
    assert by.choose(replace(one, m=13)).source == one, "the nearest count that was measured"


def test_two_maps_the_first_decides_and_the_second_offers_neighbours() -> None:
    one, near = product(), product(n=4608)
    first = policy((one, point(one, {"sm90_packed_gemm": 9.0})))
    second = policy((one, point(one, {"sm90_packed_gemm": 5.0})), (near, point(near, {"sm90_packed_gemm": 7.0})))
    by = Dispatcher("NVIDIA H200", [first, second])
    assert (by.choose(one).us, by.choose(near).us) == (9.0, 7.0)


def test_between_two_counts_runs_what_fills_the_last_wave() -> None:
    """Times of an H200: tiles of 192 tokens take one wave at 1056 tokens, and two at 1280."""
    upper, here = product("w4a4", 1280, 4096, 16384), product("w4a4", 1056, 4096, 16384)
    large = {c.config.tile_m: c for c in space(upper).candidates if _tile(c, 2, 160) or _tile(c, 3, 192)}
    narrow, wide = (Measured.of(large[tokens], us) for tokens, us in ((160, 122.6), (192, 178.0)))
    lower = replace(here, m=1024)
    found = policy(
        (upper, Point(130.0, {"padding to int8": narrow})),
        (lower, Point(130.0, {"padding to int8": replace(wide, us=90.0)})),
    )
    assert Map([found]).choose(upper).candidate == large[160]
    assert Map([found]).choose(here).candidate == large[192]
    found.put(here, Point(130.0, {"padding to int8": narrow}))
    assert Map([found]).choose(here).candidate == large[160], "what was measured here decides"


def _tile(one: Candidate, row_warpgroups: int, tokens: int) -> bool:
    if one.kernel != "sm90_packed_gemm" or one.config.tile_m != tokens or one.config.span > 1 or one.config.direct:
        return False
    shape = one.config.row_warpgroups, one.config.split_k_warpgroups, one.config.cluster_k, one.config.cluster_n
    return shape == (row_warpgroups, 1, 1, 1)


def test_twice_the_tokens_run_in_a_tile_of_all_of_them() -> None:
    """Not in two of the tile that was measured, which would unpack every weight twice."""
    one = product("w4a16g128", 16)
    by = Map([policy((one, point(one, {"sm90_packed_gemm": 5.0})))])
    tiles = [getattr(by.choose(replace(one, m=m)).candidate.config, "tile_m", 0) for m in (16, 24, 32)]
    assert tiles == [16, 24, 32] and by.choose(replace(one, m=32)).us < 7


def test_few_tokens_take_the_count_above_alone() -> None:
    one = product("w4a16g128", 4)
    lower, upper = replace(one, m=2), replace(one, m=6)
    by = Map(
        [policy((lower, point(lower, {"sm90_packed_gemv": 1.0})), (upper, point(upper, {"sm90_packed_gemm": 9.0})))]
    )
    assert by.choose(one).source == upper
    assert by.choose(replace(one, m=1)).source == lower


def test_a_count_on_one_side_does_not_decide() -> None:
    """Above alone, or below alone for few tokens: the layer then asks its neighbours, too."""
    cases = (("w4a8", 600, (512, 1024), 512), ("w4a16g128", 4, (6, 2), 6), ("w4a16g128", 1, (1, 2), 1))
    for scheme, asked, counts, best in cases:
        own, near = product(scheme, counts[1]), product(scheme, counts[0], n=4608)
        kernel = "sm90_packed_gemm" if asked > 8 else "sm90_packed_skinny_f16"
        slow = "sm90_packed_gemm" if asked > 8 else "sm90_packed_gemv"
        by = Map([policy((own, point(own, {slow: 90.0})), (near, point(near, {kernel: 5.0})))])
        source = by.choose(replace(own, m=asked)).source
        assert source is not None and (source.n, source.m) == (4608, best)


# -------- neighbours


def test_nearest_layer_decides_where_none_of_its_own_was_measured() -> None:
    one, near, far = product(m=64), product(m=64, n=4608), product(m=64, n=65536, k=512)
    by = Map([policy((one, point(one, {"sm90_packed_gemm": 5.0})), (far, point(far, {"sm90_packed_gemm": 50.0})))])
    choice = by.choose(near)
    assert choice.source == one and choice.us > 5.0
    assert choice.candidate.why_not(near) is None
    assert choice.candidate.fields == by.choose(one).candidate.fields


def test_layers_measured_at_other_token_counts_crowd_out_no_neighbour() -> None:
    nearest = [product(m=2048, n=4096 + 128 * i) for i in range(20)]
    far, asked = product(m=64, n=16384), product(m=64)
    points = [(one, point(one, {"sm90_packed_gemm": 5.0})) for one in (*nearest, far)]
    assert Map([policy(*points)]).choose(asked).source == far


@pytest.mark.parametrize(
    ("measured", "asked"),
    [("w4a8", "w4a4"), ("w4a16g128", "w3a16g128"), ("w4a16g128", "w4a16g64asym"), ("w4a16g128", "w8a16g32")],
)
def test_formats_of_one_kind_lend_each_other_configs(measured: str, asked: str) -> None:
    there, here = product(measured, 64), product(asked, 64)
    choice = Map([policy((there, point(there, {"sm90_packed_gemm": 5.0})))]).choose(here)
    assert choice.source == there
    assert choice.candidate.activations == here.activations and choice.candidate.why_not(here) is None


@pytest.mark.parametrize(
    ("measured", "asked"), [("w4a8", "w4a16g128"), ("w4a8", "w4a8g128"), ("w4a8", "w4a8s24"), ("w4a8", "w4a8fp")]
)
def test_other_kinds_lend_nothing(measured: str, asked: str) -> None:
    there, here = product(measured, 64), product(asked, 64)
    choice = Map([policy((there, point(there, {"sm90_packed_gemm": 5.0})))]).choose(here)
    assert choice.source is None and choice.candidate == builtin(here)


SCHEMES = (
    "w1a16g128", "w2a16", "w3a16g64asym", "w4a16g128", "w4a16g64nf4", "w8a16g32", "w4a16g128s24", "w4a8", "w8a8",
    "w4a8g128", "w4a8fp", "w4a8s24", "w1a1", "w2a2", "w3a4", "w4a4-xasym", "w5a6",
)  # fmt: skip


@functools.cache
def shipped(gpu: str) -> Dispatcher:
    """The shipped map, on a GPU."""
    return Dispatcher(gpu, [SHIPPED_MAP])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_whatever_runs_by_default_runs_by_the_shipped_map(scheme: str, arch: str) -> None:
    """Other GPUs choose by the shipped map's neighbours, where configs are legal there."""
    by, device = shipped(Device.named(arch).name), Device.named(arch)
    mores = ({}, {"dtype": torch.bfloat16, "aligned": False, "y_aligned": False})
    every = list(itertools.product(((64, 128), (4104, 1100)), (1, 8, 17, 300), mores))
    for (n, k), m, more in every if EXHAUSTIVE else every[(SCHEMES.index(scheme) + device.capability) % 3 :: 3]:
        one = product(scheme, m, n, k, device=device, **more)
        try:
            builtin(one)
        except KernelError:
            with pytest.raises(KernelError, match="no kernel"):
                by.choose(one)
        else:
            for layout in (None, builtin_layout(one)):
                chosen = by.choose(one, layout).candidate
                assert chosen.why_not(one) is None
                assert layout in (None, chosen.layout)


def test_another_gpu_has_no_points_of_its_own() -> None:
    one = product("w4a16g128", 4, device=Device.named("sm_80"))
    by = Dispatcher("NVIDIA A100", [SHIPPED_MAP])
    assert by.choose(one).candidate.kernel == "sm80_packed_gemm"
    assert by.policies == [] and by.hints == [SHIPPED_MAP]


def test_own_map_of_another_architecture_decides() -> None:
    device = Device.named("sm_80")
    one = product("w4a16g128", 64, device=device)
    other = FAMILIES["sm80_packed_gemm"].configs(one)[-1]
    won = Candidate("sm80_packed_gemm", other, one.activations)
    mine = policy((one, Point(9.0, {"dequantize": Measured.of(won, 5.0)})), gpu=device.name)
    mine.origin.arch = "sm_80"
    choice = Dispatcher(device.name, [mine, SHIPPED_MAP]).choose(one)
    assert (choice.candidate, choice.us) == (won, 5.0) and won != builtin(one)


def test_no_illegal_config_ever_runs() -> None:
    """Whatever a map says, for every shape around it."""
    one = product(m=16)
    for candidate in space(one).candidates[::50]:
        by = Map([policy((one, Point(50.0, {candidate.strategy: Measured.of(candidate, 1.0)})))])
        for k in (576, 4096, 4224, 28672):
            for m in (12, 16, 32):
                other = product(m=m, k=k)
                assert by.choose(other).candidate.why_not(other) is None


def test_gathered_codes_run_no_kernel_for_few_tokens() -> None:
    one = product("w4a8", 1, act_order=True, columns=4096)
    assert Map([SHIPPED_MAP]).choose(one, Layout.tiles_a8).candidate.kernel == "sm90_packed_gemm"


def test_without_a_map_a_kernel_runs_by_default() -> None:
    for scheme in ("w4a8", "w2a2", "w4a16g128", "w2a16", "w4a8fp"):
        for m in in_turn(1, 3, 9, 100, 20000, at=len(scheme)):
            one = product(scheme, m)
            choice = Dispatcher("NVIDIA H200", []).choose(one)
            assert choice.source is None and choice.candidate == builtin(one)


def test_kernel_that_is_asked_for_runs() -> None:
    for n, k in ((6144, 4096), (28672, 4096), (1000, 2048)):
        for m in (1, 2):
            one = product("w4a16g128", m, n, k)
            chosen = Map([SHIPPED_MAP]).choose(one, Layout.tiles_a16, "sm90_packed_gemv").candidate
            assert chosen.kernel == "sm90_packed_gemv" and chosen.why_not(one) is None


def test_work_grows_by_waves() -> None:
    one = product("w4a8", 128, 64 * 132, 4096)
    config = FAMILIES["sm90_packed_gemm"].default(one)
    alone = replace(config, tile_m=128, row_warpgroups=1, split_k_warpgroups=1, cluster_k=1, cluster_n=1)
    candidate = Candidate("sm90_packed_gemm", alone, one.activations)
    assert work(candidate, replace(one, n=one.n + 64)) == 2 * work(candidate, one)
    assert work(candidate, replace(one, k=2 * one.k)) < 2 * work(candidate, one)


# -------- layouts


def test_a_layer_is_kept_in_the_layout_that_loses_least() -> None:
    few, many = product("w2a4", 1), product("w2a4", 1024)
    won = policy(
        (few, point(few, {"sm90_bitplane_skinny": 3.0, "sm90_packed_skinny": 4.0})),
        (many, point(many, {"sm90_bitplane_gemm": 60.0, "sm90_packed_gemm": 40.0})),
    )
    assert Map([won]).layout(few) is Layout.tiles_a8  # 1.33 and not 1.5 times
    won.put(few, point(few, {"sm90_bitplane_skinny": 3.0, "sm90_packed_skinny": 6.0}))
    assert Map([won]).layout(few) is Layout.planes
    assert Map([]).layout(few) is builtin_layout(few) is Layout.planes


# -------- few tokens, searches


def test_few_tokens_run_no_config_that_leaves_others_less_room() -> None:
    one = product("w4a8", 4, n=28672)
    own = builtin(one)
    deeper = replace(own, config=replace(own.config, min_shared_bytes=own.shared_bytes + one.device.shared_bytes // 2))
    assert preserves_pdl_overlap(one, own, own)
    assert not preserves_pdl_overlap(one, deeper, own)
    assert preserves_pdl_overlap(replace(one, m=64), deeper, own)
    pairs = [c for c in space(one).candidates if getattr(c.config, "min_blocks_per_sm", 1) > 1]
    assert not any(preserves_pdl_overlap(one, c, own) for c in pairs if c.kernel == "sm90_packed_gemm")


def test_few_tokens_may_run_blocks_of_which_two_fit_a_multiprocessor() -> None:
    one = product("w3a16g128", 4, n=6144)
    padded = Candidate("sm80_packed_digits", FAMILIES["sm80_packed_digits"].default(one), one.activations)
    own = replace(padded, config=replace(padded.config, min_shared_bytes=0))
    assert own.shared_bytes < padded.shared_bytes
    assert blocks_per_sm(padded.shared_bytes, H200) == 2
    assert preserves_pdl_overlap(one, padded, own)


@pytest.mark.parametrize(
    ("scheme", "m"), [("w2a2", 1), ("w2a4", 24), ("w4a16g128", 4), ("w8a16e4m3", 4), ("w4a8", 2000)]
)
def test_a_search_tries_what_would_run_what_won_nearby_and_every_family(scheme: str, m: int) -> None:
    one, by = product(scheme, m, n=28000), Map([SHIPPED_MAP])
    tried = promising(one, 6, by, 8)
    assert tried[0] == by.choose(one).candidate and len(set(tried)) == len(tried) < 200
    assert all(candidate.why_not(one) is None for candidate in tried)
    families = {name for name, family in FAMILIES.items() if name.startswith("sm90") and family.configs(one)}
    hopeless = {"sm90_bitplane_skinny", "sm90_bitplane_resident"} if m > 256 else set()
    if m > 32 and scheme == "w4a8":
        hopeless |= {name for name in families if "bitplane" in name}
    assert families - hopeless <= {candidate.kernel for candidate in tried}


# -------- maps in memory, explanations, look-ups


def test_what_every_family_runs_can_be_read_back_where_it_was_measured() -> None:
    for scheme, m, n, k in (("w2a2", 4096, 16384, 4096), ("w4a8", 1, 4096, 4096), ("w4a16g128", 4096, 4096, 4096)):
        parsed = Scheme.parse(scheme)
        one = LinearProblem(m, n, k, parsed.weights, parsed.activations)
        seen = set()
        for candidate in space(one).candidates:
            if candidate.kernel not in seen:
                seen.add(candidate.kernel)
                assert Measured.of(candidate, 1.0).candidate(one) == candidate
        assert scheme != "w2a2" or "sm90_bitplane_stacked" in seen


def test_explain_claims_a_time_only_where_it_was_measured() -> None:
    here = product("w4a8", MOST_TOKENS)
    by = Dispatcher("NVIDIA H200", [policy((here, point(here, {"sm90_packed_gemm": 199.4}, 199.4)))])
    assert explain(here, by).us == 199.4 and "it was the fastest at M = 8192" in explain(here, by).why
    for other in (
        replace(here, m=2 * MOST_TOKENS),
        replace(here, m=6000),
        replace(here, n=4608),
        product("w4a4", 8192),
    ):
        found = explain(other, by)
        assert found.us is None and found.expected_us and found.runner_up == "not measured"
        assert "by the times of w4a8 8192 x 4096 x 4096" in found.why
    assert "nothing near was measured" in explain(product("w4a16g128", 4), by).why


def test_choosing_takes_microseconds() -> None:
    by = Map([SHIPPED_MAP])
    for one, most in (
        (product("w4a8", 1, 6144), 1e-3),
        (product("w4a8", 130, 6144), 1e-3),
        (product("w5a8", 70, 5000), 5e-3),
    ):
        by.choose(one)
        taken = timeit.repeat(lambda one=one: by.choose(one), timer=time.process_time, number=20, repeat=5)
        assert min(taken) / 20 < most
