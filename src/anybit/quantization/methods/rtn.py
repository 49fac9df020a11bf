"""Round to nearest, with a search for the scale of every group (or row).

Each group is tried with a few clipping thresholds, each refined by least squares (for given codes the best scale has a
closed form), and the one whose errors have the smallest sum of cubes is taken. The plain sum of squares clips large
weights for the sake of many small ones, which models notice: on one text SmolLM2-135M at w3a16g128asym has a perplexity
of 123 with no clipping, 151 by squares and 91 by cubes (docs/accuracy.md has more).

Symmetric codes reach one step further down than up, so a symmetric scale may be negative: the largest weight of a group
then always meets the longer side.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from anybit.errors import LayerError, dtype_name
from anybit.packing import QuantizedWeight, check_fours
from anybit.quantization.learn.sparse import two_of_four
from anybit.scheme import CODES, WeightFormat

# Fractions of the range that are tried as clipping thresholds; narrow codes gain from clipping harder.
_THRESHOLDS = {
    1: (1.0,),
    2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    3: (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52),
    4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68),
}
_MILD = (1.0, 0.97, 0.94, 0.9)
_FAR = 2.0**24
# Elements worked on at a time: small enough for the caches, large enough to hide the cost of a call, which on a GPU is
# that of some hundred launches (a Llama-3-8B shape took 167 s in chunks for a CPU).
_CHUNK, _CHUNK_GPU = 1 << 17, 1 << 24
_Parts = tuple[Tensor, Tensor, Tensor]


def quantize_weight(weight: Tensor, format: WeightFormat, search: bool = True) -> QuantizedWeight:
    """Quantize a weight [N, K] (float, any device) to a format by rounding to nearest.

    search: look for the scales that lose least; without it the range of each group is covered exactly.
    Scales are stored in the weight's dtype if that has 16 bits, else in float32, and codes are those that are nearest
    under the stored scale. 2:4 sparse formats keep the two largest of every four weights.
    Weights as large or as small as their dtype holds survive: no scale is so large that a code would stand for an
    infinite value, and groups too small for their scale's dtype become zeros.
    Raises LayerError for NaN, infinity, values beyond float32, one-bit signs whose scale (twice the mean magnitude) is
    more than its dtype holds, a weight that is not a matrix, has no values or is on the meta device, or inputs that do
    not come in fours (2:4); TypeError where the format is a text.
    """
    if not isinstance(format, WeightFormat):
        raise TypeError(f"format must be a WeightFormat, as in Scheme.parse('w4a16g128').weights, not {format!r}")
    if format.code not in CODES:
        raise LayerError(
            f"{format.code} codes are read from models that other tools have quantized; quantize to {', '.join(CODES)}"
        )
    if not isinstance(weight, Tensor):
        raise LayerError(f"a weight must be a floating-point matrix, a torch.Tensor, not {type(weight).__name__}")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise LayerError(f"a weight must be a floating-point matrix, not {weight.dtype} of shape {tuple(weight.shape)}")
    if not weight.numel():
        raise LayerError(f"a weight of shape {tuple(weight.shape)} has no values to quantize")
    if weight.is_meta:
        raise LayerError(f"the weight {tuple(weight.shape)} is on the meta device: it has no values yet, load it first")
    if weight.dtype == torch.float64 and bool((weight.abs() > torch.finfo(torch.float32).max).any()):
        raise LayerError(f"the weight has values up to {float(weight.abs().max()):.3g}, more than float32 holds")
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise LayerError(f"the weight has {bad} values that are NaN or infinite; quantizing them would hide the fault")
    mask = magnitude_mask(weight) if format.sparse else None
    rows = max((_CHUNK if weight.device.type == "cpu" else _CHUNK_GPU) // weight.shape[1], 1)
    scale_dtype = weight.dtype if weight.dtype.itemsize == 2 else torch.float32

    def chunk(start: int) -> tuple[Tensor, Tensor, Tensor]:
        part = weight[start : start + rows].float()
        if mask is not None:
            part = part * mask[start : start + rows]
        return _quantize_rows(part, format, scale_dtype, search)

    starts = range(0, weight.shape[0], rows)
    chunks = _by_threads(chunk, starts) if weight.device.type == "cpu" else list(map(chunk, starts))
    codes, scale, zero = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    stored_zero = zero.to(torch.uint8) if format.code == "asym" else None
    if mask is not None:
        return QuantizedWeight.from_sparse_codes(codes, mask, scale, stored_zero, format)
    return QuantizedWeight.from_codes(codes, scale, stored_zero, format)


def _by_threads(chunk: Callable[[int], _Parts], starts: Sequence[int]) -> list[_Parts]:
    """Chunks side by side, a thread each: torch's own threads meet after every small operation, and on a busy machine
    each meeting waits for the one that was put aside (SmolLM2 beside another program on two cores: 93 s so, 18 s with
    these, the same codes).
    """
    threads = torch.get_num_threads()
    if min(threads, len(starts)) < 2:
        return list(map(chunk, starts))
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(chunk, starts))
        finally:
            torch.set_num_threads(threads)  # what a thread sets for itself becomes that of threads to come


def magnitude_mask(weight: Tensor) -> Tensor:
    """The 2:4 mask that keeps the two largest magnitudes of every four inputs: bool [N, K]."""
    n, k = weight.shape
    check_fours(k)
    return two_of_four(weight.abs().view(n, -1, 4)).view(n, k)


def _quantize_rows(
    rows: Tensor, format: WeightFormat, dtype: torch.dtype, search: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, K], scales [n, G] as stored and zeros [n, G] of a few rows; the last group may be ragged."""
    n, k = rows.shape
    group = min(format.group or k, k)
    whole = k - k % group
    parts = [fit_groups(rows[:, :whole].reshape(n, -1, group), format, dtype, search)]
    if whole < k:
        parts.append(fit_groups(rows[:, whole:].reshape(n, 1, -1), format, dtype, search))
    codes = torch.cat([codes.flatten(1) for codes, _, _ in parts], dim=1)
    return codes, torch.cat([s for _, s, _ in parts], dim=1), torch.cat([z for _, _, z in parts], dim=1)


def fit_groups(groups: Tensor, format: WeightFormat, dtype: torch.dtype, search: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Fit scale and zero to groups, float32 [..., g] -> codes uint8 [..., g], scale [...] in dtype, zero [...]."""
    # Sums of fourth powers overflow or vanish far from 1: such groups are fitted in units of a power of two.
    largest = groups.abs().amax(-1)
    far = (largest > _FAR) | (largest < 1 / _FAR)
    unit = torch.where(far, torch.exp2(largest.log2().floor().clamp(-100, 100)), 1.0) if bool(far.any()) else None
    groups = groups if unit is None else groups / unit[..., None]
    scale, zero = best_scale(groups, format, search)
    scale = scale if unit is None else scale * unit
    # No code stands for more than the dtype holds; rounded to it, the scale stays below that.
    kind = torch.finfo(dtype)
    most = kind.max / torch.maximum(zero, 2**format.bits - 1 - zero) * (1 - kind.eps)
    stored = torch.minimum(torch.maximum(scale, -most), most).to(dtype)
    if not bool(stored.isfinite().all()):
        raise LayerError(
            f"the weight has values up to {float(largest.max()):.5g}, and the scale of w{format.bits} for them is more "
            f"than {dtype_name(dtype)} holds: quantize it to 2 bits or more, or divide it by a power of two"
        )
    own = stored.float() if unit is None else stored.float() / unit
    return nearest_codes(groups, own, zero, format.bits).to(torch.uint8), stored, zero


def best_scale(groups: Tensor, format: WeightFormat, search: bool) -> tuple[Tensor, Tensor]:
    """The scale and zero, float32 [...], of those tried that lose least on groups [..., g]."""
    bits = format.bits
    if bits == 1 and format.code == "bipolar":
        # Sign and scale: the mean magnitude is the least-squares optimum (XNOR-Net; OneBit's start).
        scale = 2 * groups.abs().mean(-1)
        return scale, torch.full_like(scale, 0.5)
    best_scale = best_zero = best_loss = None
    for threshold in _THRESHOLDS.get(bits, _MILD) if search else (1.0,):
        scale, zero = _cover(groups, format, threshold)
        if search:
            scale = _least_squares(groups, scale, zero, bits)
        loss = _loss(groups, scale, zero, format)
        if best_scale is None or best_zero is None or best_loss is None:
            best_scale, best_zero, best_loss = scale, zero, loss
        else:
            better = loss < best_loss
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
            best_loss = torch.minimum(loss, best_loss)
    assert best_scale is not None and best_zero is not None
    return best_scale, best_zero


def nearest_codes(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest code of every weight under a scale and a zero a group: float32 [..., g], integers in [0, 2^bits)."""
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    return torch.addcmul(zero[..., None], groups, inverse[..., None]).round_().clamp_(0, 2**bits - 1)


def _cover(groups: Tensor, format: WeightFormat, threshold: float) -> tuple[Tensor, Tensor]:
    """Scale and zero that cover a fraction of each group's range."""
    bits = format.bits
    top = 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    if format.code == "asym":
        low, high = low.clamp(max=0) * threshold, high.clamp(min=0) * threshold
        scale = (high - low) / top
        zero = torch.where(scale > 0, -low / scale, 0.0).round_().clamp_(0, top)
        return scale, zero
    largest = torch.maximum(-low, high)
    if format.code == "bipolar":
        return largest * (threshold * 2 / top), torch.full_like(low, top / 2)
    # The side of the largest weight gets the 2^(bits-1) steps, by the sign of the scale.
    reach = torch.where(high > -low, -largest, largest)
    return reach * (threshold / 2 ** (bits - 1)), torch.full_like(low, 2.0 ** (bits - 1))


def _least_squares(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The best scale for the codes that a scale gives."""
    steps = nearest_codes(groups, scale, zero, bits).sub_(zero[..., None])
    square = torch.linalg.vecdot(steps, steps)
    return torch.where(square > 0, torch.linalg.vecdot(groups, steps) / square, scale)


def _loss(groups: Tensor, scale: Tensor, zero: Tensor, format: WeightFormat) -> Tensor:
    """Sums of errors' cubes for groups and of their fourth powers for whole rows, as measured."""
    steps = nearest_codes(groups, scale, zero, format.bits).sub_(zero[..., None])
    error = torch.addcmul(groups, steps, scale[..., None], value=-1)
    square = error.square()
    loss: Tensor = torch.linalg.vecdot(square, square if format.group is None else error.abs_())
    return loss
