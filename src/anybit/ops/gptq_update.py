"""Rounding with error feedback, channel after channel: what GPTQ and its refinement spend their time on."""

import torch
from torch import Tensor

from anybit.kernels.quantization import gptq_update as kernel


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

    values: float32 [g, N].  coupling: [g, g], read above its diagonal.  scale, zero: [N].  reference: [g, N], what
    errors are measured from, in place of the values.  mask: bool [g, N], False where the code is the zero.
    Returns codes and errors, [g, N]: error_j = (reference_j or v_j) - (code_j - zero) * scale.
    """
    if values.is_cuda and mask is None:
        return _sweep_cuda(values, coupling, scale, zero, top, reference)
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


def _sweep_cuda(
    values: Tensor, coupling: Tensor, scale: Tensor, zero: Tensor, top: int, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    codes, errors = torch.empty_like(values), torch.empty_like(values)
    device, step = values.get_device(), kernel.CHANNELS
    # Factors come out of LAPACK column by column; the kernel walks rows.
    coupling, scale, zero = coupling.contiguous(), scale.contiguous(), zero.contiguous()
    values, reference = values.contiguous(), None if reference is None else reference.contiguous()
    work = values.clone() if len(values) > step else values
    for start in range(0, len(values), step):
        end = min(start + step, len(values))
        params = kernel.arguments(
            work[start:end], coupling[start:end, start:end], scale, zero, top, codes[start:end], errors[start:end],
            None if reference is None else reference[start:end],
        )  # fmt: skip
        kernel.launch(params, device)
        if end < len(values):
            work[end:].addmm_(coupling[start:end, end:].T, errors[start:end], alpha=-1)
    return codes, errors
