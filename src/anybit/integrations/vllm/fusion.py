"""Fewer, larger kernels in vLLM's compiled graph."""

from typing import Any

from torch import Tensor, nn

from anybit.scheme import Scheme


def pairs_of(layer: nn.Module, scheme: Scheme) -> Tensor | None:
    """The order of a gate and up projection's outputs in which its product ends with SiLU; None for other layers."""
    return None


def activate(layer: nn.Module, scheme: Scheme, paired: bool) -> None:
    """Have the activation after a gate and up projection run on anybit."""
