"""Fake quantization: learnable codes, each with a continuous ``place`` that is rounded in every forward pass.

    W = scale * (clamp(round(place), 0, 2^bits - 1) - zero)

Rounding is a straight-through estimator (Bengio et al., 2013); the scale's gradient is LSQ's (Esser et al., 2020).
Scale and rounding are learned together, as in OmniQuant, SignRound and EfficientQAT. Gradients also pass through the
clamp, because ``project`` keeps every place within the cell of some code: clipped weights can come back.

Masks of 2:4 sparse weights are fixed here; ``anybit.codes.sparse`` learns them first.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight, stack, unstack
from anybit.quantization.methods.grid import Grid

# How far beyond the outermost codes a place may lie: just within their rounding cells.
_EDGE = 0.49


class FakeQuantWeight(nn.Module):
    """The learnable form of a QuantizedWeight; forward returns the dequantized weight, [N, K].

    place: [N, K], continuous positions in code units.  log_scale: [N, G], log of the scale relative to its start.
    """

    def __init__(self, weight: QuantizedWeight, original: Tensor) -> None:
        super().__init__()
        self.weight = weight
        groups = weight.groups()
        self.top = 2**weight.format.bits - 1
        self.uniform = _uniform_group(groups, weight.scale.shape[1])
        self.register_buffer("groups", groups)
        self.register_buffer("base", weight.scale.float())
        self.register_buffer("zero", weight.zeros())
        self.register_buffer("kept", weight.mask())
        codes = weight.codes().float()
        # Start within each code's cell on the side of the original weight, so that cheap flips come first; not at the
        # edge, because Adam's first steps move all places equally and would flip all of those at once.
        wanted = original.float() / self._spread(self.base) + self._spread(self.zero)
        self.place = nn.Parameter(codes + (wanted - codes).clamp(-0.35, 0.35))
        self.log_scale = nn.Parameter(torch.zeros_like(self.base))

    base: Tensor
    zero: Tensor
    groups: Tensor
    kept: Tensor | None

    def forward(self) -> Tensor:
        """The dequantized weight."""
        scale = self._spread(self.base * self.log_scale.exp())
        rounded = self.place.detach().round().clamp_(0, self.top)
        codes = self.place + (rounded - self.place.detach())
        steps = codes - self._spread(self.zero)
        if self.kept is not None:
            steps = steps * self.kept
        return steps * scale

    @torch.no_grad()
    def project(self) -> None:
        """Clamp every place to the cells of existing codes; call after each optimizer step."""
        self.place.clamp_(-_EDGE, self.top + _EDGE)

    @torch.no_grad()
    def computed(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight in a dtype, without an autograd graph and in few passes over memory."""
        if not self._plain:
            weight: Tensor = self().to(dtype)
            return weight
        n, g = self.base.shape
        codes = self.place.round().clamp_(0, self.top).view(n, g, -1)
        scale = self.base * self.log_scale.exp()
        found = codes.sub_(self.zero[..., None]).mul_(scale[..., None]).to(dtype).view(self.place.shape)
        return found if self.kept is None else found.mul_(self.kept)

    def receive(self, gradient: Tensor, weight: Tensor) -> None:
        """Set the parameters' gradients from the gradient of ``weight``, the result of ``computed``."""
        if not self._plain:
            # Set gradients; do not accumulate onto the last step's.
            self.place.grad = self.log_scale.grad = None
            self().backward(gradient.float())
            return
        n, g = self.base.shape
        with torch.no_grad():
            scale = (self.base * self.log_scale.exp())[..., None]
            self.place.grad = (gradient.view(n, g, -1) * scale).view(self.place.shape)
            self.log_scale.grad = (gradient * weight).view(n, g, -1).sum(-1, dtype=torch.float32)

    @property
    def _plain(self) -> bool:
        """Whether all groups are complete and contiguous."""
        g = self.base.shape[1]
        return g == 1 or self.uniform * g == self.place.shape[1]

    @torch.no_grad()
    def harden(self) -> QuantizedWeight:
        """The codes and scales learned so far, as a QuantizedWeight."""
        old = self.weight
        scale = Grid.of(old.format, old.scale.dtype).store(self.base * self.log_scale.exp()).to(old.scale.dtype)
        codes = self.place.round().clamp(0, self.top).to(torch.uint8)
        if self.kept is not None:
            return QuantizedWeight.from_sparse_codes(codes, self.kept, scale, old.zero, old.format)
        return QuantizedWeight.from_codes(codes, scale, old.zero, old.format, old.group_index)

    def _spread(self, per_group: Tensor) -> Tensor:
        """Broadcast values per group [N, G] to weights [N, K]."""
        if per_group.shape[1] == 1:
            return per_group
        if self.uniform:
            # The backward of expand is a cheap sum; that of a gather is a scatter.
            n, g = per_group.shape
            return per_group[:, :, None].expand(n, g, self.uniform).reshape(n, g * self.uniform)[:, : len(self.groups)]
        return per_group[:, self.groups]


class Learnable(Protocol):
    """A weight [N, K] in its learnable form: FakeQuantWeight, or ``learn.sparse.SparseWeight``."""

    def computed(self, dtype: torch.dtype) -> Tensor:
        """The weight, in a dtype."""

    def receive(self, gradient: Tensor, weight: Tensor) -> None:
        """Set the parameters' gradients from the gradient of ``weight``, the result of ``computed``."""

    def project(self) -> None:
        """Project the parameters onto their feasible set; call after each optimizer step."""

    def harden(self) -> QuantizedWeight | Tensor:
        """The learned weight."""


L = TypeVar("L", bound=Learnable)


class Bank(Generic[L]):
    """Weights with the same format and number of inputs, learned as one tall matrix.

    Per-layer operations on a model's hundreds of layers would make a GPU launch-bound. ``refresh`` computes all weights
    once per step into ``leaves``, whose addresses never change; their gradients accumulate in one tensor, which
    ``receive`` propagates to codes and scales.
    """

    def __init__(self, soft: L, rows: dict[str, int], dtype: torch.dtype) -> None:
        self.soft, self._rows = soft, rows
        self._weight = self.soft.computed(dtype)
        self._gradient = torch.zeros_like(self._weight)
        self.leaves: dict[str, Tensor] = {}
        sizes = list(self._rows.values())
        parts = zip(self._rows, self._weight.split(sizes), self._gradient.split(sizes), strict=True)
        for name, part, gradient in parts:
            self.leaves[name] = part.detach().requires_grad_()
            self.leaves[name].grad = gradient

    def refresh(self) -> None:
        """Recompute the weights and zero their gradients."""
        self._weight.copy_(self.soft.computed(self._weight.dtype))
        self._gradient.zero_()

    def receive(self) -> None:
        """Propagate the accumulated gradient to the parameters."""
        self.soft.receive(self._gradient, self._weight)

    def harden(self) -> dict[str, Any]:
        """The learned weights by layer: QuantizedWeight, or Tensor from a SparseWeight."""
        whole, rows = self.soft.harden(), list(self._rows.values())
        parts = whole.split(rows) if isinstance(whole, Tensor) else unstack(whole, rows)
        return dict(zip(self._rows, parts, strict=True))


class GivenLinear(nn.Module):
    """A linear layer over a given weight tensor, [N, K], that is not a parameter."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Y = x W^T + bias, in the weight's dtype."""
        kind = self.given.dtype
        return nn.functional.linear(x.to(kind), self.given, None if self.bias is None else self.bias.to(kind))


def banks(
    weights: dict[str, QuantizedWeight],
    originals: dict[str, Tensor],
    dtype: torch.dtype,
    learnable: Callable[[QuantizedWeight, Tensor], L],
) -> list[Bank[L]]:
    """Weights in as few banks as possible; each layer with activation order gets its own.

    learnable: makes the learnable form from a quantized weight and its original.
    """
    together: dict[object, list[str]] = {}
    for name, weight in weights.items():
        key = name if weight.group_index is not None else (weight.format, weight.shape[1], weight.scale.dtype)
        together.setdefault(key, []).append(name)
    found = []
    for names in together.values():
        soft = learnable(stack([weights[name] for name in names]), torch.cat([originals[name] for name in names]))
        found.append(Bank(soft, {name: weights[name].shape[0] for name in names}, dtype))
    return found


def parameter_groups(
    modules: Sequence[Bank[FakeQuantWeight]], place_rate: float, scale_rate: float
) -> list[dict[str, object]]:
    """Optimizer groups: places (in code units) and log scales, each with its learning rate."""
    return [
        {"params": [m.soft.place for m in modules], "lr": place_rate},
        {"params": [m.soft.log_scale for m in modules], "lr": scale_rate},
    ]


def _uniform_group(groups: Tensor, count: int) -> int:
    """The group size if every channel k is in group k // size and there are several groups, else 0."""
    size = int((groups == 0).sum())
    expected = torch.arange(len(groups), device=groups.device) // size
    return size if count > 1 and torch.equal(groups, expected) else 0
