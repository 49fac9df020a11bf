"""Decode attention and the packing of the cache on the CPU, thread by thread: the cases of every rung, made small."""

import dataclasses

import pytest
import torch

import emulate
from anybit import kvcache
from anybit.attention import decode_reference, prepare, problem_of
from anybit.device import Device
from anybit.kernels import decode as kernel
from anybit.kvcache import KVCache
from cases_decode import Case, relative_error

pytestmark = pytest.mark.emulate

LENGTHS = (260, 7, 128, 390)  # two packed blocks and a part, one short, one full, and enough to share among blocks


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
]


def run(case: Case, arch: str = "sm_90a", blocks: int = 3, seed: int = 0, **kw):
    device = dataclasses.replace(Device.named(arch), sms=blocks)
    cache, sequences, q = case.build("cpu")
    launch = prepare(q, cache, 1, sequences, case.masks(), device)
    emulate.run(launch.kernel, launch.params, launch.grid, seed=seed, resident=blocks, **kw)
    want, want_lse = decode_reference(q, cache, 1, sequences, case.masks(), precision=torch.float64)
    assert launch.out.isfinite().all()
    assert relative_error(launch.out, want) < (1e-2 if case.bf16 else 2e-3)
    torch.testing.assert_close(launch.lse, want_lse, rtol=1e-3, atol=2e-2 if case.bf16 else 4e-3)


@pytest.mark.parametrize("case", MEMBERS, ids=str)
def test_against_the_dequantized_cache(case: Case):
    run(case)


@pytest.mark.parametrize("case", MEMBERS[::3], ids=str)
def test_with_copies_of_the_older_architecture(case: Case):
    run(case, arch="sm_80", seed=1)


def test_other_schedules_and_splits_give_the_same():
    for seed, blocks in ((1, 1), (2, 7)):
        run(MEMBERS[0], seed=seed, blocks=blocks)


def test_queries_and_residual_are_not_touched_before_the_previous_kernel_ended():
    run(MEMBERS[0], dependent=("q", "residual", "out", "partial", "partial_state", "arrivals"))


def test_a_page_out_of_range_is_reported_by_the_checked_kernel():
    device = dataclasses.replace(Device.named("sm_90a"), sms=2)
    cache, sequences, q = MEMBERS[0].build("cpu")
    cache.table[sequences[0], 1] = 10_000
    config = kernel.default(problem_of(q, cache), device, checked=True)
    errors = torch.zeros(1, dtype=torch.int32)
    launch = prepare(q, cache, 1, sequences, MEMBERS[0].masks(), device, config, errors=errors)
    emulate.run(launch.kernel, launch.params, launch.grid, resident=2)
    assert int(errors) == 2


@pytest.mark.parametrize("case", [*MEMBERS[:4], MEMBERS[5], MEMBERS[6]], ids=str)
def test_packing_gives_the_pages_of_the_reference(case: Case, monkeypatch):
    def launch(kernel, params, grid, *, pdl):
        emulate.run(kernel, params, grid, resident=64)

    here, *_ = case.build("cpu")
    monkeypatch.setattr(kvcache.jit, "launch", launch)
    monkeypatch.setattr(kvcache.Device, "of", lambda tensor: Device.named("sm_90a"))
    monkeypatch.setattr(KVCache, "_write_torch", KVCache._write_kernel)
    there, *_ = case.build("cpu")
    assert torch.equal(here.residual[1], there.residual[1])
    assert torch.equal(here.pages[1], there.pages[1])
