"""anybit without modules: quantize one weight matrix, multiply by it.

    weight = anybit.quantize(torch.randn(4096, 4096, dtype=torch.float16, device="cuda"), "w4a16g128")
    y = anybit.matmul(x, weight)                          # x [..., 4096] -> y [..., 4096]

``anybit.cache.attention.decode`` is the counterpart for attention over a quantized KV cache.
"""

from torch import Tensor

from anybit import ops
from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError
from anybit.ops import Prepared
from anybit.scheme import Scheme


def quantize(weight: Tensor | QuantizedWeight, scheme: Scheme | str, *, backend: str | None = None) -> Prepared:
    """Quantize a weight matrix by round-to-nearest, and lay it out for the kernels that will read it.

    weight: float [N, K], on the device that will run it; or a QuantizedWeight, whose codes are kept.
    scheme: formats of weights and activations, such as ``"w4a16g128"`` or ``"w4a8"``.
    backend: a name from ``anybit.ops.backends``; None takes the fastest that can run this layer on this device.
    Pass the result to ``matmul``; its ``restore()`` returns the QuantizedWeight.

    Raises SchemeError for a scheme that does not parse, LayerError for a weight that does not fit the scheme, and
    KernelError, with every backend's reason, if none can run it.
    """
    parsed = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    if isinstance(weight, QuantizedWeight):
        if weight.format != parsed.weights:
            raise LayerError(f"the weight is quantized as {weight.format}, and the scheme {parsed} asks for another")
        codes = weight
    else:
        codes = quantize_weight(weight, parsed.weights)
    return ops.prepare(codes, parsed.activations, backend)


def matmul(x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias for a weight from ``quantize``.

    x: [..., K]; float16 or bfloat16 on a GPU, any float type on a CPU. bias: float [N]. Returns [..., N] in x's dtype.
    Activations are quantized on the fly if the scheme says so. Raises KernelError or LayerError, before anything is
    launched, if x has the wrong width, dtype or device. For gradients of x use a ``QuantLinear``: here they are lost on
    a GPU, with torch's warning about an op without an autograd kernel; forward mode raises LayerError.
    """
    if not isinstance(weight, Prepared):
        raise LayerError(
            f"weight must come from anybit.quantize(weight, scheme), and is of type {type(weight).__name__}"
        )
    ops.refuse_tangents(x)
    return ops.linear(x, weight, bias)
