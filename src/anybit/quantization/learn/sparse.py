"""2:4 sparse weights that learn in floats: which two of every four neighbours are kept, and what these are.

    W = unit * (latent where it is kept, else 0)

Masks begin as SparseGPT chose them. While they are chosen anew, the two of every four whose latents are largest are
kept; gradients reach the others as if they were kept, and these decay a little in every step, so that few come and go
(SR-STE; Zhou et al., 2021). Afterwards the masks stay, and what is kept learns on.
"""

import torch
from torch import Tensor, nn

from anybit.packing import QuantizedWeight


class SparseWeight(nn.Module):
    """The learnable form of a 2:4 sparse weight [N, K], in place of ``FakeQuantWeight``.

    weight: where it starts, with its mask.  original: what was pruned, [N, K].  apart: what is not kept begins at most
    at this part of the least of its four that is.  decay: of what is not kept, a step.
    """

    def __init__(self, weight: QuantizedWeight, original: Tensor, apart: float = 0.5, decay: float = 0.0) -> None:
        super().__init__()
        start, kept = weight.dequantize(), weight.mask()
        assert kept is not None
        # Rates are then parts of a row's own size, whatever the layer.
        unit = start.square().mean(1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("unit", unit)
        self.register_buffer("kept", kept)
        self.decay, self.choosing = decay, False
        fours = start.abs().view(len(start), -1, 4)
        limit = fours.where(kept.view(fours.shape), torch.inf).amin(-1, keepdim=True) * apart
        others = original.float().view(fours.shape).clamp(-limit, limit).view(start.shape)
        self.latent = nn.Parameter(torch.where(kept, start, others) / unit)

    unit: Tensor
    kept: Tensor

    @torch.no_grad()
    def computed(self, dtype: torch.dtype) -> Tensor:
        """The weight, in a dtype."""
        return (self.latent * self.unit).mul_(self.kept).to(dtype)

    def receive(self, gradient: Tensor, weight: Tensor) -> None:
        """Set the latents' gradient from that of the weight."""
        self.latent.grad = gradient * self.unit

    @torch.no_grad()
    def project(self) -> None:
        """Choose the masks anew, if they are still chosen: after each step."""
        if self.choosing:
            self.latent.mul_(1 - self.decay * ~self.kept)
            fours = self.latent.abs().view(len(self.latent), -1, 4)
            self.kept.copy_(two_of_four(fours).view(self.kept.shape))

    def harden(self) -> Tensor:
        """The weight learned so far, float32 [N, K], exactly zero where it is not kept."""
        return self.computed(torch.float32)


def two_of_four(sizes: Tensor, dim: int = -1) -> Tensor:
    """Which are the two largest of the four along a dimension, bool of the same shape; of equal ones the first."""
    parts = sizes.unbind(dim)
    # A comparison of each pair: sorting fours one by one leaves a GPU idle.
    beaten = [torch.zeros_like(parts[0], dtype=torch.uint8) for _ in parts]
    for i in range(4):
        for j in range(i + 1, 4):
            wins = parts[i] >= parts[j]
            beaten[j] += wins
            beaten[i] += ~wins
    return torch.stack([count < 2 for count in beaten], dim=dim)
