"""Learnable 2:4 sparse weights in floating point: which two of every four neighbours to keep, and their values.

    W = unit * (latent where kept, else 0)

Masks start as SparseGPT's. While ``choosing``, the two largest latents of every four are kept; pruned ones get
straight-through gradients and decay a little at every step, so that masks change slowly (SR-STE; Zhou et al., 2021).
Afterwards masks are frozen, and kept weights go on learning.
"""

import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight


class SparseWeight(nn.Module):
    """The learnable form of a 2:4 sparse weight [N, K], in place of ``FakeQuantWeight``.

    weight: the start, with its mask.  original: before pruning, [N, K].  apart: pruned weights start at no more than
    this fraction of the smallest kept magnitude of their four.  decay: of pruned weights, per step.
    """

    def __init__(self, weight: QuantizedWeight, original: Tensor, apart: float = 0.5, decay: float = 0.0) -> None:
        super().__init__()
        start, kept = weight.dequantize(), weight.mask()
        assert kept is not None
        # In units of a row's RMS, one learning rate suits all layers.
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
        """Set the latents' gradient from the weight's."""
        self.latent.grad = gradient * self.unit

    @torch.no_grad()
    def project(self) -> None:
        """Update the masks while ``choosing``; call after each optimizer step."""
        if self.choosing:
            self.latent.mul_(1 - self.decay * ~self.kept)
            fours = self.latent.abs().view(len(self.latent), -1, 4)
            self.kept.copy_(two_of_four(fours).view(self.kept.shape))

    def harden(self) -> Tensor:
        """The weight learned so far, float32 [N, K], exactly zero where pruned."""
        return self.computed(torch.float32)


def two_of_four(sizes: Tensor, dim: int = -1) -> Tensor:
    """True at the two largest of four along a dimension, bool of the same shape; ties go to the first."""
    parts = sizes.unbind(dim)
    # Pairwise comparisons: a sort over a dimension of 4 is slow on a GPU.
    beaten = [torch.zeros_like(parts[0], dtype=torch.uint8) for _ in parts]
    for i in range(4):
        for j in range(i + 1, 4):
            wins = parts[i] >= parts[j]
            beaten[j] += wins
            beaten[i] += ~wins
    return torch.stack([count < 2 for count in beaten], dim=dim)
