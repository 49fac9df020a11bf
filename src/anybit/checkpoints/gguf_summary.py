"""What a GGUF file holds, from its header alone: reads no tensor, and imports neither torch nor transformers."""

import math
from collections import Counter
from pathlib import Path

from anybit.checkpoints.gguf import GgufHeader, GgufTensor, read_gguf_header
from anybit.errors import CheckpointError
from anybit.scheme import Scheme

SCHEMES = {
    "Q4_0": "w4a16g32",
    "Q4_1": "w4a16g32min",
    "Q5_0": "w5a16g32",
    "Q5_1": "w5a16g32min",
    "Q8_0": "w8a16g32",
    "Q2_K": "w2a16g16min",
    "Q3_K": "w3a16g16",
    "Q4_K": "w4a16g32min",
    "Q5_K": "w5a16g32min",
    "Q6_K": "w6a16g16",
    "TQ1_0": "w2a16g256",
    "TQ2_0": "w2a16g256",
    "IQ4_NL": "w4a16g32iq4",
    "IQ4_XS": "w4a16g32iq4",
    "MXFP4": "w4a16g32e2m1",
}
"""GGML types whose codes anybit keeps, and their schemes; all others are dequantized."""
FLOATS = ("F64", "F32", "F16", "BF16")


def kind_of(tensor: GgufTensor) -> str:
    """The name of a tensor's type."""
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(tensor.kind).name)
    except ValueError:
        raise CheckpointError(f"tensor {tensor.name} has type {tensor.kind}, which gguf does not know") from None


def stored_bytes(tensor: GgufTensor) -> int:
    """Bytes of a tensor in the file."""
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    if tensor.shape and tensor.shape[0] % weights:
        raise CheckpointError(
            f"tensor {tensor.name} has rows of {tensor.shape[0]} weights, not a multiple of its blocks of {weights}"
        )
    return math.prod(tensor.shape) // int(weights) * int(size)


def matrices_of(header: GgufHeader) -> list[GgufTensor]:
    """The matrices of linear layers; those of experts have a third dimension. The embedding is not multiplied."""
    weights = (tensor for name, tensor in header.tensors.items() if name.endswith(".weight"))
    return [tensor for tensor in weights if len(tensor.shape) > 1 and not tensor.name.startswith("token_")]


def gguf_scheme(file: Path) -> Scheme | None:
    """The scheme of most weights in a file's matrices, from its header; None if none keeps its codes."""
    weights: Counter[str] = Counter()
    for tensor in matrices_of(read_gguf_header(file)):
        if (scheme := SCHEMES.get(kind_of(tensor))) is not None:
            weights[scheme] += math.prod(tensor.shape)
    return Scheme.parse(max(weights, key=weights.__getitem__)) if weights else None
