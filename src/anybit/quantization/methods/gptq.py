"""GPTQ: rounding with second-order error feedback (Frantar et al., 2022), with MARLIN's changes (section 3.5).

A layer's error over its calibration inputs x is ``tr((W - Q) H (W - Q)^T)`` with the Hessian ``H = sum x x^T``. Input
channels are rounded in order; each rounding error is compensated by the channels not yet rounded, so that

    total error = sum over channels j of (w_j - q_j)^2 / U_jj^2,   U upper triangular, U^T U = H^-1

where w_j includes the corrections so far. Group scales are searched over clipping thresholds against exactly that sum.
Finally, exact coordinate descent refines codes and scales: the layer's error never increases.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight, check_fours
from anybit.codes.rtn import magnitude_mask, two_of_four
from anybit.errors import CalibrationError, OptionError
from anybit.ops.gptq_update import sweep, sweep_choosing_cuda
from anybit.quantization.learn.cuda_graphs import GraphRecorder
from anybit.quantization.methods.grid import Grid, best_candidates
from anybit.scheme import WeightFormat

# The smallest clipping threshold to try: with few levels, clipping large weights in favour of small ones pays off.
_HARDEST_CLIP = {1: 0.06, 2: 0.2, 3: 0.3}
_CLIPS, _CONTENDERS = 24, 3
"""Clipping thresholds to try; those, the best by plain rounding error, to try with error feedback."""

# Weights that ``nearest`` searches scales for at once.
_AT_ONCE = 1 << 24

_RECORDER = GraphRecorder()

Order = Literal["natural", "grouped", "sorted"]


@dataclass(frozen=True, slots=True)
class GPTQ:
    """How to run GPTQ.

    order: "natural" keeps the order of input channels; "grouped" sorts groups by importance, and channels within each
    group, so that groups stay contiguous; "sorted" sorts all channels (act-order): groups then hold scattered channels
    and the layer stores a group index.  damping: added to the Hessian's diagonal, as a fraction of its mean; raised
    until the Hessian is positive definite.  passes: rounds of coordinate descent.  scale_dtype: of the stored scales.
    """

    order: Order = "grouped"
    damping: float = 0.01
    passes: int = 3
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.order not in ("natural", "grouped", "sorted"):
            raise OptionError(f"order must be 'natural', 'grouped' or 'sorted', not {self.order!r}")
        if self.passes < 0:
            raise OptionError(f"passes must be at least 0, not {self.passes}")
        if not 0 < self.damping <= 1:
            raise OptionError(f"damping must be above 0 and at most 1, not {self.damping}")


def quantize(
    weight: Tensor, hessian: Tensor, format: WeightFormat, options: GPTQ | None = None, name: str = "a layer"
) -> QuantizedWeight:
    """Quantize weights [N, K] against the Hessian [K, K] of their inputs (any scale, any float dtype).

    A dead input (zero on the diagonal) has no coupling and is rounded to nearest. Raises CalibrationError, with the
    layer's name, if the Hessian or the weights hold NaN or infinity, or no damping makes the Hessian positive definite;
    LayerError for a 2:4 format if the inputs are not a multiple of 4.
    """
    options = options or GPTQ()
    k = weight.shape[1]
    if hessian.shape != (k, k):
        raise CalibrationError(f"{name}: the Hessian must be {k} x {k}, not {' x '.join(map(str, hessian.shape))}")
    if format.sparse:
        check_fours(k, name)
    check_finite(weight, f"the weights of {name}")
    check_finite(hessian, f"the calibration inputs of {name}")
    grid = Grid.of(format, options.scale_dtype)
    group = format.group or k
    hessian = hessian.float()
    # 2:4 masks need neighbouring channels, so sparse layers keep the natural order.
    order: Order = "natural" if format.sparse else options.order
    permutation = _permutation(hessian.diagonal(), group, order)
    target = weight.float()[:, permutation].T.contiguous()
    damped, upper = _factor(hessian[permutation][:, permutation], options.damping, name)
    # In "grouped" order a partial last group may come anywhere, so groups are ranges of permuted positions.
    members = (permutation // group) if order == "grouped" else torch.arange(k, device=weight.device) // group
    ranges = _ranges(members)
    codes, scale, zero, *chosen = _RECORDER(
        ("feedback", tuple(ranges), grid, format.sparse),
        lambda target, upper: _feedback(target, upper, ranges, grid, format.sparse),
        target,
        upper,
    )
    for _ in range(options.passes):
        codes, scale, changed = _RECORDER(
            ("refine", tuple(ranges), grid, format.sparse),
            lambda t, h, c, s, z, *kept: _refine(t, h, c, s, z, ranges, grid, *kept),
            *(target, damped, codes, scale, zero, *chosen),
        )
        if not bool(changed):
            break
    index = None
    if order == "sorted" and format.group is not None:
        index = members[permutation.argsort()].to(torch.int32)
    else:
        # Ranges are in order of importance; stored scales are in order of channels.
        by_place = torch.stack([members[start] for start, _ in ranges]).argsort()
        scale, zero = scale[by_place], zero[by_place]
    place = permutation.argsort()
    packed = codes[place].T.to(torch.uint8).contiguous()
    scales = scale.T.to(options.scale_dtype).contiguous()
    zeros = zero.T.to(torch.uint8).contiguous() if format.code == "asym" else None
    if chosen:
        return QuantizedWeight.from_sparse_codes(packed, chosen[0].T.contiguous(), scales, zeros, format)
    return QuantizedWeight.from_codes(packed, scales, zeros, format, index)


def nearest(
    weight: Tensor, format: WeightFormat, scale_dtype: torch.dtype, name: str = "a layer", nested: Sequence[int] = ()
) -> QuantizedWeight:
    """Round weights [N, K] to nearest, clipped where that minimizes each group's squared error: a start to learn from.

    On its own it loses more than ``codes.rtn``, which spares large weights. nested: the errors are those of slices to
    these widths. Raises CalibrationError for weights that
    are not finite, LayerError for a 2:4 format if the inputs are not a multiple of 4.
    """
    check_finite(weight, f"the weights of {name}")
    k = weight.shape[1]
    size = min(format.group or k, k)
    grid, clips = Grid.of(format, scale_dtype, nested), _clips(min(nested, default=format.bits), weight.device)
    mask = magnitude_mask(weight) if format.sparse else None
    whole = weight.float() if mask is None else weight.float() * mask
    parts = []
    for rows in whole.split(max(_AT_ONCE // k, 1)):
        columns = []
        for part in rows.split([k - k % size, k % size], dim=1) if k % size else [rows]:
            groups = part.reshape(-1, min(size, part.shape[1])).T.contiguous()
            scale, zero = best_candidates(groups, torch.ones_like(groups[:, 0]), grid, clips, 1)
            codes = grid.codes(groups, scale, zero).to(torch.uint8).T
            columns.append([found.reshape(len(rows), -1) for found in (codes, scale, zero)])
        parts.append([torch.cat(found, dim=1) for found in zip(*columns, strict=True)])
    codes, scale, zero = (torch.cat(found) for found in zip(*parts, strict=True))
    zeros = zero.to(torch.uint8) if format.code == "asym" else None
    if mask is not None:
        return QuantizedWeight.from_sparse_codes(codes, mask, scale.to(scale_dtype), zeros, format)
    return QuantizedWeight.from_codes(codes, scale.to(scale_dtype), zeros, format)


def _clips(bits: int, device: torch.device) -> Tensor:
    return torch.linspace(1.0, _HARDEST_CLIP.get(bits, 0.5), _CLIPS, device=device)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise CalibrationError unless every element is finite."""
    if not bool(tensor.isfinite().all()):
        raise CalibrationError(f"{what} hold NaN or infinity; check the model in its own precision on this text first")


def _permutation(importance: Tensor, group: int, order: Order) -> Tensor:
    """Channel at each position, most important first: more channels are left to compensate errors of early ones."""
    k = len(importance)
    natural = torch.arange(k, device=importance.device)
    if order == "natural":
        return natural
    # A stable sort in float64 on the CPU: the same order on every device and run.
    importance = importance.double().cpu()
    if order == "sorted":
        return importance.argsort(descending=True, stable=True).to(natural.device)
    of_group = torch.arange(k) // group
    total = torch.zeros(int(of_group[-1]) + 1, dtype=torch.float64).index_add_(0, of_group, importance)
    total /= torch.bincount(of_group)
    within = importance.argsort(descending=True, stable=True)
    return within[total[of_group[within]].argsort(descending=True, stable=True)].to(natural.device)


def _ranges(members: Tensor) -> list[tuple[int, int]]:
    """(start, end) of each run of equal group numbers."""
    edges = [0, *(members.diff().nonzero()[:, 0] + 1).tolist(), len(members)]
    return list(itertools.pairwise(edges))


def _factor(hessian: Tensor, damping: float, name: str) -> tuple[Tensor, Tensor]:
    """The damped Hessian, and upper triangular U with U^T U = its inverse; both float32."""
    mean = float(hessian.diagonal().mean())
    if mean <= 0:
        raise CalibrationError(f"the calibration text never reaches {name}: all of its inputs are zero")
    work = hessian.double()
    while damping <= 1:
        damped = work + torch.eye(len(work), dtype=work.dtype, device=work.device) * (damping * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if not int(info):
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(info) and bool(upper.isfinite().all()):
                return damped.float(), upper.float()
        damping *= 4
    raise CalibrationError(f"the Hessian of {name} is not positive definite with any damping up to its mean diagonal")


def _feedback(
    target: Tensor, upper: Tensor, ranges: list[tuple[int, int]], grid: Grid, sparse: bool
) -> tuple[Tensor, ...]:
    """Round group by group with error feedback; channel-major, groups in the order of ``ranges``.

    Returns codes [K, N], scale [G, N], zero [G, N], and for 2:4 sparse formats the mask [K, N] of kept weights.
    """
    weight = target.clone()
    n = weight.shape[1]
    clips = _clips(grid.bits, weight.device)
    codes = torch.empty_like(weight)
    mask = torch.ones_like(weight, dtype=torch.bool) if sparse else None
    scales, zeros = (torch.empty(len(ranges), n, device=weight.device) for _ in range(2))
    for i, (start, end) in enumerate(ranges):
        diagonal = upper.diagonal()[start:end]
        seen = weight[start:end]
        if sparse:
            seen = seen * keep_two(seen, diagonal)
        scale, zero = best_candidates(seen, diagonal.pow(-2), grid, clips, _CONTENDERS)
        rows = len(scale)
        # All contenders of all rows are rounded in one sweep: [g, contenders * N].
        trial = weight[start:end].repeat(1, rows)
        flat_scale, flat_zero = scale.flatten(), zero.flatten()
        coupling = upper[start:end, start:end] / diagonal[:, None]
        if sparse:
            trial_codes, errors, kept = _sparse_sweep(trial, coupling, flat_scale, flat_zero, grid, diagonal)
        else:
            trial_codes, errors = sweep(trial, coupling, flat_scale, flat_zero, grid.top)
        errors /= diagonal[:, None]
        loss = errors.square().sum(0).view(rows, n)
        best = loss.argmin(0)
        pick = best * n + torch.arange(n, device=best.device)
        codes[start:end], scales[i], zeros[i] = trial_codes[:, pick], flat_scale[pick], flat_zero[pick]
        if mask is not None:
            mask[start:end] = kept[:, pick]
        weight[end:].addmm_(upper[start:end, end:].T, errors[:, pick], alpha=-1)
    return (codes, scales, zeros) if mask is None else (codes, scales, zeros, mask)


def _sparse_sweep(
    trial: Tensor, coupling: Tensor, scale: Tensor, zero: Tensor, grid: Grid, diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``sweep`` that also chooses a 2:4 mask, four channels at a time; returns codes, errors and mask."""
    if trial.is_cuda:
        return sweep_choosing_cuda(trial, coupling, scale, zero, grid.top, diagonal)
    trial = trial.clone()
    codes, errors = torch.empty_like(trial), torch.empty_like(trial)
    kept = torch.ones_like(trial, dtype=torch.bool)
    for a in range(0, len(trial), 4):
        b = a + 4
        kept[a:b] = keep_two(trial[a:b], diagonal[a:b])
        codes[a:b], errors[a:b] = sweep(trial[a:b], coupling[a:b, a:b], scale, zero, grid.top, mask=kept[a:b])
        trial[b:].addmm_(coupling[a:b, b:].T, errors[a:b], alpha=-1)
    return codes, errors, kept


def keep_two(weight: Tensor, diagonal: Tensor) -> Tensor:
    """SparseGPT's 2:4 mask (Frantar & Alistarh, 2023): keep the two of every four channels that cost most to prune.

    weight: [g, N] with g a multiple of 4.  diagonal: of U, [g].  Returns bool [g, N].
    """
    g, n = weight.shape
    cost = (weight / diagonal[:, None]).square().view(g // 4, 4, n)
    return two_of_four(cost, 1).view(g, n)


def _refine(
    target: Tensor,
    hessian: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    ranges: list[tuple[int, int]],
    grid: Grid,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One round of coordinate descent on the layer's error over codes and group scales, in place.

    Returns codes, scale, and whether a code changed, bool []. The negative gradient [K, N] of half the error is updated
    exactly after each group.
    """
    value = torch.cat([(codes[a:b] - zero[i]) * scale[i] for i, (a, b) in enumerate(ranges)])
    gradient = hessian @ (target - value)
    before_all = codes.clone()
    for i, (start, end) in enumerate(ranges):
        block = hessian[start:end, start:end]
        local, before = gradient[start:end], value[start:end].clone()
        # With all others fixed, a channel's optimum is a Newton step from its value.
        curvature_of = block.diagonal()[:, None]
        kept = None if mask is None else mask[start:end]
        wanted = torch.addcdiv(before, local, curvature_of)
        codes[start:end], errors = sweep(wanted, block / -curvature_of.T, scale[i], zero[i], grid.top, before, kept)
        local = torch.addmm(local, block, errors)
        # With codes fixed the best scale is a Newton step, too; it is taken if it helps even as rounded to be stored.
        centered = codes[start:end] - zero[i]
        slope, curvature = (centered * local).sum(0), (centered * (block @ centered)).sum(0)
        move = grid.store(scale[i] + slope / curvature.clamp(min=torch.finfo(torch.float32).tiny)) - scale[i]
        # A product, not torch.where, whose scalar would be copied to the GPU each time.
        scale[i] += move * ((curvature > 0) & (2 * slope * move > curvature * move * move))
        now = centered * scale[i]
        gradient.addmm_(hessian[:, start:end], now - before, alpha=-1)
        value[start:end] = now
    return codes, scale, (codes != before_all).any()
