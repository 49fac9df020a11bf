"""Routers of mixtures of experts: ``anybit::router``, and ``anybit::norm_router`` with the norm before it."""

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.experts.router import router as kernel
from anybit.kernels.experts.router.router import Problem
from anybit.ops.elementwise import add_rms_norm, check_norm
from anybit.ops.library import calls, define
from anybit.ops.plans import PLANS, OpPlan, Rows, key_of, new_plan


def router(x: Tensor, weight: Tensor, top: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token takes, and their shares: x [T, H] -> int32 [T, top], float32 [T, top].

    weight: [experts, H] in x's dtype, to which logits are rounded, as in the model; of equal ones the first wins.
    renormalize: shares are the softmax over those taken, not over all.  Raises KernelError if operands do not fit.
    """
    ids, shares = calls.router(x, weight, top, renormalize)
    return ids, shares


def norm_router(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: Tensor, top: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, ids, shares): total = x + residual [T, H], y its RMSNorm, and the ``router`` of y."""
    y, total, ids, shares = calls.norm_router(x, residual, gamma, epsilon, weight, top, renormalize)
    return y, total, ids, shares


def _plain(x: Tensor, weight: Tensor, top: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    _check(x, weight, top)
    logits = torch.nn.functional.linear(x, weight)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True)[1][:, :top]
    shares = torch.softmax(logits.float(), -1).gather(1, ids)
    if renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return ids.int(), shares


def _plain_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: Tensor, top: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_norm(x, residual, gamma)
    y, total = add_rms_norm(x, residual, gamma, epsilon)
    return y, total, *_plain(y, weight, top, renormalize)


def _check(x: Tensor, weight: Tensor, top: int) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise KernelError(f"x {tuple(x.shape)} and the router's weight {tuple(weight.shape)} are not [T, H] and [E, H]")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise KernelError(f"x is {x.dtype} on {x.device}, and the router's weight {weight.dtype} on {weight.device}")
    if not 1 <= top <= len(weight):
        raise KernelError(f"a token takes 1 to {len(weight)} experts, not {top}")


def _cuda(x: Tensor, weight: Tensor, top: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    plan = _plan((x, weight), top, renormalize, None)
    if not plan.launches:
        return _plain(x, weight, top, renormalize)
    ids, shares = _fake(x, weight, top, renormalize)
    plan.call(x, weight, ids, shares)
    return ids, shares


def _norm_cuda(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: Tensor, top: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _plan((x, weight, residual, gamma), top, renormalize, epsilon)
    if not plan.launches or plan.prepare is not None:
        y, total = add_rms_norm(x, residual, gamma, epsilon)
        return y, total, *_cuda(y, weight, top, renormalize)
    total, (ids, shares) = x.new_empty(x.shape), _fake(x, weight, top, renormalize)
    y = plan.call(x, weight, ids, shares, residual, gamma, total)
    return y, total, ids, shares


def _plan(tensors: tuple[Tensor, ...], top: int, renormalize: bool, epsilon: float | None) -> OpPlan:
    """The plan of x, weight and, with an epsilon, residual and gamma; without launches where torch's operations run."""
    key = key_of(("router", top, renormalize, epsilon), tensors)
    plan = PLANS.get(key)
    if plan is None:
        x, weight, *norm = tensors
        _check(x, weight, top)
        if norm:
            check_norm(x, *norm)
        dense = all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (weight, *norm))
        plan = PLANS[key] = router_plan(Rows.of(x), len(weight), top, renormalize, epsilon, dense)
    return plan


def router_plan(
    rows: Rows, experts: int, top: int, renormalize: bool, epsilon: float | None, dense: bool = True
) -> OpPlan:
    """The plan of rows, normed first if there is an epsilon. dense: all but x is dense, and begins on 16 bytes.

    With many tokens, whose norm is another launch, a GEMM prepares logits in the place of x.
    """
    plan = new_plan((0,) if epsilon is None else (rows.m, rows.k), rows.device, *_SLOTS)
    aligned, normed = dense and rows.aligned and not rows.copied, epsilon is not None
    problem = Problem(rows.m, rows.k, experts, top, normed, renormalize, rows.dtype, rows.gpu, aligned)
    out = Slot("ids"), Slot("shares")
    if kernel.why_not(problem) is not None:
        return plan
    if rows.m <= kernel.most_tokens(problem):
        norm = () if epsilon is None else (Slot("residual"), Slot("gamma"), epsilon, Slot("total"), Slot("y"))
        plan.launches.append(kernel.launch(problem, rows.at, rows.stride, Slot("weight"), *out, *norm))
    else:
        plan.prepare = _logits
        plan.launches.append(kernel.launch_largest(problem, Slot("x"), *out))
    return plan


def _logits(x: Tensor, more: tuple[Tensor | None, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    weight = more[0]
    assert weight is not None
    return torch.nn.functional.linear(x, weight), more


_SLOTS = ("weight", "ids", "shares", "residual", "gamma", "total")


def _fake(x: Tensor, weight: Tensor, top: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], top
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


_library = torch.library.Library("anybit", "FRAGMENT")
define(_library, "router(Tensor x, Tensor weight, int top, bool renormalize) -> (Tensor, Tensor)", _fake, _plain, _cuda)
define(
    _library,
    "norm_router(Tensor x, Tensor residual, Tensor gamma, float epsilon, Tensor weight, int top, bool renormalize) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    lambda x, residual, gamma, epsilon, *more: (x.new_empty(x.shape), x.new_empty(x.shape), *_fake(x, *more)),
    _plain_norm, _norm_cuda,
)  # fmt: skip
