"""Latent weights: they learn in floating point, and are rounded to codes in every forward pass.

    W = scale * (clamp(round(latent / scale + zero), 0, 2^bits - 1) - zero)

Rounding passes gradients straight through (Bengio et al., 2013); scales and zeros get those of LSQ+ (Bhalgat et al.,
2020). A clipped weight gets a gradient only if that leads back into the range. Of 2:4 sparse weights the kept ones
learn; while masks are chosen, pruned ones do, too (SR-STE; Zhou et al., 2021). Nested widths take turns, step by step:
weights are then those of the codes' slices (``codes.nested``), and slices share latents, scales and zeros. A slice
moves the latents that are near an edge between its codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anybit.codes.nested import top_bits
from anybit.codes.packing import QuantizedWeight, stack, unstack
from anybit.codes.rtn import two_of_four
from anybit.quantization.learn.adam import Adam
from anybit.quantization.learn.fuse import Fuse, unfused
from anybit.quantization.methods.grid import Grid
from anybit.scheme import WeightFormat

# Latents start at the original weights, but inside their code's cell: at most so far from its middle (in code units),
# and so far where the code is not the nearest. Adam's first steps move all latents alike, and would flip those at an
# edge at once.
_INSIDE, _NEAR = 0.49, 0.35
# Pruned weights start at no more than this fraction of the smallest kept magnitude of their four.
_APART = 0.5
# Weights that are updated at once: temporary tensors hold as many floats.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Rates:
    """Adam's learning rates. weight: of latents, in code units, or in root mean squares of a layer where that is less
    or the layer is sparse.  scale: of the logarithms of scales, and of zeros.  gain: of norms' gains.
    """

    weight: float = 0.002
    scale: float = 0.001
    gain: float = 0.001

    def times(self, factor: float) -> "Rates":
        """All rates times a factor."""
        return Rates(self.weight * factor, self.scale * factor, self.gain * factor)


class Part(NamedTuple):
    """Some rows of a bank: views."""

    latent: Adam
    log_scale: Adam
    zero: Adam
    kept: Tensor | None
    base: Tensor
    unit: Tensor
    weight: Tensor
    gradient: Tensor


class Bank:
    """Weights of one format and number of inputs, learned as one tall matrix: rows of layer after layer.

    Hundreds of layers, one by one, would leave a GPU waiting for launches. ``refresh`` computes all weights into
    ``leaves``, whose addresses never change and whose gradients accumulate in one tensor; ``step`` learns from them,
    and refreshes.
    Tensors by group are [N, G, g]: the last group is padded, and columns are sorted by group. A step is how many codes
    one of a slice stands for.
    """

    def __init__(
        self,
        weights: Mapping[str, QuantizedWeight],
        original: Callable[[str], Tensor],
        dtype: torch.dtype,
        latent_dtype: torch.dtype,
        fuse: Fuse = unfused,
        nested: Sequence[int] = (),
    ) -> None:
        """original: [N, K] by name, on the weights' device.  dtype: of computed weights.  fuse: compiles steps.

        nested: widths of slices to learn, too.
        """
        self._rows = {name: weight.shape[0] for name, weight in weights.items()}
        self._like = like = stack(list(weights.values()))
        n, k = like.shape
        self._size, self._top = like.format.group or k, 2**like.format.bits - 1
        self._steps = [2.0 ** (like.format.bits - width) for width in (*nested, like.format.bits)]
        groups = like.groups()
        self._order = None if bool((groups.diff() >= 0).all()) else groups.argsort(stable=True)
        self._back = None if self._order is None else self._order.argsort()
        count = max((_AT_ONCE if fuse is unfused else 8 * _AT_ONCE) // k, 1)
        # Rows updated together: compiled updates have no temporary tensors, but a graph for each shape.
        self._parts = [slice(start, min(start + count, n)) for start in range(0, n, count)]
        self._grid = Grid.of(like.format, like.scale.dtype)
        self._base = self._grid.store(like.scale.float())  # scales of dead groups may be 0
        mask = like.mask()
        self.kept = None if mask is None else self._grouped(mask)
        latent = torch.empty(*self._base.shape, self._size, dtype=latent_dtype, device=like.device)
        self.latent, self.zero = Adam.of(latent), Adam.of(like.zeros())
        self.log_scale = Adam.of(torch.zeros_like(self._base))
        self._learn = fuse(self._step)
        self._unit = torch.empty(n, 1, 1, device=like.device)
        self._weight = torch.empty(n, k, dtype=dtype, device=like.device)
        self._gradient = torch.zeros_like(self._weight)
        self.leaves: dict[str, Tensor] = {}
        start = 0
        for name, weight in weights.items():
            rows = slice(start, start + weight.shape[0])
            self._start(rows, weight, original(name))
            self.leaves[name] = self._weight[rows].detach().requires_grad_()
            self.leaves[name].grad = self._gradient[rows]
            start = rows.stop

    def _start(self, rows: slice, weight: QuantizedWeight, original: Tensor) -> None:
        scale, zero = self._base[rows, :, None], self.zero.value[rows, :, None]
        codes = self._grouped(weight.codes().float())
        places = self._grouped(original.to(codes)) / scale + zero
        limit = torch.where(places.round().clamp(0, self._top) == codes, _INSIDE, _NEAR)
        latent = ((places - codes).clamp(-limit, limit) + codes - zero) * scale
        size = original.float().square().mean().sqrt()
        unit = size if weight.format.sparse else torch.minimum(size, scale.abs().mean() * max(self._steps))
        self._unit[rows] = unit.clamp(min=torch.finfo(torch.float32).tiny)
        if self.kept is not None:
            fours = latent.abs().view(-1, 4)
            kept = self.kept[rows].view(-1, 4)
            limit = fours.where(kept, torch.inf).amin(-1, keepdim=True) * _APART
            pruned = self._grouped(original.to(codes)).view(-1, 4).clamp(-limit, limit)
            latent = torch.where(kept, latent.view(-1, 4), pruned).view(latent.shape)
        self.latent.value[rows] = latent

    @torch.no_grad()
    def refresh(self, count: int = 0) -> None:
        """Compute the weights of the step after so many, and zero their gradients."""
        for rows in self._parts:
            self._compute(self._part(rows), self._step_of(count))

    def size(self) -> Tensor:
        """The norm of the accumulated gradients, float32 []."""
        found: Tensor = torch.linalg.vector_norm(self._gradient, dtype=torch.float32)
        return found

    @torch.no_grad()
    def step(self, rates: Rates, count: int, choosing: bool = False, factor: Tensor | float = 1.0) -> None:
        """Take a step of Adam, the ``count``-th, from the accumulated gradients, and refresh the weights.

        choosing: whether masks may change.  factor: of the gradients.
        """
        # Tensors: numbers would be compiled anew at each step.
        factor = torch.as_tensor(factor, device=self._weight.device)
        pace = torch.tensor([rates.weight, rates.scale], device=self._weight.device)
        at = torch.tensor(count, dtype=torch.int32, device=self._weight.device)
        for rows in self._parts:
            self._learn(self._part(rows), pace, at, choosing, factor, self._step_of(count - 1), self._step_of(count))

    def _step_of(self, count: int) -> Tensor | None:
        """The step between codes of the slice whose turn it is after ``count`` steps; None without slices."""
        here = self._weight.device
        return None if len(self._steps) == 1 else torch.tensor(self._steps[count % len(self._steps)], device=here)

    def _step(
        self, part: Part, pace: Tensor, count: Tensor, choosing: bool, factor: Tensor, step: Tensor | None,
        following: Tensor | None,
    ) -> None:  # fmt: skip
        codes, scale, zero = self._codes(part, step)
        top = self._top if step is None else (self._top + 1) / step - 1
        places = part.latent.value.float() / scale + zero
        gradient = self._grouped(part.gradient.float() * factor)
        steps = gradient * scale  # the gradient of codes
        if part.kept is not None:
            steps = steps * part.kept
        below, above = places < 0, places > top
        felt = torch.where(below | above, codes - zero, codes - places) * steps
        part.log_scale.step(felt.sum(-1), pace[1], count)
        if self._like.zero is not None:
            part.zero.step(-steps.where(below | above, 0).sum(-1), pace[1] * max(self._steps), count)
            part.zero.value.clamp_(0, self._top)
        stuck = (below & (steps >= 0)) | (above & (steps <= 0))
        learning = ~stuck if choosing or part.kept is None else ~stuck & part.kept
        if step is not None:
            # Between the edges of its codes a slice stays as it is, and would move what wider ones need.
            near = (2 * (places - codes).abs()).clamp(max=1) ** 4
            learning = learning * torch.where(step > 1, near, 1.0)
        part.latent.step(gradient * learning, pace[0] * part.unit, count)
        if part.kept is not None and choosing:
            part.kept.copy_(two_of_four(part.latent.value.abs().view(-1, 4)).view(part.kept.shape))
        self._compute(part, following)

    def _compute(self, part: Part, step: Tensor | None) -> None:
        """Compute the weights of some rows, and zero their gradients."""
        codes, scale, zero = self._codes(part, step)
        weight = (codes - zero) * scale
        part.weight.copy_(self._flat(weight if part.kept is None else weight * part.kept))
        part.gradient.zero_()

    @torch.no_grad()
    def harden(self) -> dict[str, QuantizedWeight]:
        """The learned weights by name, on the CPU."""
        like = self._like
        found = [self._codes(self._part(rows))[0].to(torch.uint8) for rows in self._parts]
        codes = torch.cat([self._flat(part) for part in found]).cpu()
        scale, zero = self._scale(self._base, self.log_scale.value).to("cpu", like.scale.dtype), None
        if like.zero is not None:
            zero = self.zero.value.round().to("cpu", torch.uint8)
        if self.kept is not None:
            whole = QuantizedWeight.from_sparse_codes(codes, self._flat(self.kept).cpu(), scale, zero, like.format)
        else:
            index = None if like.group_index is None else like.group_index.cpu()
            whole = QuantizedWeight.from_codes(codes, scale, zero, like.format, index)
        return dict(zip(self._rows, unstack(whole, list(self._rows.values())), strict=True))

    def state(self) -> dict[str, Tensor]:
        """Everything that changes while learning, by name; tensors to save, or to copy saved ones into."""
        own = self.latent.state("latent") | self.log_scale.state("log_scale") | self.zero.state("zero")
        return own if self.kept is None else own | {"kept": self.kept}

    def _part(self, rows: slice) -> Part:
        kept = None if self.kept is None else self.kept[rows]
        moving = self.latent.part(rows), self.log_scale.part(rows), self.zero.part(rows)
        return Part(*moving, kept, self._base[rows], self._unit[rows], self._weight[rows], self._gradient[rows])

    def _codes(self, part: Part, step: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes float32 [n, G, g], scales and zeros [n, G, 1] of some rows, or of their slice."""
        scale, zero = self._scale(part.base, part.log_scale.value)[..., None], part.zero.value[..., None]
        if self._like.zero is not None:
            zero = zero.round()
        codes, format = (part.latent.value.float() / scale + zero).round().clamp(0, self._top), self._like.format
        if step is None:
            return codes, scale, zero
        codes, zero = top_bits(codes, zero, format.bits, format.code, step)
        return codes, scale * step, zero

    def _scale(self, base: Tensor, log_scale: Tensor) -> Tensor:
        """Scales [n, G] as they will be stored."""
        return self._grid.store(base * log_scale.exp())

    def _grouped(self, x: Tensor) -> Tensor:
        """[n, K] -> [n, G, g]."""
        x = x if self._order is None else x[:, self._order]
        short = self._base.shape[1] * self._size - x.shape[1]
        return (nn.functional.pad(x, (0, short)) if short else x).view(len(x), -1, self._size)

    def _flat(self, x: Tensor) -> Tensor:
        """[n, G, g] -> [n, K]."""
        x = x.flatten(1)[:, : self._like.shape[1]]
        return x if self._back is None else x[:, self._back]


def banks(
    weights: Mapping[str, QuantizedWeight],
    original: Callable[[str], Tensor],
    dtype: torch.dtype,
    latent_dtype: torch.dtype,
    fuse: Fuse = unfused,
    nested: Mapping[WeightFormat, Sequence[int]] | None = None,
) -> list[Bank]:
    """Weights in as few banks as possible; each layer with activation order gets its own.

    The arguments are Bank's. nested: by format.
    """
    together: dict[object, list[str]] = {}
    for name, weight in weights.items():
        key = name if weight.group_index is not None else (weight.format, weight.shape[1], weight.scale.dtype)
        together.setdefault(key, []).append(name)
    return [
        Bank(
            {name: weights[name] for name in names},
            original,
            dtype,
            latent_dtype,
            fuse,
            (nested or {}).get(weights[names[0]].format, ()),
        )
        for names in together.values()
    ]
