"""Decode attention and packing on a GPU against exact attention over what the cache holds.

A third of the cases; all of them with ANYBIT_EXHAUSTIVE=1. Before: `python tests/gpu/precompile.py test_decode`.
"""

import os

import pytest
import torch

from anybit.attention import decode_kernel, decode_reference
from anybit.device import Device
from anybit.jit import Kernel
from anybit.kernels import decode, kvpack
from cases_decode import CASES, Case, problem, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CHOSEN = CASES if os.environ.get("ANYBIT_EXHAUSTIVE") else CASES[::3]


def kernels_used() -> list[Kernel]:
    """What the tests below launch, for precompile.py."""
    device, found = Device.named("sm_90a"), set()
    for case in CHOSEN:
        asked = problem(case)
        found.add(decode.kernel(decode.default(asked, device), asked.layout))
        stored = kvpack.Problem(asked.layout, 1, case.kv_heads, 1, asked.ring, asked.window, case.bf16)
        found.add(kvpack.kernel(kvpack.default(stored)))
    return sorted(found, key=lambda kernel: str(kernel.config))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
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
    assert torch.equal(here.residual[1], there.residual[1].cpu())
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
    for _ in range(90):  # across the end of a window of the first sequence
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
