"""Adam (Kingma and Ba, 2014) over parts of a tensor, in 32 or 16 bits."""

import torch
from torch import Tensor

_FIRST, _SECOND = 0.9, 0.99
# Gradients of single weights are small: torch's 1e-8 would slow them down.
_TINY = 1e-10


class Adam:
    """A tensor and its moments, of one dtype: ``value``, ``first``, ``second``.

    Arithmetic is float32. In 16 bits results are rounded stochastically: small steps would be lost otherwise.
    """

    def __init__(self, value: Tensor) -> None:
        self.value, self.first, self.second = value, torch.zeros_like(value), torch.zeros_like(value)

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: Tensor | float, count: int, part: slice = slice(None)) -> None:
        """Move rows of the value against their gradient, float32. count: of steps so far, from 1."""
        value, first, second = (state[part].float() for state in (self.value, self.first, self.second))
        first.lerp_(gradient, 1 - _FIRST)
        second.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
        size = (second / (1 - _SECOND**count)).sqrt_().add_(_TINY)
        value.sub_(first.div(size).mul_(rate / (1 - _FIRST**count)))
        if self.value.dtype != torch.float32:
            dice = torch.Generator(value.device).manual_seed(count)
            for state, found in ((self.value, value), (self.first, first), (self.second, second)):
                state[part] = _dithered(found, dice)

    def state(self, name: str) -> dict[str, Tensor]:
        """The tensors by name, to be saved, or to copy saved ones into."""
        return {name: self.value, f"{name}.first": self.first, f"{name}.second": self.second}


def _dithered(x: Tensor, dice: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down at random so that the expected value is x."""
    noise = torch.randint(1 << 16, x.shape, generator=dice, dtype=torch.int32, device=x.device)
    return x.contiguous().view(torch.int32).add(noise).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()
