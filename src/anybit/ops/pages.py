"""RoPE fused with storing keys and values in an externally managed, paged 16-bit cache (vLLM's).

``rotate_pages`` takes the QKV projection's outputs; ``norm_rotate_pages`` computes them, too, in one launch at one or
two tokens with 16-bit activations. Both write the cache in ``RopePagesArgs``; the ops that call them ensure the order.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.jit import Launch, Slot
from anybit.kernels.block import rope_pages
from anybit.kernels.block.rope_pages import RopePagesArgs as RopePagesArgs
from anybit.ops.checks import copy_of
from anybit.ops.elementwise import paired_channels, rms_norm, rotate
from anybit.ops.fused import norm_linear, norm_turn
from anybit.ops.plans import PLANS, OpPlan, key_of, new_plan


def why_not(query_heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why no kernel applies RoPE to such heads and stores them in pages, as a sentence; None if one does."""
    return rope_pages.why_not(rope_pages.Problem(1, query_heads, key_heads, head_dim, dtype))


def rotate_pages(
    step: RopePagesArgs, qkv: Tensor, q_gamma: Tensor | None = None, k_gamma: Tensor | None = None,
    epsilon: float = 0.0, paired: bool = False,
) -> Tensor:  # fmt: skip
    """Apply RoPE; store keys and values in the step's pages. Returns the queries [tokens, query_heads, head_dim].

    qkv: [tokens, (query_heads + 2 * key_heads) * head_dim].  q_gamma, k_gamma: [head_dim], of a per-head QK norm first.
    paired: channels are in the order of ``rope.paired_channels``.  Raises KernelError as ``check_step`` does.
    """
    tensors = (q_gamma, k_gamma, step.table, step.positions, step.keys, step.values, step.slots)
    key = key_of(("rotate_pages", step.query_heads, step.key_heads, epsilon, paired), (qkv, *tensors))
    plan = PLANS.get(key)
    if plan is None:
        check_step(step, qkv.shape, qkv.dtype, q_gamma, k_gamma)
        if not qkv.is_cuda:
            return _rotate_cpu(step, qkv, q_gamma, k_gamma, epsilon, paired)
        if qkv.stride(-1) != 1 or qkv.stride(0) % 8 or qkv.data_ptr() % 16:
            return rotate_pages(step, copy_of(qkv), q_gamma, k_gamma, epsilon, paired)
        problem = rope_pages.Problem(len(qkv), step.query_heads, step.key_heads, step.head_dim, qkv.dtype, paired)
        plan = PLANS[key] = _plan(problem, step, qkv, q_gamma, k_gamma, epsilon)
    return plan.call(qkv, *tensors)


_SLOTS = ("q_gamma", "k_gamma", "table", "positions", "keys", "values", "slots")


def _plan(
    problem: rope_pages.Problem, step: RopePagesArgs, qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None,
    epsilon: float,
) -> OpPlan:  # fmt: skip
    plan = new_plan((len(qkv), step.query_heads, step.head_dim), qkv.device, *_SLOTS)
    if problem.tokens:
        config = rope_pages.default(problem)
        params = rope_pages.arguments(step, qkv, qkv, q_gamma, k_gamma, epsilon)
        slots: dict[str, Any] = {name: Slot(name) for name in _SLOTS if getattr(params, name) is not None}
        params = replace(params, qkv=Slot("x"), q=Slot("y"), **slots)
        kernel, grid = rope_pages.kernel(config), rope_pages.grid(problem, config)
        plan.launches.append(Launch(kernel, params, grid, pdl=True))
    return plan


def norm_rotate_pages(
    step: RopePagesArgs, x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor],
    bias: Tensor | None, spec: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``norm_linear`` as QKV, then ``rotate_pages``: (queries after RoPE, x + residual), in one launch if possible.

    The linear's outputs are queries, keys and values in the channel order of ``rope.paired_channels``.
    """
    found = norm_turn(x, residual, gamma, epsilon, weight, bias, spec, step, _check_layer)
    if found is not None:
        return found
    qkv, total = norm_linear(x, residual, gamma, epsilon, weight, bias, spec)
    return rotate_pages(step, qkv.view(-1, qkv.shape[-1]), paired=True), total


def _check_layer(x: Tensor, outputs: int, step: RopePagesArgs) -> None:
    check_step(step, torch.Size((len(x), outputs)), x.dtype)


def check_step(
    step: RopePagesArgs, shape: torch.Size, kind: torch.dtype, q_gamma: Tensor | None = None,
    k_gamma: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise KernelError, naming the argument, unless a step fits qkv of this shape and dtype."""
    dim, tokens = step.head_dim, shape[0]
    wanted = (step.query_heads + 2 * step.key_heads) * dim
    if shape != (tokens, wanted):
        raise KernelError(
            f"qkv must be [{tokens}, {wanted}] for {step.query_heads} query and {step.key_heads} key heads of {dim}, "
            f"not {tuple(shape)}"
        )
    vectors = [("positions", step.positions, torch.int64), ("slots", step.slots, torch.int64)]
    vectors += [("q_gamma", q_gamma, kind), ("k_gamma", k_gamma, kind)]
    for name, found, dtype in vectors:
        if found is not None and (found.dtype != dtype or found.dim() != 1 or not found.is_contiguous()):
            raise KernelError(f"{name} must be a contiguous {dtype} vector, not {found.dtype} {tuple(found.shape)}")
    if len(step.positions) != tokens:
        raise KernelError(f"positions must have one entry for each of {tokens} tokens, not {len(step.positions)}")
    if step.table.dtype != kind or not step.table.is_contiguous():
        raise KernelError(f"table must be contiguous {kind} as qkv is, not {step.table.dtype}")
    if step.keys is not None and step.values is not None:
        check_pages(step.keys, step.values, kind, step.key_heads, dim)


def check_pages(keys: Tensor, values: Tensor, kind: torch.dtype, heads: int, dim: int) -> None:
    """Raise KernelError unless keys and values are pages of dtype ``kind`` that kernels can read and write."""
    for name, pages in (("keys", keys), ("values", values)):
        right = pages.dtype == kind and pages.dim() == 4 and pages.shape[2:] == (heads, dim)
        aligned = right and pages.stride(3) == 1 and not any(x % 8 for x in pages.stride()[:3])
        if not aligned or pages.data_ptr() % 16 or pages.stride() != keys.stride() or pages.shape != keys.shape:
            raise KernelError(
                f"{name} must be {kind} [pages, page tokens, {heads}, {dim}] in vectors of 8 (16-byte aligned), with "
                f"the same strides for keys and values, not {pages.dtype} {tuple(pages.shape)}, {pages.stride()}"
            )


def _rotate_cpu(
    step: RopePagesArgs, qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, epsilon: float, paired: bool
) -> Tensor:
    dim, plain = step.head_dim, qkv
    if paired:
        plain = torch.empty_like(qkv).index_copy_(1, paired_channels(step.query_heads, step.key_heads, dim), qkv)
    q, k, v = plain.view(len(qkv), -1, dim).split((step.query_heads, step.key_heads, step.key_heads), dim=1)
    q, k = (x if g is None else rms_norm(x, g, epsilon) for x, g in ((q, q_gamma), (k, k_gamma)))  # rounds, too
    wide = torch.cat((q, k, v), dim=1).float().flatten(1)
    cosine, sine = (half.repeat(1, 2) for half in step.table.float()[step.positions].split(dim // 2, dim=1))
    q, k = rotate(wide, cosine, sine, step.query_heads, step.key_heads)
    if step.keys is not None and step.values is not None and step.slots is not None:
        for pages, new in ((step.keys, k), (step.values, v)):
            for token, slot in enumerate(step.slots.tolist()):
                if slot >= 0:
                    pages[slot // pages.shape[1], slot % pages.shape[1]] = new[token].to(pages.dtype)
    return q.to(qkv.dtype)
