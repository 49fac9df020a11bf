"""Round-to-nearest (RTN), with a search for the scale of every group (or row).

For each group the search tries a few clipping thresholds, refines each scale by least squares (closed form for given
codes), and takes the one with the smallest sum of cubed errors. Squared error would clip large weights in favour of
many small ones, which hurts: on one text SmolLM2-135M at w3a16g128asym has a perplexity of 123 with no clipping, 151 by
squares and 91 by cubes.

Symmetric codes reach one code further down than up, so scales may be negative: the sign points the longer side at the
group's largest weight.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight, check_fours
from anybit.errors import LayerError, dtype_name
from anybit.scheme import CODES, WeightFormat

# Clipping thresholds to try, as fractions of the range; low bit-widths gain from clipping harder.
_THRESHOLDS = {
    1: (1.0,),
    2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    3: (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52),
    4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68),
}
_MILD = (1.0, 0.97, 0.94, 0.9)
_FAR = 2.0**24
# Elements per chunk: small enough for CPU caches, large enough to amortize a call, which on a GPU is some hundred
# launches (with the CPU's chunks a Llama-3-8B shape took 167 s on a GPU).
_CHUNK, _CHUNK_GPU = 1 << 17, 1 << 24
_Parts = tuple[Tensor, Tensor, Tensor]


def quantize_weight(weight: Tensor, format: WeightFormat, search: bool = True) -> QuantizedWeight:
    """Quantize a weight [N, K] (float, any device) to a format by round-to-nearest.

    search: optimize the scales; otherwise each group's range is covered exactly (absmax or min-max).
    Scales are stored in the weight's dtype if that has 16 bits, else in float32; codes are nearest under the stored
    scale. 2:4 sparse formats keep the two largest of every four weights.
    Extreme weights are safe: scales are limited so that no code dequantizes to infinity, and groups too small for the
    scale's dtype become zeros.
    Raises LayerError for NaN, infinity, values beyond float32, one-bit weights whose scale (twice the mean magnitude)
    overflows its dtype, a weight that is not a matrix, is empty or on the meta device, or inputs that are not a
    multiple of 4 (2:4); TypeError for a format that is not a WeightFormat.
    """
    if not isinstance(format, WeightFormat):
        raise TypeError(f"format must be a WeightFormat, as in Scheme.parse('w4a16g128').weights, not {format!r}")
    if format.code not in CODES:
        raise LayerError(
            f"{format.code} codes can only be loaded from models that other tools quantized: use {', '.join(CODES)}"
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
    chunks = _in_threads(chunk, starts) if weight.device.type == "cpu" else list(map(chunk, starts))
    codes, scale, zero = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    stored_zero = zero.to(torch.uint8) if format.code == "asym" else None
    if mask is not None:
        return QuantizedWeight.from_sparse_codes(codes, mask, scale, stored_zero, format)
    return QuantizedWeight.from_codes(codes, scale, stored_zero, format)


def _in_threads(chunk: Callable[[int], _Parts], starts: Sequence[int]) -> list[_Parts]:
    """Run chunks in parallel, one thread each. torch's intra-op threads synchronize after every small operation, which
    stalls on a busy machine (SmolLM2 beside another program on two cores: 93 s, against 18 s this way; same codes).
    """
    threads = torch.get_num_threads()
    if min(threads, len(starts)) < 2:
        return list(map(chunk, starts))
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(chunk, starts))
        finally:
            torch.set_num_threads(threads)  # set_num_threads in a worker also sets it for future threads


def magnitude_mask(weight: Tensor) -> Tensor:
    """The 2:4 mask that keeps the two largest magnitudes of every four inputs: bool [N, K]."""
    n, k = weight.shape
    check_fours(k)
    return two_of_four(weight.abs().view(n, -1, 4)).view(n, k)


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


def _quantize_rows(
    rows: Tensor, format: WeightFormat, dtype: torch.dtype, search: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, K], stored scales [n, G] and zeros [n, G] of a few rows; the last group may be partial."""
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
    # Fourth powers in the loss over- or underflow far from 1: such groups are first scaled by a power of two.
    largest = groups.abs().amax(-1)
    far = (largest > _FAR) | (largest < 1 / _FAR)
    power = torch.where(far, torch.exp2(largest.log2().floor().clamp(-100, 100)), 1.0)
    groups = groups / power[..., None]
    scale, zero = best_scale(groups, format, search)
    # Limits the scale so that no code dequantizes beyond the dtype's range, even after rounding.
    kind = torch.finfo(dtype)
    most = kind.max / torch.maximum(zero, 2**format.bits - 1 - zero) * (1 - kind.eps)
    stored = torch.minimum(torch.maximum(scale * power, -most), most).to(dtype)
    if not bool(stored.isfinite().all()):
        raise LayerError(
            f"the weight has values up to {float(largest.max()):.5g}, and their w{format.bits} scale overflows "
            f"{dtype_name(dtype)}: quantize it to 2 bits or more, or divide it by a power of two"
        )
    return nearest_codes(groups, stored.float() / power, zero, format.bits).to(torch.uint8), stored, zero


def best_scale(groups: Tensor, format: WeightFormat, search: bool) -> tuple[Tensor, Tensor]:
    """The scale and zero, float32 [...], with the least loss on groups [..., g] among those tried."""
    bits = format.bits
    if bits == 1 and format.code == "bipolar":
        # Sign and scale: the mean magnitude is the least-squares optimum (XNOR-Net; OneBit's start).
        scale = 2 * groups.abs().mean(-1)
        return scale, torch.full_like(scale, 0.5)
    best: tuple[Tensor, ...] | None = None
    for threshold in _THRESHOLDS.get(bits, _MILD) if search else (1.0,):
        scale, zero = _cover(groups, format, threshold)
        if search:
            scale = _least_squares(groups, scale, zero, bits)
        tried: tuple[Tensor, ...] = scale, zero, _loss(groups, scale, zero, format)
        if best is not None:
            better = tried[2] < best[2]
            tried = tuple(torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
        best = tried
    assert best is not None
    return best[0], best[1]


def nearest_codes(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest codes under each group's scale and zero: float32 [..., g], integers in [0, 2^bits)."""
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
    # The scale's sign gives the largest weight's side 2^(bits-1) codes; the other has one less.
    reach = torch.where(high > -low, -largest, largest)
    return reach * (threshold / 2 ** (bits - 1)), torch.full_like(low, 2.0 ** (bits - 1))


def _least_squares(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The least-squares scale for the codes that ``scale`` gives."""
    centered = nearest_codes(groups, scale, zero, bits).sub_(zero[..., None])
    square = torch.linalg.vecdot(centered, centered)
    return torch.where(square > 0, torch.linalg.vecdot(groups, centered) / square, scale)


def _loss(groups: Tensor, scale: Tensor, zero: Tensor, format: WeightFormat) -> Tensor:
    """Sum of |error|^3 for groups, of error^4 for whole rows: what measured best."""
    centered = nearest_codes(groups, scale, zero, format.bits).sub_(zero[..., None])
    error = torch.addcmul(groups, centered, scale[..., None], value=-1)
    square = error.square()
    loss: Tensor = torch.linalg.vecdot(square, square if format.group is None else error.abs_())
    return loss
