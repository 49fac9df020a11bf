"""Adam (Kingma and Ba, 2014) over parts of a tensor, in 32 or 16 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

_FIRST, _SECOND = 0.9, 0.99
# Gradients of single weights are small: torch's 1e-8 would slow them down.
_TINY = 1e-10


class Adam(NamedTuple):
    """A tensor and its moments, of one dtype.

    Arithmetic is float32. In 16 bits results are rounded stochastically: small steps would be lost otherwise.
    """

    value: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, value: Tensor) -> "Adam":
        """A tensor that has not moved yet."""
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))

    def part(self, rows: slice) -> "Adam":
        """Views of some rows."""
        return Adam(*(state[rows] for state in self))

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: Tensor | float, count: Tensor | int) -> None:
        """Move the value against its gradient, float32. count: of steps so far, from 1."""
        value, first, second = (state.float() for state in self)
        first.lerp_(gradient, 1 - _FIRST)
        second.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
        size = (second / (1 - _SECOND**count)).sqrt_().add_(_TINY)
        value.sub_(first.div(size).mul_(rate / (1 - _FIRST**count)))
        if self.value.dtype != torch.float32:
            for i, (state, found) in enumerate(zip(self, (value, first, second), strict=True)):
                state.copy_(_dithered(found, 3 * count + i))

    def state(self, name: str) -> dict[str, Tensor]:
        """The tensors by name, to be saved, or to copy saved ones into."""
        return {name: self.value, f"{name}.first": self.first, f"{name}.second": self.second}


def _dithered(x: Tensor, seed: Tensor | int) -> Tensor:
    """Round float32 to bfloat16, up or down at random so that the expected value is x."""
    # Hashed places, which a compiler can fuse, as it cannot a generator's numbers.
    noise = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) + (seed * 40503 & 0x7FFFFFFF)
    for factor, shift in ((0x2C1B3C6D, 15), (0x297A2D39, 12)):
        noise = noise.bitwise_xor(noise >> shift) * factor
    bits = x.contiguous().view(torch.int32) + (noise >> 16 & 0xFFFF)
    return (bits & -1 << 16).view(torch.float32).bfloat16()
