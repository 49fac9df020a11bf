"""Work fused into the quantize-and-pack kernel: a norm, SiLU or rotation on the rows that it quantizes."""

from dataclasses import dataclass, replace

from torch import Tensor

from anybit import jit
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Config, Packed, Params, Problem, Source, Target
from anybit.scheme import ActivationFormat


@dataclass(frozen=True, eq=False)
class ActivationPrologue:
    """Work on rows while they are quantized. rows: 16-bit [m, k], or [m, gate k | up k] for ``silu_mul``.

    rotated: ``anybit::hadamard`` follows, in the same launch.
    """

    source: Source
    rows: Tensor
    gamma: Tensor | None = None
    epsilon: float = 0.0
    residual: Tensor | None = None
    residual_sum: Tensor | None = None
    rotated: bool = False

    @property
    def made(self) -> Tensor:
        """A stand-in for the resulting rows [m, k]: their shape, dtype and device, but not their values."""
        return self.rows[:, : self.rows.shape[1] // 2] if self.source is Source.silu_mul else self.rows

    def problem(self, format: ActivationFormat, target: Target) -> Problem:
        """The quantize-and-pack problem; gamma and the residual need the same 16-byte alignment as the rows."""
        problem = quantize_activations.problem_of(self.rows, format, target, self.source, self.rotated)
        others = (one for one in (self.gamma, self.residual) if one is not None)
        if problem.aligned and any(one.data_ptr() % 16 for one in others):
            return replace(problem, aligned=False)
        return problem

    def arguments(self, problem: Problem, config: Config, packed: Packed) -> Params:
        """The launch's parameters."""
        return quantize_activations.arguments(
            problem, config, packed, self.rows,
            gamma=self.gamma, epsilon=self.epsilon, residual=self.residual, residual_sum=self.residual_sum,
        )  # fmt: skip

    def code(self, packed: Packed, target: Target) -> None:
        """Launch quantize-and-pack."""
        problem = self.problem(packed.format, target)
        config = quantize_activations.default(problem)
        jit.launch(
            quantize_activations.kernel(config), self.arguments(problem, config, packed),
            quantize_activations.grid(problem, config), pdl=True, device=self.rows.get_device(),
        )  # fmt: skip


LinearInput = Tensor | ActivationPrologue
"""A layer's input: x [..., K], or rows computed while they are quantized."""


def opened(x: LinearInput) -> tuple[Tensor, ActivationPrologue | None]:
    """(a tensor of the input's shape, dtype and device, the prologue that computes its values or None)."""
    return (x.made, x) if isinstance(x, ActivationPrologue) else (x, None)
