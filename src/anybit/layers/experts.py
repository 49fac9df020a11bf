"""Experts: the routed experts of a mixture as ordinary linear layers, behind the interface that transformers calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from anybit.errors import LayerError
from anybit.layers.joined import Joined, why_not_joined
from anybit.layers.linear import PREPARING, QuantLinear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Gate:
    """How the products of gate_proj and up_proj join.

    kind: "silu", "gelu" or "gelu_tanh": kind(gate) * up.  "swigluoai" (gpt-oss): gate at most ``limit``, up within
    ``limit`` of zero, then gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in (*_ACTIVATIONS, "swigluoai"):
            raise LayerError(
                f"experts join their projections by {', '.join(_ACTIVATIONS)} or swigluoai, not {self.kind!r}"
            )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Join gate and up [..., I]."""
        if self.kind != "swigluoai":
            return _ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def __str__(self) -> str:
        usual = self.kind != "swigluoai" or (self.alpha, self.limit) == (1.702, 7.0)
        return self.kind if usual else f"swigluoai of alpha {self.alpha} and limit {self.limit}"


class _Watched(nn.Module):
    """Tells the layers in a child module that is replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._leave(name)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As ``nn.Module`` does."""
        self._leave(name)
        super().add_module(name, module)

    def __delattr__(self, name: str) -> None:
        self._leave(name)
        super().__delattr__(name)

    def _leave(self, name: str) -> None:
        old = self.__dict__.get("_modules", {}).get(name)
        for layer in () if old is None else old.modules():
            if isinstance(layer, QuantLinear) and layer._prepared is not None:
                layer._prepared.leave()


class Expert(_Watched, nn.ModuleDict):
    """The linear layers of an expert."""


class Experts(_Watched, nn.ModuleList):
    """The experts of a layer, each a module of three linear layers: x [T, H] -> [T, H].

    names: of the layers of gate, up and down, as the checkpoint names them.  An ``nn.Linear`` may be replaced by a
    ``QuantLinear``, as any other of a model.  transposed, interleaved: how 3-D tensors of all experts hold them, where
    checkpoints store such: [E, K, N], and alternating rows of gate and up.

    On a GPU the first call, or ``prepare``, joins quantized experts into one op, or one for each of their schemes,
    where ``why_not_together`` allows: ids are not read on the host. Layers then share the ops' weights: ``state_dict``
    saves the same, and a layer that is replaced, hooked, moved or called alone, or whose bias changes, separates all.
    Compiled code goes on with the weights of then after hooks and writes to a bias alone.
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
            Expert(
                {
                    name: nn.Linear(*shape, bias=bias, dtype=dtype, device=device)
                    for name, shape in zip(names, shapes, strict=True)
                }
            )
            for _ in range(count)
        )
        self.names, self.gate, self.biased = tuple(names), gate or Gate(), bias
        self.num_experts, self.hidden_dim, self.intermediate_dim = count, hidden, inner
        self._joined: Joined | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over a token's experts of weight * down(join(gate(x), up(x))), in the dtype of hidden_states.

        hidden_states: [T, H].  top_k_index: int [T, k]; an id that is no expert's (-1, or the number of experts, which
        transformers writes for those of other ranks) adds nothing, and one that occurs twice adds twice.
        top_k_weights: float [T, k].  Sums are float32.  Raises LayerError for weights of another shape than the ids.
        """
        if top_k_weights.shape != top_k_index.shape:
            raise LayerError(
                f"top_k_weights must have the shape of top_k_index, {tuple(top_k_index.shape)}, and is "
                f"{tuple(top_k_weights.shape)}: give each chosen expert's own, not those of all experts"
            )
        if not self._together(hidden_states):
            return self._one_by_one(hidden_states, top_k_index, top_k_weights, self.expert)
        assert self._joined is not None
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            y: Tensor = _Differentiable.apply(hidden_states, top_k_index, top_k_weights, self)  # type: ignore[no-untyped-call]
            return y
        return self._joined.run(hidden_states, top_k_index, top_k_weights)

    def _one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
        total = x.new_zeros(x.shape, dtype=torch.float32)
        for number in ids.unique().tolist():
            if not 0 <= number < len(self):
                continue
            token, place = torch.where(ids == number)
            total.index_add_(0, token, expert(number, x[token]).float() * weights[token, place, None].float())
        return total.to(x.dtype)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert's output for x [t, H]."""
        gate, up, down = self._layers()[3 * number :][:3]
        y: Tensor = down(self.gate(gate(x), up(x)))
        return y

    def _layers(self) -> list[nn.Module]:
        """Gate, up and down of each expert."""
        own: Any = self._modules.values()
        return [expert._modules[name] for expert in own for name in self.names]

    def prepare(self, together: bool | None = None) -> "Experts":
        """Convert all weights to the layout of what will run them, as ``QuantLinear.prepare`` does.

        together: for one op a scheme; None: on a GPU, if ``why_not_together`` allows, else layer by layer.
        Raises LayerError if they cannot run together, and while a CUDA graph is being captured.
        """
        if torch.compiler.is_dynamo_compiling():
            told = "these experts are not prepared: call prepare() of each before torch.compile(fullgraph=True)"
            torch._dynamo.graph_break(msg=told)
            torch.compiler.disable(self._prepare)(together)
        else:
            self._prepare(together)
        return self

    def freeze_biases(self) -> None:
        """Train no bias of a quantized layer, as ``QuantLinear`` makes them: transformers loads them to be trained."""
        for layer in self._layers():
            if isinstance(layer, QuantLinear) and layer.bias is not None:
                layer.bias.requires_grad_(False)

    def why_not_together(self) -> str | None:
        """Why the experts cannot be one op a scheme on their device, in a sentence; None if they can."""
        return why_not_joined(self._layers(), str(self.gate))

    def _prepare(self, together: bool | None) -> None:
        with PREPARING:
            if self._joined is not None and together is not False:
                return
            self.separate()
            layers = [layer for layer in self._layers() if isinstance(layer, QuantLinear)]
            if together is None:
                together = any(layer.weight_shape.is_cuda for layer in layers) and self.why_not_together() is None
            if together:
                self._joined = Joined.of(self._layers(), str(self.gate))
            else:
                for layer in layers:
                    layer.prepare()

    def separate(self) -> "Experts":
        """Give each layer its own weight again, in the saved layout, if they share one."""
        with PREPARING:
            if self._joined is not None:
                self._joined.separate()
            self._joined = None
        return self

    def _together(self, x: Tensor) -> bool:
        """Whether this call is one op; joins or separates the experts where it must."""
        forwards = forward_ad._current_level >= 0
        if torch.compiler.is_compiling():
            self._separate_changed()
            joined = self._joined is not None and not self._joined.left  # on which Dynamo guards
            if not joined and x.is_cuda:
                self.prepare()
            return self._joined is not None and not forwards
        if forwards:
            self.separate()
        self._separate_changed()
        if self._joined is None and x.is_cuda and not forwards and self.why_not_together() is None:
            self.prepare()
        return self._joined is not None

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _separate_changed(self) -> None:
        """Separate joined layers of which one has changed. torch.compile calls, but does not trace, this."""
        if self._joined is not None and (self._joined.changed or len(self._joined.layers) != 3 * len(self)):
            self.separate()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.separate()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *arguments):  # type: ignore[no-untyped-def]
        self.separate()
        super()._load_from_state_dict(*arguments)


class ScaledInputs(nn.Module):
    """Llama 4's mixture, whose router scales what experts get: x [..., H] -> [T, H], and the router's logits [T, E].

    own: the module whose router, experts and shared expert it takes.
    """

    def __init__(self, own: Any, experts: Experts) -> None:
        super().__init__()
        self.experts, self.router, self.shared_expert, self.top = experts, own.router, own.shared_expert, own.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Shared expert and routed ones, each of ``top`` on the input times its score."""
        x = hidden_states.flatten(0, -2)
        scores, logits = self.router(x)
        ids = logits.topk(self.top, dim=1).indices
        y = self.shared_expert(x)
        for own, scale in zip(ids.split(1, 1), scores.gather(1, ids).split(1, 1), strict=True):
            y = y + self.experts(x * scale, own, torch.ones_like(scale))
        return y, logits


class _Differentiable(torch.autograd.Function):
    """Joined experts, with gradients for x and the routing weights."""

    @staticmethod
    def forward(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """The op's output."""
        assert experts._joined is not None
        return experts._joined.run(x.detach(), ids, weights.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs for backward."""
        *tensors, ctx.experts = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, through dequantized experts one by one."""
        x, ids, weights = ctx.saved_tensors
        layers, join = ctx.experts._layers(), ctx.experts.gate

        def product(layer: Any, x: Tensor) -> Tensor:
            return functional.linear(x, layer.dequantize(), None if layer.bias is None else layer.bias.float())

        def expert(number: int, x: Tensor) -> Tensor:
            gate, up, down = layers[3 * number :][:3]
            return product(down, join(product(gate, x.float()), product(up, x.float())))

        def sums(x: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = ctx.experts._one_by_one(x, ids, weights, expert)
            return y

        of_x, of_weights = torch.func.vjp(sums, x, weights)[1](gradient)
        return of_x, None, of_weights, None
