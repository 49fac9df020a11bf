"""Decode attention over externally managed pages of 16-bit keys and values: vLLM's for FlashAttention.

One launch, at fixed addresses. Lengths and block tables are read on the device, so a captured CUDA graph stays valid
while requests grow. Storing tokens is done elsewhere (``ops.pages``).
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.attention.decode import decode as kernels
from anybit.kernels.attention.kv_page import PageLayout
from anybit.ops import kv
from anybit.ops.kv import NO_MASKS, LayerView, Masks
from anybit.ops.pages import check_pages
from anybit.scheme import KVFormat

DTYPES = (torch.float16, torch.bfloat16)


def problem(
    page_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, masks: Masks, capacity: int,
    sequences: int,
) -> kernels.Problem:  # fmt: skip
    """The kernel's problem: one new token per sequence, ``sequences`` sequences of at most ``capacity`` tokens.

    page_tokens: tokens per page.  Raises LayerError for heads, KernelError for a dtype that no kernel supports.
    """
    if dtype not in DTYPES:
        raise KernelError(f"keys and values are {dtype}, and kernels take float16 or bfloat16")
    return kernels.Problem(
        _layout(head_dim), sequences, heads, kv_heads, capacity=capacity, bf16=dtype == torch.bfloat16,
        sliding=masks.window is not None, softcap=masks.softcap is not None, alibi=masks.alibi is not None,
        plain=page_tokens,
    )  # fmt: skip


def kernels_for(problem: kernels.Problem, device: Device) -> list[jit.Kernel]:
    """The kernels for 1, 2, ... sequences: up to ``problem.batch``, or to the largest batch that one launch supports.

    Raises KernelError, with the reason, if there is none even for one sequence.
    """
    found: list[jit.Kernel] = []
    for count in range(1, problem.batch + 1):
        try:
            config = kernels.default(replace(problem, batch=count), device)
        except KernelError:
            if not found:
                raise
            break
        found.append(kernels.kernel(config, problem.layout))
    return found


def decode(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, masks: Masks = NO_MASKS, *, out: Tensor,
    capacity: int, overlaps: bool, config: kernels.Config | None = None,
) -> None:  # fmt: skip
    """Attention of one new token per sequence; its key and value are already in the pages.

    q, out: [sequences, heads, head_dim], out contiguous.  keys, values: [pages, page tokens, kv_heads, head_dim] in q's
    dtype, unit channel stride, equal strides.  table: int32 [sequences, pages per sequence].  lengths: int32
    [sequences], new token included; 0 for padded rows, whose output is zeros.  capacity: most tokens of a sequence.
    overlaps: older tokens may be read while the previous kernel runs, which must be the one that stores this step's.
    config: kernel config (default: the heuristic's).  Raises KernelError for operands that no kernel supports.
    """
    _check(q, keys, values, table, lengths, out)
    usual = kernels.Problem  # whose ring and window plain caches leave as they are
    of = LayerView(_layout(q.shape[2]), keys, None, table, lengths, usual.ring, usual.window, capacity, values=values)
    launch = kv.prepare(q[:, None], of, None, masks, Device.of(q), config, out[:, None], overlaps=overlaps)
    kv.run([launch], q.get_device())


def _check(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, out: Tensor) -> None:
    count = q.shape[0]
    if q.dim() != 3 or q.dtype not in DTYPES or q.stride(2) != 1 or any(x % 2 for x in q.stride()[:2]):
        raise KernelError(
            f"q must be float16 or bfloat16 [sequences, heads, head_dim] with even strides and unit channel stride, "
            f"not {q.dtype} {tuple(q.shape)} with strides {q.stride()}"
        )
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise KernelError(f"out must be contiguous {q.dtype} {tuple(q.shape)}, not {out.dtype} {tuple(out.shape)}")
    check_pages(keys, values, q.dtype, keys.shape[-2], q.shape[2])
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] < count or table.stride(1) != 1:
        raise KernelError(
            f"table must be int32 [{count}, pages] with contiguous rows, not {table.dtype} {tuple(table.shape)}"
        )
    if lengths.dtype != torch.int32 or lengths.dim() != 1 or lengths.shape[0] < count or lengths.stride(0) != 1:
        raise KernelError(f"lengths must be contiguous int32 [{count}], not {lengths.dtype} {tuple(lengths.shape)}")


@cache
def _layout(head_dim: int) -> PageLayout:
    return PageLayout(KVFormat.parse("kv16"), head_dim)
