"""Attention over plain pages on a GPU against float64, alone and in a CUDA graph while sequences grow."""

import random

import pytest
import torch

from anybit.ops import kv, kv_plain
from cases_plain import CASES, TOLERANCE, Case, Pool, attention

LARGE = [
    Case(heads=32, kv_heads=8, lengths=tuple(random.Random(1).randint(0, 700) for _ in range(256))),
    Case(heads=32, kv_heads=8, lengths=(40_000, 3), bf16=True),
    Case(heads=64, kv_heads=8, lengths=(5000, 64, 4097) * 11),
]


def attend(case: Case, pool: Pool, overlaps: bool = True) -> None:
    kv_plain.decode(
        pool.q, pool.keys, pool.values, pool.table, pool.lengths, case.masks("cuda"),
        out=pool.out, capacity=case.capacity, overlaps=overlaps,
    )  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_against_float64(case: Case):
    pool = Pool(case, seed=3, device="cuda")
    for overlaps in (False, True):
        pool.out.fill_(torch.nan)
        attend(case, pool, overlaps)
        assert pool.error() < TOLERANCE[case.bf16]


def test_one_graph_while_sequences_grow():
    """A captured step's inputs stay in place: tokens are added, sequences end, and others take their pages."""
    case = Case(heads=8, kv_heads=2, lengths=(300, 1, 0, 128, 513))
    pool = Pool(case, device="cuda")
    attend(case, pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case, pool)
    draw = torch.Generator().manual_seed(5)
    keys, values = pool.keys, pool.values
    for _ in range(40):
        free = torch.randperm(len(keys), generator=draw).tolist()
        lengths = [int(torch.randint(0, 200, (), generator=draw)) for _ in case.lengths]
        keys.fill_(torch.nan), values.fill_(torch.nan)
        want = torch.zeros(len(lengths), case.heads, case.head_dim, dtype=torch.float64)
        for row, n in enumerate(lengths):
            k, v = (torch.randn(n, case.kv_heads, case.head_dim, generator=draw).half() for _ in range(2))
            for page in range(-(-n // case.page)):
                pool.table[row, page] = place = free.pop()
                here = slice(page * case.page, min((page + 1) * case.page, n))
                keys[place, : here.stop - here.start] = k[here].cuda()
                values[place, : here.stop - here.start] = v[here].cuda()
            if n:
                want[row] = attention(case, pool.q[row].cpu().double(), k.double(), v.double())
        pool.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        pool.want = want
        pool.out.fill_(torch.nan)
        graph.replay()
        assert pool.error() < TOLERANCE[False]


def test_layers_of_one_graph_share_a_workspace(monkeypatch: pytest.MonkeyPatch):
    """Captured on another stream than the warm-up's, as vLLM does; counters are zeroed once per replay."""
    case, plain, spaces = LARGE[2], kv.workspace, []
    pools = [Pool(case, seed=i, device="cuda") for i in range(4)]
    with torch.cuda.stream(torch.cuda.Stream()):
        attend(case, pools[0])
    torch.cuda.synchronize()
    monkeypatch.setattr(kv, "workspace", lambda *given: spaces.append(plain(*given)) or spaces[-1])
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            for pool in pools:
                attend(case, pool)
    assert all(len({id(space) for space in spaces[i : i + 4]}) == 1 for i in (0, 4)) and spaces[0] is not spaces[4]
    for graph in graphs * 3:
        for pool in pools:
            pool.out.fill_(torch.nan)
        graph.replay()
        assert max(pool.error() for pool in pools) < TOLERANCE[case.bf16]
