"""Encode layers as GGUF's blocks, if these hold their codes, scales and minima exactly.

Each candidate type is encoded, decoded and compared: only an exact round trip counts.
"""

import torch
from torch import Tensor

from anybit.checkpoints.formats.gguf_blocks import BLOCKS, weights_in
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError, ConversionError
from anybit.scheme import Scheme, WeightFormat

_ONLY_READ = ("TQ1_0",)


def encode(weight: QuantizedWeight) -> tuple[str, Tensor]:
    """(GGML type, bytes uint8 [N, bytes per row]) that represent a layer exactly.

    Zeros become minima, -zero * scale. Raises ConversionError, with each type's reason, if none represents it.
    """
    if weight.group_index is not None:
        raise ConversionError("its inputs are in activation order, which GGUF does not have")
    reasons = []
    for kind in types_of(weight.format):
        found = _encoded(weight, kind)
        if isinstance(found, Tensor):
            return kind, found
        reasons.append(f"{kind} {found}")
    fmt = weight.format
    raise ConversionError("; ".join(reasons) or f"no type of blocks has {fmt.bits}-bit {fmt.code} codes")


def why_not(scheme: Scheme) -> str | None:
    """Why GGUF cannot represent a scheme, whatever the scales, in a sentence; None if it might."""
    weights = scheme.weights
    if scheme.activations.quantized:
        return f"{scheme.activations.bits}-bit activations: it has 16 bits"
    sizes = [weights_in(kind).group or 1 for kind in types_of(weights)]
    if not sizes or weights.sparse:
        return f"no type of blocks has {weights.bits}-bit {weights.code} codes" + " of 2:4" * weights.sparse
    if weights.group is not None and all(weights.group % size for size in sizes):
        return f"its blocks have groups of {min(sizes)}, which do not divide groups of {weights.group}"
    return None


def types_of(format: WeightFormat) -> list[str]:
    """The GGML types with a format's codes."""
    wanted = format.bits, "min" if format.code == "asym" else format.code
    found = {kind: weights_in(kind) for kind in BLOCKS if kind not in _ONLY_READ}
    return [name for name, weights in found.items() if (weights.bits, weights.code) == wanted]


def _encoded(weight: QuantizedWeight, kind: str) -> Tensor | str:
    """A layer's bytes in a block type, or why that type cannot represent it."""
    block, (n, k) = BLOCKS[kind], weight.shape
    size = weights_in(kind).group
    assert size is not None
    group = weight.format.group or k
    if k % block.weights:
        return f"has blocks of {block.weights}, which do not divide {k} inputs"
    if group % size:
        return f"has groups of {size}, which do not divide groups of {group}"
    codes = weight.codes().view(n, -1, block.weights)
    scale = weight.scale.float()
    minimum = torch.zeros_like(scale)
    if weight.minimum is not None:
        minimum = weight.minimum.float()
    elif weight.zero is not None:
        minimum = -(weight.zeros() * scale)
    shape = n, k // block.weights, block.weights // size
    scale, minimum = (
        values.repeat_interleave(group // size, 1)[:, : k // size].view(shape) for values in (scale, minimum)
    )
    data = block.encode(codes, scale, minimum)
    try:
        back, scale_back, minimum_back = block.decode(data)
    except CheckpointError:  # an unused bit pattern
        return "does not hold its codes"
    if not torch.equal(back, codes):
        return "does not hold its codes"
    if not torch.equal(scale_back.float().view(shape), scale):
        return "does not hold its scales exactly"
    if minimum_back is not None and not torch.equal(minimum_back.float().view(shape), minimum):
        return "does not hold its minima exactly"
    return data.flatten(1)
