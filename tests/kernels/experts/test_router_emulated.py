"""The router on the CPU: norms, ties, NaN, ragged counts of experts and tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import emulate
from anybit.kernels.experts.router import router
from anybit.ops.router import router as op
from cases_experts import HOPPER


def routed(
    x: Tensor, weight: Tensor, top: int, renormalize: bool = True, residual: Tensor | None = None,
    gamma: Tensor | None = None, seed: int = 0, sms: int = HOPPER.sms,
) -> list[Tensor]:  # fmt: skip
    """ids, weights, y and total by the kernel."""
    (tokens, hidden), like = x.shape, {"dtype": x.dtype}
    device = replace(HOPPER, sms=sms)
    problem = router.Problem(tokens, hidden, len(weight), top, gamma is not None, renormalize, x.dtype, device)
    ids, weights = torch.full((tokens, top), -7, dtype=torch.int32), torch.zeros(tokens, top)
    y, total = torch.zeros(2, tokens, hidden, **like)
    norm = (residual, gamma, 1e-6, None if residual is None else total, None if gamma is None else y)
    given = ("x",) if residual is None else ("x", "residual")
    emulate.launched(router.launch(problem, x, hidden, weight, ids, weights, *norm), seed=seed, dependent=given)
    return [ids, weights, y, total]


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top"),
    [(1, 256, 128, 8), (11, 72, 8, 2), (3, 520, 60, 4), (2, 2056, 130, 6), (9, 64, 5, 5), (1, 136, 512, 10)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_takes_the_experts_that_torch_takes(
    tokens: int, hidden: int, experts: int, top: int, dtype: torch.dtype
) -> None:
    x, other = torch.randn(2, tokens, hidden).to(dtype)
    weight, gamma = (torch.randn(experts, hidden) * hidden**-0.5).to(dtype), torch.rand(hidden).to(dtype)
    renormalize, normed = bool(tokens % 2), dtype == torch.float16
    given = (other, gamma) if normed else (None, None)
    ids, weights, y, total = routed(x, weight, top, renormalize, *given, seed=hidden)
    rows = x
    if normed:
        assert torch.equal(total, x + other)
        wide = total.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(y, gamma * (wide * factor).to(dtype), rtol=2e-3, atol=2e-3)
        rows = y
    probabilities = torch.softmax((rows.double() @ weight.double().T), -1)
    taken = probabilities.gather(1, ids.long())
    best = probabilities.topk(top)[0]
    slack = (
        1 + 4 * torch.finfo(dtype).eps * probabilities.log().abs().max()
    )  # logits are rounded, so near ones may swap
    assert (taken * slack >= best).all() and all(len(set(row)) == top for row in ids.tolist())
    expected = taken / taken.sum(-1, keepdim=True) if renormalize else taken
    torch.testing.assert_close(weights.double(), expected, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(("experts", "seed"), [(20, 0), (20, 1), (130, 2)])
def test_a_cluster_takes_rounds_of_tokens(experts: int, seed: int) -> None:
    x, weight = torch.randn(19, 64).half(), torch.randn(experts, 64).half() / 8
    ids, weights, *_ = routed(x, weight, 4, seed=seed, sms=8)  # three rounds of eight, the last of three
    best, expected = (x.float() @ weight.float().T).half().float().topk(4)
    taken = (x.float() @ weight.float().T).gather(1, ids.long())
    torch.testing.assert_close(taken, best, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(weights, torch.softmax(best, -1), rtol=0.02, atol=1e-3)
    assert (ids == expected).float().mean() > 0.9


def test_ties_take_the_first_and_nan_stays_in_its_token() -> None:
    weight = torch.zeros(20, 64, dtype=torch.float16)
    weight[3:6] = weight[19] = 1
    x = torch.ones(3, 64, dtype=torch.float16)
    x[1, 5], x[2] = torch.nan, -1
    ids, weights, *_ = routed(x, weight, 6)
    assert ids[0].tolist() == [3, 4, 5, 19, 0, 1]
    assert ids[2].tolist() == [0, 1, 2, 6, 7, 8]
    assert weights[1].isnan().all() and ((ids[1] >= 0) & (ids[1] < 20)).all()
    torch.testing.assert_close(weights[0].sum(), torch.tensor(1.0))
    wanted, shares = op(x[::2], weight, 6, True)
    assert torch.equal(wanted, ids[::2])
    torch.testing.assert_close(shares, weights[::2])


@pytest.mark.parametrize(("experts", "top", "dtype"), [(130, 6, torch.bfloat16), (60, 32, torch.float16)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_takes_the_largest_logits_of_many_tokens(experts: int, top: int, dtype: torch.dtype, renormalize: bool) -> None:
    logits = torch.randn(19, experts).to(dtype)
    logits[3, 40:44], logits[4, 7] = 9, torch.nan
    ids, weights = torch.full((19, top), -7, dtype=torch.int32), torch.zeros(19, top)
    problem = router.Problem(19, 64, experts, top, False, renormalize, dtype, HOPPER)
    emulate.launched(router.launch_largest(problem, logits, ids, weights), seed=top, dependent=("x",))
    wanted = torch.sort(logits, descending=True, stable=True)[1][:, :top]
    assert torch.equal(ids, wanted.int())
    shares = torch.softmax(logits.float(), -1).gather(1, wanted)
    shares = shares / shares.sum(-1, keepdim=True) if renormalize else shares
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_says_what_it_refuses() -> None:
    for changes, told in (
        ({"top": 9}, "1 to 8 of 8 experts"),
        ({"experts": 1000}, "at most 512"),
        ({"hidden": 100}, "multiple of 8"),
        ({"dtype": torch.float32}, "float32"),
    ):
        given = {"tokens": 1, "hidden": 64, "experts": 8, "top": 2} | changes
        assert told in str(router.why_not(router.Problem(**given)))
