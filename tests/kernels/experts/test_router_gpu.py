"""The router on a GPU: the ops against torch, over shapes, numbers of tokens and runs."""

import pytest
import torch

from anybit.ops import router as ops

SHAPES = [(2048, 128, 8), (4096, 8, 2), (7168, 256, 8), (2880, 128, 4), (2048, 512, 10), (520, 60, 4), (2048, 130, 6)]


@pytest.mark.parametrize(("hidden", "experts", "top"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 300])
def test_takes_what_torch_takes(hidden: int, experts: int, top: int, tokens: int) -> None:
    dtype = (torch.float16, torch.bfloat16)[tokens % 2]
    x, other = torch.randn(2, tokens, hidden, device="cuda").to(dtype)
    weight = (torch.randn(experts, hidden, device="cuda") * hidden**-0.5).to(dtype)
    gamma = torch.rand(hidden, device="cuda").to(dtype)
    y, total, ids, shares = ops.norm_router(x, other, gamma, 1e-6, weight, top, tokens % 2 == 0)
    assert torch.equal(total, x + other)
    wide = total.float()
    normed = gamma * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y, normed, rtol=2 * eps, atol=2 * eps)
    every = torch.softmax(y.double() @ weight.double().T, -1)
    taken = every.gather(1, ids.long())
    slack = 1 + 4 * eps * every.log().abs().max()  # logits are rounded, so near ones may swap
    assert (taken * slack >= every.topk(top)[0]).all()
    assert (ids.sort(1)[0].diff(dim=1) > 0).all()
    expected = taken if tokens % 2 else taken / taken.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.double(), expected, rtol=0.03, atol=1e-6)
    for found, again in zip((ids, shares), ops.router(y, weight, top, tokens % 2 == 0), strict=True):
        assert torch.equal(found, again)
