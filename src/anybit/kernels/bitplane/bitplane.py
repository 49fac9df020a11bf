"""All bit-plane kernels: the choice for a problem, and launches on the current stream."""

import functools
from typing import Any, cast

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane_problem
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.bitplane.bitplane_problem import Facts, why_not
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.block.quantize_activations import Packed
from anybit.kernels.common.types import Output
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply as multiply_by

_FAMILY_OF: dict[type, GemmKernel[Any]] = {
    family.Config: family
    for family in (
        sm90_bitplane_stacked,
        sm90_bitplane_gemm,
        sm90_bitplane_skinny,
        sm90_bitplane_resident,
        sm80_bitplane_gemm,
    )
}

_FEW = 64
"""Up to this token count tiles for few tokens are asked first."""


@functools.cache
def family(problem: LinearProblem) -> GemmKernel[Any] | None:
    """The kernel where nothing was measured: wgmma on sm_90a, else mma.sync; None if no kernel can run it."""
    few, many = sm90_bitplane_skinny, sm90_bitplane_gemm
    order = (*((few, many) if problem.m <= _FEW else (many, few)), sm80_bitplane_gemm)
    return next((one for one in order if one.why_not(problem) is None and one.configs(problem)), None)


@functools.cache
def default(problem: LinearProblem) -> Facts:
    """The config for a problem that was not tuned. Raises KernelError if no kernel can run it."""
    chosen = family(problem)
    if chosen is None:
        reason = why_not(problem, 80) or f"no tile of its planes fits the shared memory of {problem.device.arch}"
        raise KernelError(f"no bit-plane kernel for {problem}: {reason}")
    return cast(Facts, chosen.default(problem))


def family_of(config: Facts) -> GemmKernel[Any]:
    """The module of a config's kernel."""
    return _FAMILY_OF[type(config)]


def multiply(
    x: Packed,
    weight: PlaneWeight,
    output: Output,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    config: Facts | None = None,
    pdl: bool = True,
) -> Tensor:
    """``multiply_by`` the built-in kernel and config, or that of ``config``; y: allocated if None.

    Raises KernelError for a y whose dtype is not ``output``'s.
    """
    if y is None:
        y = torch.empty(x.m, weight.shape[0], dtype=output.dtype, device=weight.device)
    elif y.dtype != output.dtype:
        raise KernelError(f"y must be {output.dtype}, not {y.dtype}")
    problem, _ = bitplane_problem.product(x, weight, y, bias)
    config = config or default(problem)
    if config.needs_aligned_rows and not problem.y_aligned:
        raise KernelError(
            f"y has rows of {problem.n} results, {y.stride(0)} elements apart from address {y.data_ptr():#x}, and this "
            "config stores 16 bytes at a time: give y rows that start on 16 bytes and hold whole eights, or no config"
        )
    multiply_by(family_of(config), x, weight, y, bias, config, pdl=pdl)
    return y
