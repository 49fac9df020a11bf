"""Experts: the routed experts of a mixture as ordinary linear layers, behind the interface that transformers calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybit.errors import LayerError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Gate:
    """How the products of gate_proj and up_proj join.

    kind: "silu", "gelu" or "gelu_tanh": kind(gate) * up.  "swiglu_clamped" (gpt-oss): gate at most ``limit``, up within
    ``limit`` of zero, then gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in (*_ACTIVATIONS, "swiglu_clamped"):
            raise LayerError(
                f"experts join their projections by {', '.join(_ACTIVATIONS)} or swiglu_clamped, not {self.kind!r}"
            )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Join gate and up [..., I]."""
        if self.kind != "swiglu_clamped":
            return _ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class Experts(nn.ModuleList):
    """The experts of a layer, each a module of three linear layers: x [T, H] -> [T, H].

    names: of the layers of gate, up and down, as the checkpoint names them.  An ``nn.Linear`` may be replaced by a
    ``QuantLinear``, as any other of a model.  transposed, interleaved: how 3-D tensors of all experts hold them, where
    checkpoints store such: [E, K, N], and alternating rows of gate and up.
    """

    transposed = False
    interleaved = False

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        gate: Gate | None = None,
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
        super().__init__(
            nn.ModuleDict(
                {
                    name: nn.Linear(*shape, bias=bias, dtype=dtype, device=device)
                    for name, shape in zip(names, shapes, strict=True)
                }
            )
            for _ in range(count)
        )
        self.names, self.gate, self.biased = tuple(names), gate or Gate(), bias
        self.num_experts, self.hidden_dim, self.intermediate_dim = count, hidden, inner

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over a token's experts of weight * down(join(gate(x), up(x))), in the dtype of hidden_states.

        hidden_states: [T, H].  top_k_index: int [T, k]; an id that is no expert's (-1, or the number of experts, which
        transformers writes for those of other ranks) adds nothing, and one that occurs twice adds twice.
        top_k_weights: float [T, k].  Sums are float32, in the order of experts.
        """
        total = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
        hit = top_k_index.unique().tolist()
        for number in hit:
            if not 0 <= number < len(self):
                continue
            token, place = torch.where(top_k_index == number)
            y = self.expert(number, hidden_states[token])
            total.index_add_(0, token, y.float() * top_k_weights[token, place, None].float())
        return total.to(hidden_states.dtype)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert's output for x [t, H]."""
        gate, up, down = (self.get_submodule(f"{number}.{name}") for name in self.names)
        y: Tensor = down(self.gate(gate(x), up(x)))
        return y

    def extra_repr(self) -> str:
        """What a printed model shows."""
        return f"experts={len(self)}, hidden={self.hidden_dim}, inner={self.intermediate_dim}, gate={self.gate.kind}"
