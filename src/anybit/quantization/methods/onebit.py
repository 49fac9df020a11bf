"""OneBit's form (Xu et al., 2024): 1-bit weights with value vectors for rows and columns. Needs no calibration text.

    W ~ diag(a) sign(W) diag(b),  |W| ~ a b^T

a b^T is the best rank-1 approximation of |W| (nonnegative, as |W| is). b scales the inputs of the layer, a is the scale
of each row.
"""

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import OptionError, SchemeError
from anybit.models.modules import LinearLayer
from anybit.quantization.pipeline.stream import Changes, Job, Saved, write_quantized
from anybit.scheme import WeightFormat

_ROUNDS = 30


def factorize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors a [N] and b [K], float32, whose outer product best approximates |W|, W [N, K].

    Power iteration; b is scaled to a mean of 1, so that inputs keep their range. A zero matrix gives a = 0, b = 1.
    """
    size = weight.float().abs()
    b = torch.ones(size.shape[1], device=size.device)
    a = size @ b
    for _ in range(_ROUNDS):
        a = size @ b / b.square().sum().clamp(min=1e-30)
        b = size.T @ a / a.square().sum().clamp(min=1e-30)
    mean = b.mean()
    if float(mean) <= 0:
        return torch.zeros_like(a), torch.ones_like(b)
    return a * mean, b / mean


def quantize_onebit(weight: Tensor, format: WeightFormat) -> tuple[QuantizedWeight, Tensor]:
    """A weight [N, K] as signs with a scale per row, and the scale of every input [K], in the scales' dtype."""
    kind = weight.dtype if weight.dtype.itemsize == 2 else torch.float32
    rows, columns = factorize(weight)
    # RTN finds the signs and checks the weight; the row vector replaces its scales.
    plain = quantize_weight(weight, format)
    scale = (2 * rows[:, None]).to(kind)
    return QuantizedWeight(plain.words, scale, None, plain.shape, format), columns.to(kind)


def run_onebit(job: Job) -> Saved:
    """Method ``onebit``, for ungrouped 1-bit bipolar schemes. Option: device ("cpu")."""
    format = job.scheme.weights
    if format.bits != 1 or format.code != "bipolar" or format.group is not None:
        raise SchemeError(
            f"method onebit needs a 1-bit scheme with one scale per row (w1a16, w1a1, ...), not {job.scheme}"
        )
    device = job.options.get("device", "cpu")
    for name, value in job.options.items():
        if name != "device":
            raise OptionError(f"method onebit has only the option device: it does not take {name}={value!r}")
    weights: dict[str, QuantizedWeight] = {}
    vectors: dict[str, Tensor] = {}
    for layer in job.layers:
        tensor = job.source.read(job.names[f"{layer.name}.weight"], finite=True)
        oriented = tensor.T if layer.transposed else tensor
        weight, vectors[f"{layer.name}.input_scale"] = quantize_onebit(oriented.to(device), format)
        weights[layer.name] = weight.to("cpu")

    def quantize(layer: LinearLayer, weight: Tensor) -> QuantizedWeight:
        return weights[layer.name]

    return write_quantized(job, quantize, Changes(vectors, input_scale=True))
