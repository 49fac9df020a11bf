"""Quantized experts joined for one op: their layers share the weights that it reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from anybit.codes.packing import stack
from anybit.device import Device
from anybit.errors import LayerError
from anybit.layers.linear import QuantLinear, wait_for
from anybit.ops.elementwise import paired_rows
from anybit.ops.experts import experts
from anybit.ops.prepared_experts import ExpertPart, PreparedExperts, interleaved, prepare_experts, why_not


@dataclass(eq=False)
class Joined:
    """Experts in one op. layers, parts: gate, up and down of each, and what they hold.  biases: as the op's."""

    prepared: PreparedExperts
    layers: list[QuantLinear]
    parts: list[ExpertPart]
    biases: tuple[Tensor | None, Tensor | None]
    _own: list[nn.Parameter | None] = field(init=False)
    _counted: list[nn.Parameter] = field(init=False)
    _counts: list[tuple[int, bool]] = field(init=False)
    _hooks: int = field(init=False, default_factory=lambda: RemovableHandle.next_id)

    def __post_init__(self) -> None:
        self._own = [layer.bias for layer in self.layers]  # of which ``biases`` are copies
        self._counted = [bias for bias in self._own if bias is not None and not bias.is_inference()]
        self._counts = self._writes()

    @classmethod
    def of(cls, layers: list[nn.Module], gate: str) -> "Joined":
        """Join gate, up and down of each expert, whose own weights are freed. Raises LayerError if that cannot be."""
        if (reason := why_not_joined(layers, gate)) is not None:
            raise LayerError(f"experts cannot be prepared together: {reason}")
        own: list[Any] = layers
        if own[0].weight_shape.is_cuda and torch.cuda.is_current_stream_capturing():
            raise LayerError("experts in a CUDA graph have not been prepared: call their prepare() before capturing")
        weights, count = [layer.quantized_weight() for layer in own], len(layers) // 3
        pairs = [weight for place, weight in enumerate(weights) if place % 3 != 2]
        prepared = prepare_experts(
            interleaved(stack(pairs), count), stack(weights[2::3]), count, own[0].scheme.activations, gate,
            own[0].backend,
        )  # fmt: skip
        gates, downs = [layer for place, layer in enumerate(own) if place % 3 != 2], own[2::3]
        wide, tall = (_stacked(both, count) for both in (gates, downs))
        if wide is not None:
            wide = wide[:, paired_rows(wide.shape[1] // 2).to(wide.device)].contiguous()
        wait_for(weights[0].words)
        parts = [ExpertPart.of(prepared, *divmod(place, 3)) for place in range(len(layers))]
        for layer, part, weight in zip(own, parts, weights, strict=True):
            layer.hand_over(part, weight)
        return cls(prepared, own, parts, (wide, tall))

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The op: x [T, H], ids and weights [T, k] -> [T, H] in x's dtype, under autocast too."""
        return experts(x, ids, weights, self.prepared, *self.biases).to(x.dtype)

    def holds(self, layers: list[nn.Module]) -> bool:
        """Whether these are still the joined layers, with the weights that they share, their biases and no hooks."""
        if layers != self.layers or self._writes() != self._counts:
            return False
        for layer, part, bias in zip(self.layers, self.parts, self._own, strict=True):
            now = layer.__dict__  # faster than attributes, and this runs at each call
            if now["_prepared"] is not part or now["_parameters"]["bias"] is not bias or "forward" in now:
                return False
        if RemovableHandle.next_id != self._hooks:
            if _hooked(layers):
                return False
            self._hooks = RemovableHandle.next_id
        return True

    def _writes(self) -> list[tuple[int, bool]]:
        """What changes when a bias is written, or is to be trained."""
        return [(bias._version, bias.requires_grad) for bias in self._counted]

    def separate(self) -> None:
        """Give each layer its own weight again, in the saved layout."""
        for layer, part in zip(self.layers, self.parts, strict=True):
            if layer._prepared is part:
                layer.unprepare()


def why_not_joined(layers: Sequence[nn.Module], gate: str, gpu: Device | None = None) -> str | None:
    """Why gate, up and down of each expert cannot run as one op, in a sentence; None if they can.

    gpu: where; None for their device.
    """
    own = [layer for layer in layers if isinstance(layer, QuantLinear)]
    if len(own) != len(layers):
        return "not all of their layers are quantized"
    first, down = own[0], own[2]
    ups, downs = [layer for place, layer in enumerate(own) if place % 3 != 2], own[2::3]
    # Asked at each eager call of experts that run one by one: no check goes further than it must.
    checks: dict[str, Callable[[], bool]] = {
        "gate_proj and up_proj have several schemes": lambda: any(layer.scheme != first.scheme for layer in ups),
        "down_proj has several schemes": lambda: any(layer.scheme != down.scheme for layer in downs),
        "activations have several formats": lambda: first.scheme.activations != down.scheme.activations,
        "layers run on several backends": lambda: any(layer.backend != first.backend for layer in own),
        "inputs are rotated": lambda: any(layer.hadamard for layer in own),
        "layers have an activation order": lambda: any(layer.ordered for layer in own),
        "some layers have a bias": lambda: any(
            len({layer.bias is None for layer in some}) > 1 for some in (ups, downs)
        ),
        "biases are trained": lambda: any(layer.bias is not None and layer.bias.requires_grad for layer in own),
        "layers have hooks": lambda: _hooked(own),
    }
    for reason, found in checks.items():
        if found():
            return reason
    if gpu is None and first.weight_shape.is_cuda and first.backend in (None, "packed"):
        gpu = Device.of(first.weight_shape)
    return why_not(
        len(downs), first.in_features, first.out_features, (first.scheme.weights, down.scheme.weights),
        first.scheme.activations, gate, gpu,
    )  # fmt: skip


def _stacked(layers: Sequence[QuantLinear], count: int) -> Tensor | None:
    """Biases of ``count`` experts, a row each."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.stack(biases).view(count, -1) if biases else None


def _hooked(layers: Sequence[nn.Module]) -> bool:
    """Whether calling layers does more than their own forward."""
    return _has_any_global_hook() or any(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        or "forward" in layer.__dict__
        for layer in layers
    )  # fmt: skip
