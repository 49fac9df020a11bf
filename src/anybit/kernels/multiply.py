"""y = x W^T + bias on tensors, by any kernel, for searches, benchmarks and tests; layers run plans (``anybit.ops``)."""

from dataclasses import replace

import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane_problem
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.kernels.gemm_kernel import C, GemmKernel, Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem
from anybit.kernels.packed.packed_layout import PackedWeight, in_order


def multiply(
    kernel: GemmKernel[C], x: Tensor | Packed, weight: PackedWeight | PlaneWeight, y: Tensor,
    bias: Tensor | None = None, config: C | None = None, *, x_scale: Tensor | None = None, pdl: bool = True,
) -> None:  # fmt: skip
    """y[:] = x W^T + bias on the current stream. config: the kernel's default if None.

    x: float16 or bfloat16 [m, k], or codes: ``Packed``, or int8 [m, k] with x_scale float32 [m].  y: [m, n].
    bias: [n], in y's dtype, float32 for bit planes.  pdl: whether it may start before the kernel ahead ends; always
    safe, as it touches nothing that that one writes before it has ended.
    Raises KernelError for operands or a config that do not fit.
    """
    problem, operands = product(kernel, x, weight, y, bias, x_scale)
    config = kernel.default(problem) if config is None else config
    if (reason := kernel.why_not(problem, config)) is not None:
        raise KernelError(reason)
    operands = replace(operands, scratch=scratch(kernel, problem, config, y.device))
    for launch in launches(kernel, operands, problem, config):
        jit.launch(launch.kernel, launch.params, launch.grid, pdl=pdl and launch.pdl, device=y.get_device())


def product(
    kernel: GemmKernel[C], x: Tensor | Packed, weight: PackedWeight | PlaneWeight, y: Tensor,
    bias: Tensor | None = None, x_scale: Tensor | None = None,
) -> tuple[LinearProblem, Operands]:  # fmt: skip
    """The problem and operands of ``multiply``, without scratch. Raises KernelError for operands that do not fit."""
    if kernel.traits.target is Target.planes:
        assert isinstance(x, Packed) and isinstance(weight, PlaneWeight)
        return bitplane_problem.product(x, weight, y, bias)
    assert isinstance(weight, PackedWeight)
    if isinstance(x, Tensor) and not kernel.traits.gathers:
        x = in_order(weight.permutation, x)
    gathers = kernel.traits.gathers
    return packed_problem.product(x, weight, y, bias, gathers=gathers, x_scale=x_scale)


def scratch(kernel: GemmKernel[C], problem: LinearProblem, config: C, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scratch memory of a launch."""
    size, zeros = kernel.traits.scratch(problem, config)
    return torch.empty(size, dtype=torch.uint8, device=device), torch.zeros(zeros, dtype=torch.uint8, device=device)
