"""A summary of a GGUF file from its header alone: reads no tensor, and imports neither torch nor transformers."""

import importlib.util
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from anybit.checkpoints.gguf import GgufTensor, read_gguf_header
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


@dataclass(frozen=True, slots=True)
class Summary:
    """A GGUF file's summary. kinds: number of tensors per type. schemes: of its matrices, by number of weights, largest
    first. dequantized: matrix types that anybit has no codes for. matrices, weights and bits_per_weight exclude the
    embedding, which is not multiplied; each expert has matrices of its own.
    experts: how many a block has and a token uses; None without.  expert_weights: how many of the weights are theirs.
    """

    architecture: str
    bytes: int
    kinds: dict[str, int]
    schemes: list[str]
    dequantized: list[str]
    matrices: int
    weights: int
    bits_per_weight: float
    experts: tuple[int, int] | None
    expert_weights: int


def summary(file: Path) -> Summary:
    """Summarize a file from its header. Raises CheckpointError for a corrupt file."""
    header = read_gguf_header(file)
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"reading {file} needs gguf: pip install 'anybit[gguf]'")
    kinds: Counter[str] = Counter(kind_of(tensor) for tensor in header.tensors.values())
    weighed = (tensor for tensor in header.tensors.values() if tensor.name.endswith(".weight"))
    matrices = [t for t in weighed if len(t.shape) > 1 and not t.name.startswith("token_")]
    routed = [tensor for tensor in matrices if len(tensor.shape) > 2]
    of_kind: Counter[str] = Counter()
    for tensor in matrices:
        of_kind[kind_of(tensor)] += math.prod(tensor.shape)
    of_scheme: Counter[str] = Counter()
    for kind in of_kind.keys() & SCHEMES.keys():
        of_scheme[SCHEMES[kind]] += of_kind[kind]
    total = of_kind.total()
    architecture = header.metadata["general.architecture"]
    experts, used = (header.metadata.get(f"{architecture}.expert_{part}") for part in ("count", "used_count"))
    return Summary(
        str(architecture),
        file.stat().st_size,
        dict(kinds.most_common()),
        [scheme for scheme, _ in of_scheme.most_common()],
        sorted(of_kind.keys() - SCHEMES.keys() - set(FLOATS)),
        len(matrices) - len(routed) + sum(tensor.shape[2] for tensor in routed),
        total,
        8 * sum(map(stored_bytes, matrices)) / total if total else 0.0,
        (experts, used) if isinstance(experts, int) and isinstance(used, int) and experts else None,
        sum(math.prod(tensor.shape) for tensor in routed),
    )


def gguf_scheme(file: Path) -> Scheme | None:
    """The scheme of most weights in a file's matrices, from its header; None if none keeps its codes."""
    schemes = summary(file).schemes
    return Scheme.parse(schemes[0]) if schemes else None
