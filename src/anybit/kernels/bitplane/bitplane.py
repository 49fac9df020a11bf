"""All bit-plane kernels: the choice for a problem."""

import functools
from typing import Any, cast

from anybit.errors import KernelError
from anybit.kernels.bitplane.bitplane_problem import Facts, why_not
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem

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
