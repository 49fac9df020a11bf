"""Experts' products for many tokens on hardware: formats, routing and sizes against float64; bitwise repeatable."""

import pytest
import torch

from anybit import jit
from cases_experts_grouped import Experts, experts

_SCHEMES = (
    "w4a16g128", "w2a16g64asym", "w3a16g128", "w8a16", "w4a16g32e2m1", "w4a8g128", "w4a8", "w8a8", "w4a8fpg128",
)  # fmt: skip


def run(made: Experts) -> torch.Tensor:
    for one in made.launches():
        jit.launch(one.kernel, one.params, one.grid, pdl=one.pdl)
    assert isinstance(made.operands.y, torch.Tensor)
    return made.operands.y


def ids_of(tokens: int, count: int, top_k: int, kind: str = "uniform") -> torch.Tensor:
    found = torch.rand(tokens, count, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    if kind == "one":
        found[:] = 3
    elif kind == "skewed":
        found[tokens // 4 :] = torch.arange(top_k)
    elif kind == "skipped":
        found[::3, 0] = -1
    return found


def check(made: Experts) -> None:
    y, wanted = run(made).clone(), made.expected()
    assert float((y.double() - wanted).abs().mean() / wanted.abs().mean()) < 2e-2
    for _ in range(3):
        assert torch.equal(run(made), y)


@pytest.mark.parametrize("tokens", [1, 17, 64, 257, 1024])
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_formats(scheme: str, tokens: int) -> None:
    check(experts(scheme, ids_of(tokens, 16, 4), 16, 1024, 384, bias=True, device="cuda"))


@pytest.mark.parametrize("kind", ["one", "skewed", "skipped"])
@pytest.mark.parametrize("tokens", [64, 999])
def test_routing(kind: str, tokens: int) -> None:
    check(experts("w4a16g128", ids_of(tokens, 16, 4, kind).int(), 16, 512, 256, torch.float16, device="cuda"))


def test_a_tokens_nan_stays_in_it() -> None:
    made = experts("w4a16g128", ids_of(200, 8, 2), 8, 512, 256, device="cuda")
    assert isinstance(made.operands.x, torch.Tensor)
    made.operands.x[40, 7] = torch.nan
    y = run(made)
    assert y[40].isnan().all() and not y[torch.arange(200) != 40].isnan().any()
