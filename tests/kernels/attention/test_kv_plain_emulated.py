"""Attention over plain pages on the CPU, thread by thread."""

import dataclasses

import pytest
import torch

import emulate
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.kernels.attention.decode import decode as kernels
from anybit.ops import kv, kv_plain
from cases_plain import CASES, TOLERANCE, Case, Pool


@pytest.fixture
def launched(monkeypatch):
    """Launches of ``kv_plain`` run in the emulator, on a device whose blocks ``launched`` says."""
    found = {"blocks": 3, "arch": "sm_90a", "overlaps": []}

    def launch(kernel, params, grid, *, pdl=False, device=None):
        found["overlaps"].append(pdl)
        dependent = ("q", "out", "partial", "partial_state", "arrivals") if pdl else ()
        emulate.run(kernel, params, grid, resident=64, dependent=dependent)

    monkeypatch.setattr(kv_plain.jit, "launch", launch)
    monkeypatch.setattr(
        kv_plain.Device, "of", lambda _: dataclasses.replace(Device.named(found["arch"]), sms=found["blocks"])
    )
    return found


def attend(case: Case, seed: int = 0, config: kernels.Config | None = None) -> float:
    pool = Pool(case, seed)
    kv_plain.decode(
        pool.q, pool.keys, pool.values, pool.table, pool.lengths, case.masks(),
        out=pool.out, capacity=case.capacity, overlaps=True, config=config,
    )  # fmt: skip
    return pool.error()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, launched):
    assert attend(case) < TOLERANCE[case.bf16]
    assert launched["overlaps"] == [True]


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_on_the_older_architecture(case: Case, launched):
    launched["arch"] = "sm_80"
    assert attend(case, seed=1) < TOLERANCE[case.bf16]
    assert launched["overlaps"] == [False]


@pytest.mark.parametrize(("warps", "stages", "chunk", "bulk"), [(2, 2, 16, True), (4, 3, 16, False), (3, 4, 32, False)])
def test_other_ways_to_copy(warps: int, stages: int, chunk: int, bulk: bool, launched):
    case = CASES[0]
    device = dataclasses.replace(Device.named("sm_90a"), sms=5)
    launched["blocks"] = 5
    config = kernels.make(case.problem, device, warps, stages, bulk=bulk, chunk=chunk)
    assert attend(case, config=config) < TOLERANCE[case.bf16]


def test_what_it_does_not_read_is_refused_by_name():
    case = CASES[0]
    pool = Pool(case)
    good = {name: getattr(pool, name) for name in ("q", "keys", "values", "table", "lengths", "out")}
    bad = [
        ("q", pool.q.float()),
        ("out", pool.out.transpose(0, 1)),
        ("keys", pool.keys[..., ::2]),
        ("values", pool.values.to(torch.bfloat16)),
        ("table", pool.table.long()),
        ("lengths", pool.lengths[:2]),
    ]
    for name, tensor in bad:
        with pytest.raises(KernelError, match=f"{name} must be"):
            kv_plain.decode(**{**good, name: tensor}, capacity=1000, overlaps=False)


def asked(capacity: int, sequences: int, head_dim: int = 128, dtype: torch.dtype = torch.float16) -> kernels.Problem:
    return kv_plain.problem(16, 32, 8, head_dim, dtype, kv_plain.NO_MASKS, capacity, sequences)


def test_heads_and_types_that_no_kernel_reads_are_refused():
    with pytest.raises(LayerError, match="for a paged KV cache, not 72"):
        asked(1000, 4, head_dim=72)
    with pytest.raises(KernelError, match="float32"):
        asked(1000, 4, dtype=torch.float32)
    with pytest.raises(KernelError, match="32 query heads cannot share 5 KV heads"):
        kv_plain.kernels_for(dataclasses.replace(asked(1000, 4), kv_heads=5), Device.named("sm_90a"))


def test_how_many_long_sequences_are_attended_together():
    """Work units times blocks must fit 32 bits: many long sequences get larger chunks, too many a refusal."""
    device = Device.named("sm_90a")
    assert len(kv_plain.kernels_for(asked(8192, 1024), device)) == 1024
    found = kv_plain.kernels_for(asked(131072, 1024), device)
    most = len(found)
    assert 512 < most < 1024
    with pytest.raises(KernelError, match=f"{most + 1} sequences of up to 131072 tokens"):
        kernels.default(asked(131072, most + 1), device)
    assert [found[n - 1].config.residual_tokens for n in (256, most)] == [16, 32]


def test_launches_of_one_capture_share_a_workspace(monkeypatch: pytest.MonkeyPatch):
    now = [0, 0]
    monkeypatch.setattr(kv, "stream_of", lambda _: tuple(now))
    monkeypatch.setattr(kv, "_spaces", {})

    def space(stream: int, capture: int) -> int:
        now[:] = stream, capture
        return kv.workspace(torch.device("cpu"), 8, 4, 2)[2].data_ptr()

    eager = space(1, 0)
    first, second = space(2, 71), space(2, 71)
    assert first == second != eager
    kept = kv._spaces.copy()  # else freed memory may be reused at the same address
    assert space(2, 72) not in (eager, first) and space(3, 72) != space(2, 72) and space(1, 0) == eager
    assert len(kept) == 2
