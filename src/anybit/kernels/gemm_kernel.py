"""``GemmKernel``: what a module provides to run y = x W^T + bias, and how every one of them is launched."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from anybit import jit
from anybit.jit import Launch, Pointer, Slot
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.linear_problem import LinearProblem


@dataclass(frozen=True, eq=False)
class Operands:
    """What a product reads and writes: tensors, or slots of a plan.

    x: 16-bit rows or codes, ``x_stride`` values apart.  x_scale, x_sum, x_zero: of each token's codes.
    weight: tiles, row_scale, row_zero and permutation, or planes, scale, correction and zero.
    y: rows of results, ``y_stride`` values apart.  bias: [n].  scratch: of ``Traits.scratch``.
    """

    x: Pointer
    x_stride: int
    weight: tuple[Pointer, Pointer, Pointer, Pointer]
    y: Pointer
    y_stride: int
    bias: Pointer = None
    x_scale: Pointer = None
    x_sum: Pointer = None
    x_zero: Pointer = None
    scratch: tuple[Pointer, Pointer] = (None, None)

    def behind(self, first: int, problem: LinearProblem) -> "Operands":
        """The operands of the tokens from the ``first`` on."""
        if not first:
            return self
        x_bytes, y_bytes = 1 if problem.activations.quantized else 2, problem.dtype.itemsize
        x, y = _behind(self.x, first, self.x_stride * x_bytes), _behind(self.y, first, self.y_stride * y_bytes)
        return replace(self, x=x, y=y, x_scale=_behind(self.x_scale, first, 4), x_sum=_behind(self.x_sum, first, 4))


def _behind(pointer: Pointer, rows: int, row_bytes: int) -> Pointer:
    """A pointer some rows further on."""
    if isinstance(pointer, Slot):
        return replace(pointer, offset=pointer.offset + rows * row_bytes)
    return pointer[rows:] if isinstance(pointer, Tensor) else pointer


C = TypeVar("C")
"""A kernel's ``Config``."""


@dataclass(frozen=True)
class Traits(Generic[C]):
    """What callers need to know of a kernel besides its functions.

    name: of its header and in maps.  target: the layout of quantized activations, and with it that of weights.
    arguments: the Params of a launch, unchecked.  gathers: it reads 16-bit rows that start anywhere, in the weight's
    activation order; others get them in order, on 16 bytes.  overlaps: it may start before the kernel ahead of it ends
    (PDL).  silu: the kernel of a config with a SiLU epilogue, y [m, n / 2] = silu(gate) * up of outputs that alternate
    eight of gate and eight of up; None if it has none.  scratch: bytes of a launch's scratch memory, and of further
    scratch that is zero before and after it.  at_once: the problem with no more tokens than one launch takes.
    prepares: a launch ahead of it, which turns x into what it reads; None if there is none.
    """

    name: str
    target: Target
    arguments: Callable[[Operands, LinearProblem, C], object]
    gathers: bool = False
    overlaps: bool = True
    silu: Callable[[C], jit.Kernel | None] = lambda config: None
    scratch: Callable[[LinearProblem, C], tuple[int, int]] = lambda problem, config: (0, 0)
    at_once: Callable[[LinearProblem], LinearProblem] = lambda problem: problem
    prepares: Callable[[Operands, LinearProblem, C], Launch] | None = None


class GemmKernel(Protocol[C]):
    """A kernel that runs linear problems. Modules implement it: their names are these."""

    traits: Traits[C]
    Config: type[C]

    def why_not(self, problem: LinearProblem, config: C | None = None) -> str | None:
        """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""

    def configs(self, problem: LinearProblem) -> Iterable[C]:
        """The legal configs, for a search."""

    def default(self, problem: LinearProblem) -> C:
        """The built-in choice. Raises KernelError if there is none."""

    def shared_bytes(self, config: C) -> int:
        """Dynamic shared memory per block, in bytes."""

    def kernel(self, config: C) -> jit.Kernel:
        """The kernel of a config."""

    def grid(self, problem: LinearProblem, config: C) -> jit.Grid:
        """Blocks of a launch."""


def launches(
    kernel: GemmKernel[C], operands: Operands, problem: LinearProblem, config: C, silu: bool = False
) -> list[Launch]:
    """The launches of a product, in order. silu: with the epilogue of ``Traits.silu``."""
    made = kernel.traits.silu(config) if silu else kernel.kernel(config)
    assert made is not None, f"{kernel.traits.name} has no SiLU epilogue for {config}"
    most, found = kernel.traits.at_once(problem).m, []
    for first in range(0, problem.m, most):
        part = replace(problem, m=min(most, problem.m - first))
        mine = operands.behind(first, problem)
        if kernel.traits.prepares is not None:
            found.append(kernel.traits.prepares(mine, part, config))
        arguments = kernel.traits.arguments(mine, part, config)
        found.append(Launch(made, arguments, kernel.grid(part, config), kernel.traits.overlaps))
    return found
