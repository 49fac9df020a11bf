"""humming-kernels (PyPI) on the same weights: a baseline of gemm_packed.py, if installed.

Its checkpoint layout is dense words, lowest bits first, with scales [N, groups], so it gets exactly our codes and
scales, and its result is checked in the same way. It chooses its own kernel.
"""

import copy
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from anybit.codes.packing import QuantizedWeight
from anybit.scheme import Scheme
from timing import Captured, calls_for, floor_us, rotations

if TYPE_CHECKING:
    from linear_packed import Weights


def installed() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("humming") is not None


class Peer:
    """A layer in humming's layout, in enough copies to defeat the caches."""

    def __init__(self, layer: QuantizedWeight, scheme: Scheme) -> None:
        from humming.layer import HummingLayer

        self.shape, self.scheme = layer.shape, scheme
        n, k = layer.shape
        weight = {"dtype": f"int{layer.format.bits}", "group_size": layer.format.group or 0}
        kind = {"float": "float8e4m3", "sym": "int8"}
        x = {"dtype": kind[scheme.activations.code]} if scheme.activations.quantized else None
        made = HummingLayer(n, k, weight, x, torch_dtype=torch.float16).cuda()
        made.load_from_tensors({"weight": layer.words, "weight_scale": layer.scale.half()})
        made.transform()
        self.bytes = layer.words.numel() * 4 + layer.scale.numel() * 2
        self.copies = [made] + [copy.deepcopy(made) for _ in range(rotations(self.bytes, 64) - 1)]

    def captured(
        self, x: torch.Tensor, weights: "Weights", error_of: Callable[[torch.Tensor, torch.Tensor, "Weights"], float]
    ) -> Captured:
        """Consecutive calls in a CUDA graph. Raises AssertionError for a wrong result."""
        m, (n, k) = x.shape[0], self.shape
        y = torch.empty(m, n, dtype=torch.float16, device=x.device)
        self.copies[0](x, outputs=y)
        # It rounds to 8 bits in its own way, so only products of 16-bit activations must be as accurate as ours.
        error, limit = error_of(y, x, weights), 2e-2 if self.scheme.activations.integer else 1e-3
        if self.scheme.activations.quantized and not self.scheme.activations.integer:
            limit = 6e-2
        if not error < limit:
            raise AssertionError(f"humming: mean relative error {error:.2e}")
        expected = 2 * floor_us(self.bytes + 2 * m * (n + k), 2 * m * n * k, "f16")
        return Captured(lambda i: self.copies[i % len(self.copies)](x, outputs=y), calls_for(expected, 32, 900.0))
