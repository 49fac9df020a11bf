"""Decode attention and packing on a GPU against exact attention over what the cache holds.

A third of the cases; all of them with ANYBIT_EXHAUSTIVE=1.
"""

import os

import pytest
import torch

from anybit.cache import attention
from anybit.cache.attention import decode_kernel, decode_reference
from anybit.errors import KernelError
from cases_decode import CASES, Case, relative_error

CHOSEN = CASES if os.environ.get("ANYBIT_EXHAUSTIVE") else CASES[::3]
OUTLIERS = [
    Case(format, heads=heads, data="outliers", bf16=bf16, lengths=(3000, 129, 640))
    for format in ("kv4g128", "kv2g128", "kv4g128t", "kv2g128t", "kv8t")
    for heads, bf16 in ((8, False), (16, True))
]


@pytest.mark.parametrize("case", [*CHOSEN, *OUTLIERS], ids=str)
def test_against_the_dequantized_cache(case: Case):
    cache, sequences, q = case.build("cuda")
    masks = case.masks("cuda")
    out, lse = decode_kernel(q, cache, 1, sequences, masks)
    want, want_lse = decode_reference(q, cache, 1, sequences, masks, precision=torch.float64)
    assert out.isfinite().all()
    assert relative_error(out, want) < (1e-2 if case.bf16 else 2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-2 if case.bf16 else 4e-3)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_pages_and_residual_are_the_same_as_on_a_cpu(case: Case):
    here, _, _ = case.build("cpu")
    there, _, _ = case.build("cuda")
    assert torch.equal(here.lengths, there.lengths.cpu()) and torch.equal(here.table, there.table.cpu())
    assert torch.equal(here.residual[1].view(torch.int16), there.residual[1].view(torch.int16).cpu())
    assert torch.equal(here.pages[1], there.pages[1].cpu())


def test_a_graph_stays_right_while_lengths_grow():
    case = CASES[0]
    cache, sequences, q = case.build("cuda")
    k, v = (torch.randn(len(sequences), 1, case.kv_heads, case.head_dim, device="cuda").half() for _ in range(2))
    out = torch.empty_like(q)
    decode_kernel(q, cache, 1, sequences, out=out)
    cache.write(1, sequences, k, v)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        cache.write(1, sequences, k, v)
        decode_kernel(q, cache, 1, sequences, out=out)
    for _ in range(90):  # across the end of the first sequence's window
        for x in (k, v, q):
            x.normal_()
        cache.extend(sequences, 1)
        graph.replay()
    want, _ = decode_reference(q, cache, 1, sequences, precision=torch.float64)
    assert relative_error(out, want) < 2e-3


def test_launches_that_follow_one_another_do_not_disturb_one_another():
    case = CASES[0]
    cache, sequences, q = case.build("cuda")
    first, _ = decode_kernel(q, cache, 1, sequences)
    outs = [decode_kernel(q, cache, 1, sequences)[0] for _ in range(20)]
    assert all(torch.equal(out, first) for out in outs)


def test_the_debug_mode_reports_what_is_out_of_range(monkeypatch: pytest.MonkeyPatch):
    case = CASES[0]
    cache, sequences, q = case.build("cuda")
    out, _ = attention.decode(q, cache, 1, sequences)
    assert torch.equal(attention.decode(q, cache, 1, sequences, debug=True)[0], out)
    length = cache.lengths[sequences[1]].clone()
    cache.lengths[sequences[1]] = 1 << 24
    with pytest.raises(KernelError, match="a length is negative"):
        attention.decode(q, cache, 1, sequences, debug=True)
    cache.lengths[sequences[1]] = length
    cache.table[sequences[0], 1] = 1 << 20
    monkeypatch.setenv("ANYBIT_DEBUG", "1")
    with pytest.raises(KernelError, match="not in the pool"):
        attention.decode(q, cache, 1, sequences)
    k = torch.randn(1, 300, case.kv_heads, case.head_dim, device="cuda").half()
    with pytest.raises(KernelError, match="not in the pool"):
        cache.write(1, sequences[:1], k, k)
