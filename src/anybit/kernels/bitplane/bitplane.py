"""All bit-plane kernels: the choice for a problem."""

import functools
import sys
from typing import Any, cast

from anybit.kernels.bitplane.bitplane_problem import Facts
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem

_FEW = 64
"""Up to this token count tiles for few tokens are asked first."""


@functools.cache
def family(problem: LinearProblem) -> GemmKernel[Any] | None:
    """The kernel where nothing was measured: wgmma on sm_90a, else mma.sync; None if no kernel can run it."""
    few, many = sm90_bitplane_skinny, sm90_bitplane_gemm
    order = (*((few, many) if problem.m <= _FEW else (many, few)), sm80_bitplane_gemm)
    return next((one for one in order if one.why_not(problem) is None and one.configs(problem)), None)


def family_of(config: Facts) -> GemmKernel[Any]:
    """The module of a config's kernel."""
    return cast(GemmKernel[Any], sys.modules[type(config).__module__])
