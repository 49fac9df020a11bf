"""Kernels of every token count that an engine can ask for, compiled while its model loads."""

import logging
from typing import Any

from torch import nn

_logger = logging.getLogger("vllm.anybit")


class Ledger:
    """The layers of a model that are to become ready, and those that are: when the last one is, kernels are made."""

    def __init__(self) -> None:
        self.expected, self.ready = 0, 0

    def expect(self) -> None:
        """One more layer is being built."""
        self.expected += 1

    def add(self, layer: nn.Module, products: list[Any]) -> None:
        """A layer is ready."""
        self.ready += 1
