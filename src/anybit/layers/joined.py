"""Quantized experts joined for one op, or one for each of their schemes: layers share the weights that it reads."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from anybit.codes.packing import QuantizedWeight, stack
from anybit.device import Device
from anybit.errors import LayerError
from anybit.layers.linear import QuantLinear, wait_for
from anybit.ops.elementwise import paired_rows
from anybit.ops.experts import experts
from anybit.ops.prepared_experts import ExpertPart, PreparedExperts, interleaved, prepare_experts, why_not
from anybit.scheme import Scheme


@dataclass(frozen=True, eq=False)
class Group:
    """Experts of one scheme, for one op. biases: as the op's."""

    prepared: PreparedExperts
    biases: tuple[Tensor | None, Tensor | None]

    @classmethod
    def of(cls, own: list[QuantLinear], weights: list[QuantizedWeight], gate: str) -> "Group":
        """Join experts. own, weights: gate, up and down of each."""
        count, pairs = len(own) // 3, [weight for place, weight in enumerate(weights) if place % 3 != 2]
        prepared = prepare_experts(
            interleaved(stack(pairs), count), stack(weights[2::3]), count, own[0].scheme.activations, gate,
            own[0].backend,
        )  # fmt: skip
        gates, downs = [layer for place, layer in enumerate(own) if place % 3 != 2], own[2::3]
        wide, tall = (_stacked(both, count) for both in (gates, downs))
        if wide is not None:
            wide = wide[:, paired_rows(wide.shape[1] // 2).to(wide.device)].contiguous()
        return cls(prepared, (wide, tall))


@dataclass(eq=False)
class Joined:
    """Experts in one op, or in one for each scheme.

    places: int32 [groups, experts + 2], an id -> the expert's place in a group, or -1, also for -1 and one id too many.
    layers, parts: gate, up and down of each expert, and what they hold.
    """

    groups: list[Group]
    places: Tensor
    layers: list[QuantLinear]
    parts: list[ExpertPart]
    _counted: list[nn.Parameter] = field(init=False)
    _counts: list[tuple[int, bool]] = field(init=False)
    _hooks: int = field(init=False, default_factory=lambda: RemovableHandle.next_id)

    def __post_init__(self) -> None:
        biases = [layer.bias for layer in self.layers]  # of which the groups' are copies
        self._counted = [bias for bias in biases if bias is not None and not bias.is_inference()]
        self._counts = self._writes()

    @classmethod
    def of(cls, layers: list[nn.Module], gate: str) -> "Joined":
        """Join gate, up and down of each expert, whose own weights are freed. Raises LayerError if that cannot be."""
        if (reason := why_not_joined(layers, gate)) is not None:
            raise LayerError(f"experts cannot be prepared together: {reason}")
        own: list[Any] = layers
        if own[0].weight_shape.is_cuda and torch.cuda.is_current_stream_capturing():
            raise LayerError("experts in a CUDA graph have not been prepared: call their prepare() before capturing")
        weights, found = [layer.quantized_weight() for layer in own], _by_scheme(own)
        places = torch.full((len(found), len(own) // 3 + 2), -1, dtype=torch.int32)
        groups: list[Group] = []
        parts: dict[int, ExpertPart] = {}
        for row, numbers in zip(places, found, strict=True):
            row[numbers] = torch.arange(len(numbers), dtype=torch.int32)
            mine = [3 * number + place for number in numbers for place in range(3)]
            groups.append(Group.of([own[at] for at in mine], [weights[at] for at in mine], gate))
            parts |= {at: ExpertPart.of(groups[-1].prepared, *divmod(i, 3)) for i, at in enumerate(mine)}
        wait_for(weights[0].words)
        for at, (layer, weight) in enumerate(zip(own, weights, strict=True)):
            layer.hand_over(parts[at], weight)
        return cls(groups, places.to(weights[0].words.device), own, [parts[at] for at in range(len(own))])

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The ops, and their sum: x [T, H], ids and weights [T, k] -> [T, H] in x's dtype, under autocast too."""
        chosen = [ids] if len(self.groups) == 1 else self.places[:, ids]
        return functools.reduce(
            torch.add,
            (
                experts(x, own, weights, group.prepared, *group.biases).to(x.dtype)
                for own, group in zip(chosen, self.groups, strict=True)
            ),
        )

    @property
    def left(self) -> bool:
        """Whether a layer has gone, or runs by another weight, bias or forward."""
        return any(group.prepared.left for group in self.groups)

    @property
    def changed(self) -> bool:
        """Whether a layer has ``left``, has got hooks, or its bias was written."""
        if self.left or self._writes() != self._counts:
            return True
        if RemovableHandle.next_id != self._hooks:
            if _hooked(self.layers):
                return True
            self._hooks = RemovableHandle.next_id
        return False

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
    first = own[0]
    ups, downs = [layer for place, layer in enumerate(own) if place % 3 != 2], own[2::3]
    # Asked at each eager call of experts that run one by one: no check goes further than it must.
    checks: dict[str, Callable[[], bool]] = {
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
    for numbers in _by_scheme(own):
        gate_up, up, down = (layer.scheme for layer in own[3 * numbers[0] :][:3])
        if gate_up != up:
            return f"gate_proj and up_proj of expert {numbers[0]} have two schemes"
        if gate_up.activations != down.activations:
            return f"the activations of expert {numbers[0]} have two formats"
        shape, formats = (first.in_features, first.out_features), (gate_up.weights, down.weights)
        if (refused := why_not(len(numbers), *shape, formats, gate_up.activations, gate, gpu)) is not None:
            return refused
    return None


def _by_scheme(layers: Sequence[QuantLinear]) -> list[list[int]]:
    """The numbers of experts that have the schemes of their gate, up and down in common."""
    found: dict[tuple[Scheme, ...], list[int]] = {}
    for number in range(len(layers) // 3):
        found.setdefault(tuple(layer.scheme for layer in layers[3 * number :][:3]), []).append(number)
    return [*found.values()]


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
