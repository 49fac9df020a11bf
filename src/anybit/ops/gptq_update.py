"""GPTQ's inner loop: rounding channel by channel, with error feedback to the remaining channels."""

import torch
from torch import Tensor

from anybit.kernels.gptq import gptq_update as kernel


def sweep(
    values: Tensor,
    coupling: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: int,
    reference: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round channel by channel: code_j is nearest to v_j, and v_i -= coupling[j, i] * error_j for all i > j.

    values: float32 [g, N].  coupling: [g, g], read above its diagonal.  scale, zero: [N].  reference: [g, N], to
    measure errors from instead of ``values``.  mask: bool [g, N]; where False the code is the zero point.
    Returns codes and errors, [g, N]: error_j = (reference_j or v_j) - (code_j - zero) * scale.
    """
    if values.is_cuda:
        return _sweep_cuda(values, coupling, scale, zero, top, reference=reference, mask=mask)
    work = values.clone()
    codes, errors = torch.empty_like(values), torch.empty_like(values)
    for j in range(len(values)):
        code = (work[j] / scale + zero).round_().clamp_(0, top)
        if mask is not None:
            code = torch.where(mask[j], code, zero)
        error = (work[j] if reference is None else reference[j]) - (code - zero) * scale
        work[j + 1 :].addr_(coupling[j, j + 1 :], error, alpha=-1)
        codes[j], errors[j] = code, error
    return codes, errors


def sweep_choosing_cuda(
    values: Tensor, coupling: Tensor, scale: Tensor, zero: Tensor, top: int, diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``sweep`` that also picks a 2:4 mask on the way (by ``gptq.keep_two``) and returns it, bool [g, N].

    diagonal: [g], of the factor of the inverse Hessian; g must be a multiple of 4.
    """
    mask = torch.empty_like(values, dtype=torch.bool, memory_format=torch.contiguous_format)
    return *_sweep_cuda(values, coupling, scale, zero, top, mask=mask, diagonal=diagonal), mask


def _sweep_cuda(
    values: Tensor, coupling: Tensor, scale: Tensor, zero: Tensor, top: int, **more: Tensor | None
) -> tuple[Tensor, Tensor]:
    """more: reference, mask and diagonal, if given."""
    device, step = values.get_device(), kernel.CHANNELS
    # LAPACK returns factors column-major; the kernel reads rows.
    values, coupling, scale, zero = (x.contiguous() for x in (values, coupling, scale, zero))
    dense = {name: x.contiguous() for name, x in more.items() if x is not None}
    codes, errors = torch.empty_like(values), torch.empty_like(values)
    work = values.clone() if len(values) > step else values
    for start in range(0, len(values), step):
        end = min(start + step, len(values))
        params = kernel.arguments(
            work[start:end], coupling[start:end, start:end], scale, zero, top, codes[start:end], errors[start:end],
            **{name: x[start:end] for name, x in dense.items()},
        )  # fmt: skip
        kernel.launch(params, device)
        if end < len(values):
            work[end:].addmm_(coupling[start:end, end:].T, errors[start:end], alpha=-1)
    return codes, errors
