"""Kernels over rows of a pool on the CPU, thread by thread: cache writes, attention, and unpacking pages."""

import dataclasses
import importlib

import pytest
import torch

import emulate
from anybit.cache.blocks import Pool, step
from anybit.device import Device
from anybit.ops import kv, kv_rows
from anybit.ops.kv_rows import PAGE
from anybit.vllm.kv_step import run
from cases_rows import DECODE, DRAFTED, FEW, RAGGED, STEPS, Case, Drafts, Step, batch_of, paged_attention, unpacked

launching = importlib.import_module("anybit.jit.launch")  # not the function of that name
MOVED = ("pages", "residual", "q", "k", "v", "out", "sinks")
SMALL = [
    dataclasses.replace(
        case,
        heads=min(case.heads // case.kv_heads, 4) * min(case.kv_heads, 2),
        kv_heads=min(case.kv_heads, 2),
        before=tuple(min(n, 512) for n in case.before),
    )
    for case in DECODE
]


@pytest.fixture
def launched(monkeypatch):
    """Kernels of ops run in the emulator, as on a device with three SMs."""
    device = dataclasses.replace(Device.named("sm_90a"), sms=3)
    kernels, known = set(), {}

    class Launcher:
        """Like jit's; plans pass addresses, of tensors in ``known``."""

        def __init__(self, kernel, device, code=None):
            self.kernel = kernel
            kernels.add(kernel)

        def values(self, params):
            return [getattr(params, f.name) for f in dataclasses.fields(params)]

        def start(self, values, grid, pdl, ready=None):
            fields = dataclasses.fields(self.kernel.params)
            values = [
                (known[x] if x else None) if isinstance(x, int) and f.name in MOVED else x
                for f, x in zip(fields, values, strict=True)
            ]
            dependent = [f.name for f in fields if f.name in ("k", "v", "q")] if pdl else ()
            emulate.run(self.kernel, self.kernel.params(*values), grid, resident=64, dependent=dependent)

    def in_log2(values, like, plain=kv.in_log2):
        found = plain(values, like)
        return known.setdefault(found.data_ptr(), found)

    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "Launcher", Launcher)
    monkeypatch.setattr(kv, "in_log2", in_log2)
    for module in (kv, kv_rows):
        monkeypatch.setattr(module.Device, "of", lambda tensor: device)
    return kernels, device, known


def alike(a: Step, b: Step) -> None:
    """Pools are equal, except between a page's blocks."""
    layout, front = a.case.rows.layout, a.case.rows.front
    owned = a.table[:, front:].flatten().long()
    owned = owned[owned > 0]
    pools = []
    for pages in (a.pages, b.pages):
        copy = pages.clone()
        blocks = copy[owned].unflatten(-1, (layout.blocks, -1))
        blocks[..., layout.key_bytes + layout.value_bytes :] = 0
        copy[owned] = blocks.flatten(-2)
        pools.append(copy)
    wrong = (pools[0] != pools[1]).nonzero()
    assert not len(wrong), wrong[:8]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_token_of_each_sequence(case: Case, launched):
    here, there = Step(case), Step(case)
    n = len(case.new)
    assert all(new <= 1 for new in case.new)
    want = step(here.pool, here.batch, here.q, here.k, here.v, case.masks())
    rows = [i for i, new in enumerate(case.new) if new]
    q, k, v = (torch.zeros(n, *x.shape[1:], dtype=x.dtype) for x in (there.q, there.k, there.v))
    for full, x in ((q, there.q), (k, there.k), (v, there.v)):
        full[rows] = x
    kv.run(kv_rows.store(there.view(), k, v), -1)
    alike(here, there)
    out = torch.full_like(q, torch.nan)
    kv.run(kv_rows.decode(q, there.view(), case.masks(), out=out, overlaps=True), -1)
    assert out.isfinite().all()
    error = (out[rows].double() - want.double()).abs().mean() / want.double().abs().mean()
    assert error < (1e-2 if case.bf16 else 2e-3)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_few_tokens_of_each_sequence(case: Case, launched):
    here, there = Step(case), Step(case)
    want = step(here.pool, here.batch, here.q, here.k, here.v, case.masks())
    ragged = kv_rows.Ragged(there.starts, there.most)
    kv.run(kv_rows.store(there.view(), there.k, there.v, ragged), -1)
    alike(here, there)
    out = torch.full_like(there.q, torch.nan)
    kv.run(kv_rows.decode(there.q, there.view(), case.masks(), out=out, overlaps=True, ragged=ragged), -1)
    error = (out.double() - want.double()).abs().mean(-1) / want.double().abs().mean(-1)  # per query and head
    assert error.max() < (2e-2 if case.bf16 else 6e-3)


def test_steps_of_drafts_some_of_which_are_taken_back(launched):
    """Pages fill, are packed with a draft, and packed again without it."""
    life = Drafts(dataclasses.replace(DRAFTED[0], heads=4, kv_heads=1, before=(118, 250)), 300)
    assert max(life.advance(life.run) for _ in range(8)) < 6e-3
    assert life.have[0] > PAGE and life.have[1] > 2 * PAGE


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_any_number_of_tokens_of_each_sequence(case: Case, launched):
    here, there = Step(case), Step(case)
    before = here.pages.clone()
    new = there.k, there.v, kv_rows.Ragged(there.starts, there.most)
    kv.run(kv_rows.store(there.view(), *new, keeps=False), -1)
    jobs = there.jobs()
    out = torch.full((len(jobs), 2, case.kv_heads, 128, case.head_dim), torch.nan, dtype=case.dtype)
    kv.run(kv_rows.unpack(there.view(), *new[:2], there.starts, torch.tensor(jobs, dtype=torch.int32), out), -1)
    want = unpacked(there, Pool(case.rows, there.pages, case.dtype), jobs)
    torch.testing.assert_close(out, want, rtol=1e-2 if case.bf16 else 1e-3, atol=1e-3)
    kv.run(kv_rows.store(there.view(), *new, packs=False), -1)
    step(here.pool, here.batch, here.q, here.k, here.v)
    alike(here, there)
    assert not torch.equal(before, here.pages)


@pytest.mark.parametrize(("case", "room"), [(STEPS[0], 1), *((case, 100) for case in STEPS[1:])], ids=str)
def test_a_step_of_vllm(case: Case, room: int, launched):
    """Requests with one new token and prompts, some with prefix hits on pages that this step packs."""
    layers = [(Step(case, layer=i), Step(case, layer=i)) for i in range(2)]
    kernels, device, known = launched
    batch = None
    for here, there in layers:
        fills = [i for i, (b, n) in enumerate(zip(case.before, case.new, strict=True)) if b < PAGE <= b + n]
        for one in (here, there):
            if case.before[1] == PAGE:  # its first page is filled by another request
                one.table[1, case.rows.front] = one.table[fills[0], case.rows.front]
        want = step(here.pool, here.batch, here.q, here.k, here.v, case.masks())
        batch = batch or batch_of(there, room)
        assert torch.equal(batch.table, there.table)
        assert len(batch.groups) == (1 if room > 1 else len(case.new) - batch.decodes)
        out = torch.full_like(there.q, torch.nan)
        known.update({x.data_ptr(): x for x in (there.pages, there.q, there.k, there.v, out)})
        run(
            batch, case.rows, there.pages, there.q, there.k, there.v, case.masks(), out, capacity=1024,
            space=lambda n: torch.full((n, 2, case.kv_heads, PAGE, case.head_dim), torch.nan, dtype=case.dtype),
            prompts=paged_attention(case.masks()),
        )  # fmt: skip
        alike(here, there)
        error = (out.double() - want.double()).abs().mean() / want.double().abs().mean()
        assert error < (1e-2 if case.bf16 else 2e-3)
    assert len(batch.plans) == 1, "the second layer runs the plans of the first"
    of = case.rows, case.heads, case.kv_heads, case.masks(), case.dtype
    assert kernels <= set(kv_rows.kernels_for(*of, 1024, batch.decodes, device, batch.queries)), (
        "a kernel was not compiled ahead"
    )
