"""The grids that calibrated quantizers round to: candidate scales and zeros of a group, and codes on them.

All codes decode as ``value = scale * (u - zero)`` (see ``anybit.scheme``). Arrays here are channel-major, [K, N]:
quantizers iterate over input channels, which are then contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.codes.nested import top_bits
from anybit.scheme import WeightFormat


@dataclass(frozen=True, slots=True)
class Grid:
    """The representable values of a format. scale_dtype: of stored scales; candidates are rounded to it.

    nested: widths whose slices count instead, each about as much (errors shrink fourfold a bit).
    """

    bits: int
    code: str
    implied_zero: float | None
    scale_dtype: torch.dtype
    nested: tuple[int, ...] = ()

    @classmethod
    def of(cls, format: WeightFormat, scale_dtype: torch.dtype = torch.float16, nested: Sequence[int] = ()) -> "Grid":
        """The grid of a weight format."""
        return cls(format.bits, format.code, format.zero, scale_dtype, tuple(nested))

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

    def losses(self, weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Sums of squared rounding errors [C, N] of weights [g, N], by the importance [g] of each channel.

        scale, zero: candidates, [C, 1, N].
        """
        codes, total = self.codes(weight, scale, zero), torch.zeros_like(scale[:, 0])
        for width in self.nested or (self.bits,):
            step = 2 ** (self.bits - width)
            own, offset = top_bits(codes, zero, self.bits, self.code, step) if self.nested else (codes, zero)
            error = (own - offset).mul_(scale * step).sub_(weight)
            total += 4.0 ** (width - self.bits) * torch.einsum("g,cgn->cn", importance, error.square_())
        return total

    def candidates(self, weight: Tensor, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Candidate scales and zeros for groups of weights [g, N], one pair per clipping threshold: two [C, N].

        clips: fractions of the full range, [R]. Asymmetric codes also try the zeros next to the nearest one (C = 3R),
        which matters at 2 bits; if nested, those in the middle, which give even ranges their longer side.
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
        middle = torch.full_like(zero, self.top // 2)
        others = (middle, middle + 1) if self.nested else (zero - 1, zero + 1)
        zeros = torch.cat([zero, *others]).clamp_(0, self.top)
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
        losses[i : i + count] = grid.losses(weight, importance, scales[i : i + count, None], zeros[i : i + count, None])
    order = losses.topk(min(keep, len(losses)), dim=0, largest=False).indices
    return scales.gather(0, order), zeros.gather(0, order)
