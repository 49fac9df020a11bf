"""The grids that calibrated quantizers round to: candidate scales and zeros of a group, and codes on them.

All codes decode as ``value = scale * (u - zero)`` (see ``anybit.scheme``). Arrays here are channel-major, [K, N]:
quantizers iterate over input channels, which are then contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.scheme import WeightFormat


@dataclass(frozen=True, slots=True)
class Grid:
    """The representable values of a format. scale_dtype: of stored scales; candidates are rounded to it."""

    bits: int
    code: str
    implied_zero: float | None
    scale_dtype: torch.dtype

    @classmethod
    def of(cls, format: WeightFormat, scale_dtype: torch.dtype = torch.float16) -> "Grid":
        """The grid of a weight format."""
        return cls(format.bits, format.code, format.zero, scale_dtype)

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    def store(self, scale: Tensor) -> Tensor:
        """Round a scale to its stored dtype, never to zero (a zero scale has no codes)."""
        kind = torch.finfo(self.scale_dtype)
        # Down to float16's subnormals, which 8-bit scales often need; else only float32 normals, which have an inverse.
        least = max(kind.smallest_normal * kind.eps, torch.finfo(torch.float32).smallest_normal)
        size = scale.abs().clamp(least, kind.max).to(self.scale_dtype).to(scale.dtype)
        return torch.where(scale < 0, -size, size)

    def codes(self, weight: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
        """The nearest codes of weights, as floats; scale and zero broadcast."""
        return (weight / scale + zero).round_().clamp_(0, self.top)

    def candidates(self, weight: Tensor, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Candidate scales and zeros for groups of weights [g, N], one pair per clipping threshold: two [C, N].

        clips: fractions of the full range, [R]. Asymmetric codes also try the zeros next to the nearest one (C = 3R),
        which matters at 2 bits.
        """
        clips = clips.to(weight)[:, None]
        if self.implied_zero is not None:
            largest = weight.abs().amax(0)
            if self.code == "sym":
                # Codes reach one step further down than up: the scale's sign points that side at the largest.
                largest = torch.where(weight.amax(0) > -weight.amin(0), -largest, largest)
            scale = self.store(largest * clips / self.implied_zero)
            return scale, torch.full_like(scale, self.implied_zero)
        low, high = weight.amin(0).clamp(max=0), weight.amax(0).clamp(min=0)
        scale = self.store((high - low) * clips / self.top)
        zero = (-low * clips / scale).round()
        zeros = torch.cat([zero, zero - 1, zero + 1]).clamp_(0, self.top)
        return scale.repeat(3, 1), zeros


def best_candidates(weight: Tensor, importance: Tensor, grid: Grid, clips: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The ``keep`` best scales and zeros of each row by weighted squared rounding error: two [keep, N].

    weight: [g, N], one group of every row.  importance: [g], the weight of each channel's squared error.
    """
    scales, zeros = grid.candidates(weight, clips)
    losses = torch.empty_like(scales)
    # As many candidates at once as fit a CPU's cache, or fill a GPU.
    count = max((1 << 27 if weight.is_cuda else 1 << 17) // max(weight.numel(), 1), 1)
    for i in range(0, len(scales), count):
        scale, zero = scales[i : i + count, None], zeros[i : i + count, None]
        error = grid.codes(weight, scale, zero).sub_(zero).mul_(scale).sub_(weight)
        losses[i : i + count] = torch.einsum("g,cgn->cn", importance, error.square_())
    order = losses.topk(min(keep, len(losses)), dim=0, largest=False).indices
    return scales.gather(0, order), zeros.gather(0, order)
