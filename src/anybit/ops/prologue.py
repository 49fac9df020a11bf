"""What a backend does to rows while it codes them, instead of reading what another kernel has written."""

from dataclasses import dataclass

from torch import Tensor

from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Packed, Source, Target


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

    def code(self, packed: Packed, target: Target) -> None:
        """Launch quantize-and-pack."""
        problem = quantize_activations.problem_of(self.rows, packed.format, target, self.source, self.rotated)
        quantize_activations.launch(
            problem, quantize_activations.default(problem), packed, self.rows,
            gamma=self.gamma, epsilon=self.epsilon, residual=self.residual, residual_sum=self.residual_sum,
        )  # fmt: skip
