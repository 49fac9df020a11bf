"""The exact reference in plain torch, as a backend; the default on a CPU."""

import torch
from torch import Tensor

from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight
from anybit.ops.backend import Backend, LinearSpec
from anybit.scheme import ActivationFormat


class ReferencePacked(Backend):
    """Keeps the weight packed and decodes it at every call: least memory, slow."""

    name = "reference-packed"
    # Works on any device, but a silent fallback on a GPU would be slow: there it must be named.
    unasked = ("cpu",)

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The packed tensors; empty ones for those that the format does not have."""
        empty = torch.empty(0, dtype=torch.int32, device=weight.device)
        optional = (weight.zero, weight.group_index, weight.indices, weight.minimum)
        return [weight.words, weight.scale, *(empty if tensor is None else tensor for tensor in optional)]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The weight whose tensors these are."""
        words, scale, *optional = tensors[:6]
        zero, group_index, indices, minimum = (tensor if tensor.numel() else None for tensor in optional)
        return QuantizedWeight(words, scale, zero, (spec.n, spec.k), spec.weights, group_index, indices, minimum)

    def linear(self, x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """The exact linear of ``anybit.codes.reference``."""
        return reference.linear(x, self.restore(tensors, spec), spec.activations, bias)


class ReferenceDecoded(ReferencePacked):
    """Decodes the weight once and also keeps it in float32: fast, at the memory of a float32 model."""

    name = "reference-decoded"

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The packed tensors, then the decoded weight."""
        return [*super().prepare(weight, activations), reference.decode(weight, activations)]

    def decoded(self, tensors: list[Tensor]) -> Tensor:
        """What ``prepare`` added."""
        return tensors[6]

    def linear(self, x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """The exact linear of ``anybit.codes.reference`` over the decoded weight."""
        reference.check_activations(x, spec.k)
        return reference.multiply(x, tensors[6], tensors[1], spec.weights, spec.activations, bias)
