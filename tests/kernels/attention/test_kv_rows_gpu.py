"""Kernels over rows of a pool on a GPU against plain torch, alone and in a CUDA graph while rows change."""

import pytest
import torch

from anybit.cache.blocks import Pool, step
from anybit.ops import kv, kv_rows
from anybit.ops.kv_rows import PAGE
from anybit.vllm.kv_step import run
from cases_rows import DECODE, DRAFTED, FEW, RAGGED, STEPS, Case, Drafts, Step, batch_of, paged_attention, unpacked


def alike(there: Step, here: Step) -> None:
    """Pools are equal, except between a page's blocks."""
    layout, front = here.case.rows.layout, here.case.rows.front
    owned = here.table[:, front:].flatten().long()
    owned = owned[owned > 0]
    got, want = there.pages.cpu(), here.pages.clone()
    for pages in (got, want):
        blocks = pages[owned].unflatten(-1, (layout.blocks, -1))
        blocks[..., layout.key_bytes + layout.value_bytes :] = 0
        pages[owned] = blocks.flatten(-2)
    assert torch.equal(got, want)


def worst(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(((out.cpu().double() - want.double()).abs().mean(-1) / want.double().abs().mean(-1)).max())


@pytest.mark.parametrize("case", [case for case in DECODE if all(case.new)] + FEW, ids=str)
def test_a_token_or_a_few_of_each_sequence(case: Case):
    here, there = Step(case), Step(case, device="cuda")
    want = step(here.pool, here.batch, here.q, here.k, here.v, case.masks())
    ragged = kv_rows.Ragged(there.starts, there.most) if there.most > 1 else None
    kv.run(kv_rows.store(there.view(), there.k, there.v, ragged), 0)
    alike(there, here)
    out = torch.full_like(there.q, torch.nan)
    kv.run(kv_rows.decode(there.q, there.view(), case.masks("cuda"), out=out, overlaps=True, ragged=ragged), 0)
    assert worst(out, want) < (2e-2 if case.bf16 else 6e-3)


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_any_number_of_tokens_of_each_sequence(case: Case):
    here, there = Step(case), Step(case, device="cuda")
    new = there.k, there.v, kv_rows.Ragged(there.starts, there.most)
    jobs = there.jobs()
    out = torch.full((len(jobs), 2, case.kv_heads, PAGE, case.head_dim), torch.nan, dtype=case.dtype, device="cuda")
    kv.run(kv_rows.store(there.view(), *new, keeps=False), 0)
    kv.run(
        kv_rows.unpack(there.view(), *new[:2], there.starts, torch.tensor(jobs).int().cuda(), out),
        0,
    )
    want = unpacked(here, Pool(case.rows, there.pages.cpu(), case.dtype), jobs)
    kv.run(kv_rows.store(there.view(), *new, packs=False), 0)
    step(here.pool, here.batch, here.q, here.k, here.v)
    alike(there, here)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-2 if case.bf16 else 1e-3, atol=1e-3)


@pytest.mark.parametrize(("case", "room"), [(STEPS[0], 1), *((case, 100) for case in STEPS)], ids=str)
def test_layers_of_a_step_of_vllm(case: Case, room: int):
    """Three layers with separate tensors through one batch; the later two run the plans of the first."""
    batch, space = None, torch.empty(100, 2, case.kv_heads, PAGE, case.head_dim, dtype=case.dtype, device="cuda")
    kept = []  # so that no layer reuses another's addresses
    for layer in range(3):
        here, there = Step(case, layer=layer), Step(case, device="cuda", layer=layer)
        kept.append(there)
        want = step(here.pool, here.batch, here.q, here.k, here.v, case.masks())
        batch = batch or batch_of(there, room)
        assert torch.equal(batch.table, there.table)
        out, masks = torch.full_like(there.q, torch.nan), case.masks("cuda")
        kept.append(out)
        space.fill_(torch.nan)
        run(
            batch, case.rows, there.pages, there.q, there.k, there.v, masks, out, capacity=1024,
            space=lambda count: space, prompts=paged_attention(masks),
        )  # fmt: skip
        alike(there, here)
        error = (out.cpu().double() - want.double()).abs().mean() / want.double().abs().mean()
        assert error < (1e-2 if case.bf16 else 2e-3)
    assert len(batch.plans) == 1


@pytest.mark.parametrize("case", DRAFTED, ids=str)
def test_steps_of_drafts_in_one_graph(case: Case):
    """One capture, then 150 replays while lengths, rows and draft counts change, and drafts are rejected."""
    life = Drafts(case, 1024, "cuda")
    life.run()  # compiles, and allocates the workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        life.run()
    assert max(life.advance(graph.replay) for _ in range(150)) < (2e-2 if case.bf16 else 6e-3)
    assert max(life.have) > 2 * PAGE
