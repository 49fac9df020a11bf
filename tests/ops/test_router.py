"""The router's ops in plain torch: what they take and refuse, and their fakes."""

import pytest
import torch

from anybit.errors import KernelError
from anybit.ops.elementwise import add_rms_norm
from anybit.ops.router import norm_router, router


def test_a_norm_before_the_router_is_that_of_the_op() -> None:
    x, residual = torch.randn(2, 5, 32)
    gamma, weight = torch.rand(32), torch.randn(7, 32)
    y, total, ids, shares = norm_router(x, residual, gamma, 1e-6, weight, 3, True)
    for found, wanted in zip((y, total), add_rms_norm(x, residual, gamma, 1e-6), strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip((ids, shares), router(y, weight, 3, True), strict=True):
        assert torch.equal(found, wanted)
    every = torch.softmax(y @ weight.T, -1)
    best, places = every.topk(3)
    assert torch.equal(ids.long(), places)
    torch.testing.assert_close(shares, best / best.sum(-1, keepdim=True))
    torch.testing.assert_close(router(y, weight, 3, False)[1], best)
    assert router(x[:0], weight, 3, True)[0].shape == (0, 3)


def test_fakes_promise_what_the_ops_return() -> None:
    x, residual, gamma, weight = torch.randn(4, 16), torch.randn(4, 16), torch.rand(16), torch.randn(6, 16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.anybit.router.default, (x, weight, 2, True), test_utils=checks)
    normed = (x, residual, gamma, 1e-5, weight, 2, False)
    torch.library.opcheck(torch.ops.anybit.norm_router.default, normed, test_utils=checks)


@pytest.mark.parametrize(
    ("weight", "top", "told"),
    [
        (torch.zeros(6, 15), 2, r"x \(4, 16\) and the router's weight \(6, 15\) are not"),
        (torch.zeros(6, 16, dtype=torch.float16), 2, "the router's weight torch.float16"),
        (torch.zeros(6, 16), 7, "a token takes 1 to 6 experts, not 7"),
    ],
)
def test_says_what_it_refuses(weight: torch.Tensor, top: int, told: str) -> None:
    with pytest.raises(KernelError, match=told):
        router(torch.zeros(4, 16), weight, top, True)
