"""Decode attention and cache packing on the CPU, thread by thread: the shared cases, made small."""

import dataclasses

import pytest
import torch

import emulate
from anybit.cache.attention import decode_reference
from anybit.cache.kvcache import KVCache
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.decode import decode as kernel
from anybit.ops import kv
from cases import EXHAUSTIVE
from cases_decode import Case, problem, relative_error

LENGTHS = (260, 7, 128, 390)  # two packed blocks and a part, one short, one full, and enough to split among blocks


def small(format: str, **kw) -> Case:
    return Case(
        format, **{"lengths": tuple(max(n, kw.get("queries", 1)) for n in LENGTHS), "heads": 4, "kv_heads": 1, **kw}
    )


MEMBERS = [
    small("kv4g128", heads=8, kv_heads=2),
    small("kv2g128", data="spiky"),
    small("kv8g32t", bf16=True),
    small("k16v4", head_dim=64),
    small("k2v16g32", bf16=True, queries=3),
    small("kv4g32", head_dim=96, heads=3, softcap=20.0),
    small("kv4t", head_dim=256, heads=2, page=256),
    small("kv2", page=64, heads=12, sinks=True),
    small("kv4g128", queries=5, window=130, data="outliers"),
    small("kv4", queries=2, alibi=True, data="huge values"),
    small("kv2g32t", head_dim=64, bf16=True),
    small("kv4g128t", window=150, heads=2, queries=2, data="outliers"),
    small("k4v2", heads=1, softcap=20.0, data="outliers"),
]


def run(case: Case, arch="sm_90a", blocks=3, seed=0, tolerance=0.0, make=kernel.on_a_line, empty=(), **kw):
    """Compare a step with the reference. make: a problem's config on a device.  empty: rows of empty sequences."""
    device = dataclasses.replace(Device.named(arch), sms=blocks)
    cache, sequences, q = case.build("cpu")
    want, want_lse = decode_reference(q, cache, 1, sequences, case.masks(), precision=torch.float64)
    for row in empty:
        cache.lengths[sequences[row]] = 0
    config = make(kv.problem_of(q, cache.view(0), case.masks()), device)
    launch = kv.prepare(q, cache.view(1), cache.row_pointer(sequences), case.masks(), device, config)
    emulate.run(launch.kernel, launch.params, launch.grid, seed=seed, **{"resident": blocks} | kw)
    assert launch.out.isfinite().all() and not launch.out[list(empty)].any()
    assert not empty or (launch.lse[list(empty)] == -torch.inf).all() != case.sinks
    rows = [row for row in range(len(q)) if row not in empty]
    assert relative_error(launch.out[rows], want[rows]) < (tolerance or (1e-2 if case.bf16 else 2e-3))
    apart = 2e-2 if case.bf16 or tolerance else 4e-3
    torch.testing.assert_close(launch.lse[rows], want_lse[rows], rtol=1e-3, atol=apart)


def made(warps: int, stages: int, **change):
    """Makes a config with these warps and stages, and fields changed."""
    return lambda problem, device: dataclasses.replace(kernel.make(problem, device, warps, stages), **change)


@pytest.fixture
def emulated(monkeypatch):
    """Launches of ``ops.kv`` run on the emulator."""

    def launch(kernel, params, grid, *, pdl, device):
        emulate.run(kernel, params, grid, resident=64)

    monkeypatch.setattr(kv.jit, "launch", launch)
    monkeypatch.setattr(kv.Device, "of", lambda tensor: Device.named("sm_90a"))


@pytest.mark.parametrize("case", MEMBERS, ids=str)
def test_against_the_dequantized_cache(case: Case):
    run(case)


@pytest.mark.parametrize("case", [small("kvfp4"), small("kvfp4", head_dim=64, heads=6, bf16=True, window=150)], ids=str)
def test_floats_of_4_bits_on_the_tensor_cores_of_sm_120(case: Case):
    """Queries and probabilities are two-term 4-bit floats here: accurate to about 2^-7; not run on hardware yet."""
    run(case, arch="sm_120a", tolerance=1.5e-2)


@pytest.mark.parametrize("format", ["kv8", "kv8g32t"])
def test_small_probabilities_keep_their_bits(format: str):
    """Times the small scales of 8-bit values, they were subnormal in float16: errors over 2e-3 instead of 3e-4."""
    run(small(format, data="sink", lengths=(260, 390)), tolerance=1e-3)


@pytest.mark.parametrize("case", [small("kv8"), small("kv8g128", heads=12, queries=2, window=200)], ids=str)
def test_keys_of_8_bits_by_channel_see_what_float16_queries_round_off(case: Case):
    run(dataclasses.replace(case, data="outliers", lengths=(260, 390)), tolerance=7e-4)


@pytest.mark.parametrize("case", MEMBERS if EXHAUSTIVE else MEMBERS[::4], ids=str)
def test_with_copies_of_the_older_architecture(case: Case):
    run(case, arch="sm_80", seed=1)


def test_other_schedules_and_splits_give_the_same():
    for seed, blocks in ((1, 1), (2, 7)):
        run(MEMBERS[0], seed=seed, blocks=blocks)


@pytest.mark.parametrize(("pieces", "length"), [(1, 1500), (2, 1500), (2, 5000)])
def test_a_pair_of_many_parts(pieces: int, length: int):
    """More than 32 blocks have parts of one pair, and of its neighbours: one or two warps of the last merge a row."""
    case = small("kv2g128", lengths=(length, 40), heads=4, kv_heads=1)
    run(case, blocks=41, seed=pieces, make=made(2, 2, merge_warps=pieces))


@pytest.mark.parametrize(
    ("case", "blocks", "warps", "pieces"),
    [
        (small("kv16", bf16=True), 8, 4, 2),
        (small("kv16", heads=8, kv_heads=2, lengths=(1, 1025, 640)), 4, 2, 1),
        (small("kv4g128", heads=2, queries=2, window=130), 2, 2, 1),
        (small("kv8", heads=1, sinks=True), 2, 3, 2),
        (small("kv2g32", head_dim=96, heads=12, alibi=True), 8, 2, 1),
    ],
    ids=str,
)
def test_a_cluster_for_each_pair(case: Case, blocks: int, warps: int, pieces: int):
    """Fewer and more items than warps, an empty sequence, tasks for some blocks only, and for each several."""
    written = ("q", "residual", "out", "lse")
    make = made(warps, 2, pair_blocks=blocks, merge_warps=pieces)
    run(case, seed=blocks, make=make, empty=(0,), dependent=written)


def test_a_few_short_sequences_get_a_cluster_for_each_pair():
    device = Device.named("sm_90a")

    def blocks(format: str, on: Device = device, **kw: object) -> int:
        case = dataclasses.replace(Case(format, heads=32, kv_heads=8, lengths=(512,)), **kw)
        return kernel.default(problem(case), on).pair_blocks

    assert blocks("kv16") == blocks("kv4g128") == blocks("kv16", lengths=(4000,)) == 4
    assert not (blocks("kv4g128", lengths=(4000,)) or blocks("kv16", lengths=(4100,)) or blocks("kv16", lengths=(9, 9)))
    assert not (blocks("kv16", on=Device.named("sm_80")) or blocks("kv16", on=Device.named("sm_120a")))


def test_more_sequences_than_a_warp_has_lanes():
    """Each lane then handles several rows, and finding a unit's row takes one or more passes."""
    run(small("kv2g128", lengths=(130, 1, 3, 260, 17) * 7, heads=2, head_dim=64), blocks=4)


@pytest.mark.parametrize(("stages", "ahead", "after"), [(2, 1, 0), (3, 1, 1), (2, 0, 2)])
def test_what_l2_is_asked_for_ahead(stages: int, ahead: int, after: int):
    """Only for long ranges: so one block of two warps here, whose ranges cross heads and rows."""
    make = made(2, stages, l2_early=ahead, l2_late=after)
    run(MEMBERS[0], blocks=1, make=make, resident=4, dependent=("q", "residual", "out"))


def test_queries_and_residual_are_not_touched_before_the_previous_kernel_ended():
    run(MEMBERS[0], dependent=("q", "residual", "out", "partial", "partial_state", "arrivals"))


def test_a_fixed_split_makes_results_independent_of_the_batch():
    case = MEMBERS[0]
    cache, sequences, q = case.build("cpu")

    def together(rows: list[int], blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = dataclasses.replace(Device.named("sm_90a"), sms=blocks)
        launch = kv.prepare(
            q[rows], cache.view(1), cache.row_pointer([sequences[i] for i in rows]), case.masks(), device, split=256
        )
        emulate.run(launch.kernel, launch.params, launch.grid, resident=blocks)
        return launch.out, launch.lse

    out, lse = together([0, 1, 2, 3], 3)
    want, _ = decode_reference(q, cache, 1, sequences, precision=torch.float64)
    assert relative_error(out, want) < 2e-3
    for rows, blocks in (([3], 2), ([2, 0], 1)):
        some, some_lse = together(rows, blocks)
        assert torch.equal(some, out[rows]) and torch.equal(some_lse, lse[rows])


def test_lengths_from_zero_as_only_the_device_sees_them():
    """Rows of empty sequences give 0 and a log-sum-exp of -inf, as in a graph before their first token."""
    run(MEMBERS[0], empty=(0, 2))


@pytest.mark.parametrize("error", sorted(kv_page.WRONG))
def test_what_is_out_of_range_is_reported_by_the_checked_kernels(error: int):
    device = dataclasses.replace(Device.named("sm_90a"), sms=2)
    cache, sequences, q = MEMBERS[0].build("cpu")
    rows = cache.row_index(sequences, torch.int32)
    if error == 1:
        cache.lengths[sequences[2]] = 1 << 20
    elif error == 2:
        cache.table[sequences[0], 1] = 10_000
    else:
        rows[1] = 77
    config = kernel.on_a_line(kv.problem_of(q, cache.view(0)), device, checked=True)
    errors = torch.zeros(1, dtype=torch.int32)
    launch = kv.prepare(
        q, cache.view(1), cache.row_pointer(sequences), MEMBERS[0].masks(), device, config, errors=errors
    )
    emulate.run(launch.kernel, launch.params, launch.grid, resident=2)
    assert int(errors) == error
    with pytest.raises(KernelError, match="layer 1"):
        kv_page.report(error, 1)


@pytest.mark.parametrize("error", sorted(kv_page.WRONG))
def test_packing_reports_what_is_out_of_range(error: int, emulated, monkeypatch):
    monkeypatch.setenv("ANYBIT_DEBUG", "1")
    cache = KVCache("kv4g128", layers=1, kv_heads=1, head_dim=64, sequences=3, capacity=256)
    cache.add()
    sequence = cache.add()
    cache.extend([sequence], 129)
    k = torch.randn(1, 129, 1, 64).half()
    if error == 1:
        cache.lengths[sequence] = 1 << 20
    elif error == 2:
        cache.table[sequence, 0] = 55
    else:
        cache.row_index([sequence], torch.int32)[0] = 9
    with pytest.raises(KernelError, match=kv_page.WRONG[error][:20]):
        kv.store(cache.view(0), cache.row_pointer([sequence]), k, k)


PACKED = [
    *(MEMBERS[i] for i in (0, 2, 3, 5, 6)),
    small("kv2g128", data="edges"),
    small("kv4t", data="edges", bf16=True),
    small("k2v16g32t", data="edges", head_dim=96, kv_heads=2),
    small("k16v2g32", data="edges", head_dim=64, bf16=True),
    small("kv8g32", head_dim=256, lengths=(260,)),
    small("kv8g128t", lengths=(260, 390)),
    small("kv2g128t", data="edges", queries=3, lengths=(130, 257)),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packing_gives_the_pages_of_the_reference(case: Case, emulated, monkeypatch):
    here, *_ = case.build("cpu")
    monkeypatch.setattr(
        KVCache,
        "_write_torch",
        lambda self, layer, rows, k, v: kv.run(kv.storing(self.view(layer), self.row_pointer(rows), k, v), -1),
    )
    there, *_ = case.build("cpu")
    assert torch.equal(here.residual[1].view(torch.int16), there.residual[1].view(torch.int16))
    wrong = (here.pages[1] != there.pages[1]).nonzero()
    assert not len(wrong), wrong[:8]


@pytest.mark.parametrize("format", ["kv4g128", "kv2g32t"])
def test_packing_what_is_in_the_residual_already(format: str, emulated):
    cache = KVCache(format, layers=1, kv_heads=2, head_dim=128, sequences=2, capacity=512)
    sequences = [cache.add(), cache.add()]
    tokens = torch.randn(2, 2, 130, 2, 128, generator=torch.Generator().manual_seed(3)).half()
    for begin, end in ((0, 127), (127, 130)):  # the second step completes the window
        cache.extend(sequences, end - begin)
        cache.write(0, sequences, tokens[0, :, begin:end], tokens[1, :, begin:end])
    want = cache.pages.clone()
    cache.pages.zero_()
    assert cache.completes(sequences, 3)
    kv.pack(cache.view(0), cache.row_pointer(sequences), len(sequences), 3)
    assert torch.equal(cache.pages, want)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("format", "known"), [("kv4g128", True), ("kv2g32t", False), ("kv8g128t", True), ("k16v2g32", False)]
)
def test_one_token_completes_a_window(format: str, stored: bool, known: bool, emulated, monkeypatch):
    """The rest of the window is in the ring, with or without that token; reading a length too early is detected."""

    def launch(kernel, params, grid, *, pdl, device):
        if not known:  # no sequence is assumed present: before the previous kernel has ended, lengths seem to be 0
            params = dataclasses.replace(params, sequences_count=0)
        emulate.run(kernel, params, grid, resident=64, dependent=("k", "v"))

    cache = KVCache(format, layers=1, kv_heads=1, head_dim=64, sequences=2, capacity=512)
    sequences = [cache.add(), cache.add()]
    tokens = torch.randn(2, 2, 256, 1, 64, generator=torch.Generator().manual_seed(5)).half()
    for begin, end in ((0, 255), (255, 256)):
        before = cache.residual.clone(), cache.pages.clone()
        cache.extend(sequences, end - begin)
        cache.write(0, sequences, *tokens[:, :, begin:end])
    want = cache.residual.clone(), cache.pages.clone()
    cache.pages.copy_(before[1])
    monkeypatch.setattr(kv.jit, "launch", launch)
    if stored:
        kv.pack(cache.view(0), cache.row_pointer(sequences), len(sequences), 1)
    else:
        cache.residual.copy_(before[0])
        kv.run(kv.storing(cache.view(0), cache.row_pointer(sequences), *tokens[:, :, 255:]), -1)
    assert torch.equal(cache.pages, want[1])
    assert torch.equal(cache.residual.view(torch.int16), want[0].view(torch.int16))
