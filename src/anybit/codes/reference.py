"""The exact reference in plain torch: the oracle of every test, and the CPU backend.

Integer products are sums over unsigned codes with rank-1 corrections, as in the kernels:

    sum (uw - zw)(ux - zx) = sum uw ux - zx sum uw - zw sum ux + K zw zx
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.errors import LayerError, dtype_name
from anybit.scheme import CODES, ActivationFormat, WeightFormat

E4M3_MAX = 448.0
_FLOAT32_EXACT = 2**24


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations as codes: ``X = scale * (codes - zero)``, a token per row.

    codes: uint8 [M, K], or float8_e4m3fn [M, K] for 8-bit float.  scale: float32 [M].
    zero: float32 [M] (integers for asym, the implied zero otherwise; 0 for float).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized activations, [M, K]."""
        return ((self.codes.to(dtype) - self.zero.to(dtype)[:, None]) * self.scale.to(dtype)[:, None]).to(dtype)


def quantize_activations(x: Tensor, format: ActivationFormat) -> QuantizedActivations:
    """Quantize activations [..., K], any float dtype, per token; the kernels' codes are bitwise equal.

    Arithmetic is float32. A row of zeros gets scale 0; a row with NaN or infinity gets scale NaN.
    Returns codes [M, K] with the leading dimensions flattened. Raises LayerError for a 16-bit format.
    """
    if not format.quantized:
        raise LayerError("16-bit activations are not quantized")
    steps, scale, zero = _steps(x.reshape(-1, x.shape[-1]).float(), format)
    if format.code == "float":
        return QuantizedActivations(steps.to(torch.float8_e4m3fn), scale, zero)
    return QuantizedActivations((steps + zero[:, None]).to(torch.uint8), scale, zero)


def _steps(rows: Tensor, format: ActivationFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes minus their zeros, float32 [M, K] (e4m3 values for float), and the scale and zero of each row."""
    bits = format.bits
    top = 2**bits - 1
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    finite = largest.isfinite()  # amax propagates NaN
    # Usually all rows are finite, and a CPU saves a pass; a GPU would have to synchronize to know.
    all_finite = not (rows.is_cuda or torch.compiler.is_compiling()) and bool(finite.all())
    if not all_finite:
        rows = torch.where(finite[:, None], rows, 0.0)
        largest = torch.where(finite, largest, 0.0)
    if format.code == "float":
        inverse, scale = _over(E4M3_MAX, largest), _divide(largest, E4M3_MAX)
        steps = (rows * inverse[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        zero = torch.zeros_like(scale)
    elif format.code == "asym":
        low, high = rows.amin(dim=1).clamp(max=0), rows.amax(dim=1).clamp(min=0)
        inverse, scale = _over(top, high - low), _divide(high - low, top)
        zero = (-low * inverse).round().clamp(0, top)
        steps = (rows * inverse[:, None]).round_().add_(zero[:, None]).clamp_(0, top).sub_(zero[:, None])
    elif format.code == "sym":
        most = max(2 ** (bits - 1) - 1, 1)
        inverse, scale = _over(most, largest), _divide(largest, most)
        steps = (rows * inverse[:, None]).round_().clamp_(-most if bits > 1 else -1, most if bits > 1 else 0)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:  # bipolar: floor, because levels are odd multiples of half a step
        half = top / 2
        inverse = _over(half, largest)
        # One bit keeps only the sign: the mean magnitude is the least-squares scale.
        scale = 2 * rows.abs().mean(dim=1) if bits == 1 else _divide(largest, half)
        steps = (rows * inverse[:, None]).floor_().add_(2 ** (bits - 1)).clamp_(0, top).sub_(half)
        zero = torch.full_like(scale, half)
    return steps, scale if all_finite else torch.where(finite, scale, torch.nan), zero


def check_activations(x: Tensor, k: int) -> None:
    """Raise LayerError unless x is floating-point with k features in its last dimension."""
    if not x.is_floating_point():
        raise LayerError(f"x is {dtype_name(x.dtype)}, and a layer takes floating-point activations")
    if x.ndim < 1 or x.shape[-1] != k:
        raise LayerError(f"x has shape {tuple(x.shape)}, and the weight takes {k} features in its last dimension")


def linear(
    x: Tensor,
    weight: QuantizedWeight,
    activations: ActivationFormat,
    bias: Tensor | None = None,
    decoded: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias [..., N] in x's dtype, for x [..., K], a quantized weight and, optionally, activations.

    decoded: the result of ``decode`` for this weight, to trade memory for speed; recomputed if None.
    Integer products with whole-row scales are exact before the scales are applied; everything else is float32
    (float64 if x is). Raises LayerError for an x that is not floating-point or has another width.
    """
    check_activations(x, weight.shape[1])
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    operand = decode(weight, activations, work) if decoded is None else decoded
    return multiply(x, operand, weight.scale, weight.format, activations, bias)


def multiply(
    x: Tensor, decoded: Tensor, scale: Tensor, weights: WeightFormat, activations: ActivationFormat, bias: Tensor | None
) -> Tensor:
    """``linear`` with the result of ``decode``, [N, K], and the weight's scales [N, G]; unchecked."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, operand = x.reshape(-1, x.shape[-1]), decoded.to(work)
    if not activations.quantized:
        y = rows.to(work) @ operand.T
    else:
        steps, row_scale, _ = _steps(rows.float(), activations)
        steps = steps.to(work)
        if _sums_integers(weights, activations, scale):
            # Rounds where the kernels round, for bitwise equality: after the exact sum, after the token's scale, and
            # once after the weight's scale and the bias.
            y = _exact_product(steps, operand, weights, activations) * row_scale.to(work)[:, None]
            weight_scale = scale[:, 0].to(work)
            if bias is None:
                y = y * weight_scale
            else:
                y, bias = (y.double() * weight_scale.double() + bias.double()).to(work), None
        else:
            y = (steps @ operand.T) * row_scale.to(work)[:, None]
    if bias is not None:
        y = y + bias.to(work)
    return y.to(x.dtype).reshape(*x.shape[:-1], decoded.shape[0])


def decode(weight: QuantizedWeight, activations: ActivationFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """The operand of ``linear``, [N, K]: dequantized weights, or centered codes for integer products."""
    exact = _sums_integers(weight.format, activations, weight.scale)
    return weight.centered(dtype) if exact else weight.dequantize(dtype)


def _sums_integers(weights: WeightFormat, activations: ActivationFormat, scale: Tensor) -> bool:
    """Whether a product is integer until the row scales are applied."""
    return activations.quantized and activations.integer and scale.shape[1] == 1 and weights.code in CODES


def _exact_product(x: Tensor, w: Tensor, weights: WeightFormat, activations: ActivationFormat) -> Tensor:
    """Centered codes X [M, K] times W [N, K]^T, rounded once to x's dtype: in chunks of K that are exact in float32."""
    largest = _most_units(weights.code, weights.bits) * _most_units(activations.code, activations.bits)
    chunk = max(_FLOAT32_EXACT // largest, 1) if x.dtype == torch.float32 else x.shape[1]
    if chunk >= x.shape[1]:
        return x @ w.T
    if chunk < 64:
        total = x.double() @ w.double().T
    else:
        total = sum((x[:, i : i + chunk] @ w[:, i : i + chunk].T).double() for i in range(0, x.shape[1], chunk))  # type: ignore[assignment]
    return total.to(x.dtype)


def _most_units(code: str, bits: int) -> int:
    """Bound on the magnitude of a centered code, in integer units (halves for bipolar codes)."""
    return 1 << (bits - 1 if code == "sym" else bits)


def _over(numerator: float, denominator: Tensor) -> Tensor:
    """Numerator / denominator in float32, correctly rounded; 0 where the denominator is 0 or the quotient overflows.

    It overflows for rows whose largest magnitude is a bfloat16 subnormal: those are coded as rows of zeros.
    """
    return torch.nan_to_num_(torch.full_like(denominator, numerator) / denominator, nan=0.0, posinf=0.0)


def _divide(numerator: Tensor, denominator: float) -> Tensor:
    """Numerator / denominator, correctly rounded on every device.

    torch divides a tensor by a number by multiplying with the reciprocal, which rounds twice and differs by device.
    """
    return numerator / torch.full_like(numerator, denominator)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, rows: tuple[int, int],
    count: int, activations: ActivationFormat, gate: str, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, decoded: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:  # fmt: skip
    """The sum over a token's experts of weight * down(join(gate_up(x))), [T, H] in x's dtype, summed in float32.

    x: float [T, H].  ids: int [T, k]; others than 0 to count - 1 add nothing.  weights: float [T, k].
    gate_up, down: of all experts one below the other, ``rows`` apart; gate and up rows alternate eight by eight.
    gate_up_bias [count, 2 I], down_bias [count, H].  decoded: of both weights, as ``linear`` takes it.
    Loops over the experts hit.
    """
    check_activations(x, gate_up.shape[1])
    outputs = 2 * down.shape[1], gate_up.shape[1]
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = torch.zeros(*ids.shape, outputs[1], dtype=work, device=x.device)
    for expert in torch.unique(ids).tolist():
        if not 0 <= expert < count:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        own = [slice(expert * padded, expert * padded + n) for padded, n in zip(rows, outputs, strict=True)]
        first, second = (weight.rows(part) for weight, part in zip((gate_up, down), own, strict=True))
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        kept = [None if one is None else one[part] for one, part in zip(decoded, own, strict=True)]
        h = join(linear(x[token], first, activations, biases[0], kept[0]), gate)
        y = linear(h.to(work), second, activations, biases[1], kept[1])
        parts[token, choice] = weights[token, choice].to(work)[:, None] * y
    total = torch.zeros(len(x), outputs[1], dtype=work, device=x.device)
    for choice in range(ids.shape[1]):
        total += parts[:, choice]
    return total.to(x.dtype)


GATES = ("silu", "gelu_tanh", "swigluoai")
"""What joins gate and up: silu(gate) * up, gelu(gate) * up, and gpt-oss's clamped SwiGLU, (up + 1) * glu(gate)."""


def join(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """Gate and up, eight by eight [..., 2 I], to [..., I], each step rounded to the dtype. gate: of ``GATES``."""
    a, b = gate_up.unflatten(-1, (-1, 2, 8)).unbind(-2)
    a, b = a.flatten(-2), b.flatten(-2)
    if gate == "swigluoai":
        a, b = a.float().clamp(max=7.0), b.float().clamp(-7.0, 7.0)
        joined: Tensor = (b + 1) * (a * torch.sigmoid(1.702 * a))
    elif gate == "gelu_tanh":
        joined = torch.nn.functional.gelu(a, approximate="tanh") * b
    else:
        joined = torch.nn.functional.silu(a) * b
    return joined.to(gate_up.dtype)
