"""What a backend does to rows while it codes them, instead of reading what another kernel has written."""

from dataclasses import dataclass, replace

from torch import Tensor

from anybit import jit
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Config, Packed, Params, Problem, Source, Target
from anybit.scheme import ActivationFormat


@dataclass(frozen=True, eq=False)
class ActivationPrologue:
    """What is done to rows while they are coded.  rows: 16-bit [m, k], or [m, gate k | up k] for ``silu_mul``.

    rotated: what comes of that goes through ``anybit::hadamard``, without a launch of its own.
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
        """A tensor of the shape, dtype and device of the rows that it makes, [m, k]; not of their values."""
        return self.rows[:, : self.rows.shape[1] // 2] if self.source is Source.silu_mul else self.rows

    def problem(self, format: ActivationFormat, target: Target) -> Problem:
        """What quantize-and-pack is asked for. It reads gamma and the residual in the same eights as rows."""
        problem = quantize_activations.problem_of(self.rows, format, target, self.source, self.rotated)
        others = (one for one in (self.gamma, self.residual) if one is not None)
        if problem.aligned and any(one.data_ptr() % 16 for one in others):
            return replace(problem, aligned=False)
        return problem

    def arguments(self, problem: Problem, config: Config, packed: Packed) -> Params:
        """The arguments of its launch."""
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
"""What a layer multiplies: x [..., K], or rows that are made while they are coded."""


def opened(x: LinearInput) -> tuple[Tensor, ActivationPrologue | None]:
    """A tensor of the input's shape, dtype and device, and the prologue that makes its values, if one does."""
    return (x.made, x) if isinstance(x, ActivationPrologue) else (x, None)
