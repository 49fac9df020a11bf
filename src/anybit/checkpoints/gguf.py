"""The header of a GGUF file, validated before transformers' and gguf's parsers see it, and what it says.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: counts, typed metadata, tensor table, aligned data.
Those parsers trust the header's counts, so a wrong one costs hours or memory; here each is bounded by what the file can
hold. Neither torch nor transformers is imported, so that ``info`` is immediate.
"""

import importlib.util
import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.errors import CheckpointError
from anybit.scheme import Scheme

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 20
"""Most metadata entries, or tensors: the largest models have some thousands."""
_MOST_ELEMENTS = 1 << 24
"""Most elements of an array: the largest vocabularies have some hundred thousand tokens."""
_LONGEST_NAME = 1 << 16
_LARGEST_SIZE = 1 << 31
_MOST_DIMENSIONS = 4
_COUNTS = re.compile(r"\.(block_count|expert_count|attention\.head_count(_kv)?)$")
_BLOCK = re.compile(r"blk\.(\d+)\.")
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
Value = int | float | str | list[int]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file. shape: fastest dimension first.  kind: GGML type number.  begin: offset in the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int

    @property
    def type(self) -> str:
        """The name of the type."""
        import gguf

        try:
            return str(gguf.GGMLQuantizationType(self.kind).name)
        except ValueError:
            raise CheckpointError(f"tensor {self.name} has type {self.kind}, which gguf does not know") from None

    @property
    def bytes(self) -> int:
        """Size in the file."""
        import gguf

        weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        if self.shape and self.shape[0] % weights:
            raise CheckpointError(
                f"tensor {self.name} has rows of {self.shape[0]} weights, not a multiple of its blocks of {weights}"
            )
        return math.prod(self.shape) // int(weights) * int(size)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A GGUF file's header. metadata: scalars and strings; for an array only [length].

    start: file offset of the tensor data.
    """

    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    start: int


def read_gguf_header(file: Path) -> GgufHeader:
    """Read and validate a GGUF file's header. Raises CheckpointError, naming the bad entry, and without ``gguf``."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise CheckpointError(f"{file} is not a GGUF file; a model is a folder, a hub name or a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Reader(file, data).header()
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"reading {file} needs gguf: pip install 'anybit[gguf]'")
    return header


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 4

    def header(self) -> GgufHeader:
        (version,) = self.take("I")
        if version.to_bytes(4, "little")[::-1] in (known.to_bytes(4, "little") for known in _VERSIONS):
            raise CheckpointError(
                f"{self.file} is a big-endian GGUF file, and only little-endian ones are read: convert it with gguf's "
                "gguf-convert-endian FILE little"
            )
        if version not in _VERSIONS:
            raise self.fault(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} are read")
        tensors, entries = self.take("QQ")
        if max(tensors, entries) > _MOST_ENTRIES:
            raise self.fault(f"it announces {tensors} tensors and {entries} entries")
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            name = self.text(_LONGEST_NAME)
            if name in metadata:
                raise self.fault(f"entry {name} appears twice")
            metadata[name] = self.value(name)
        table: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            tensor = self.tensor()
            if tensor.name in table:
                raise self.fault(f"tensor {tensor.name} appears twice")
            table[tensor.name] = tensor
        return GgufHeader(metadata, table, self.check(metadata, table))

    def check(self, metadata: dict[str, Value], table: dict[str, GgufTensor]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fault(f"general.alignment is {alignment}, and a power of two is needed")
        parts, architecture = metadata.get("split.count", 1), metadata.get("general.architecture")
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"{self.file} is one of {parts} parts of a GGUF file: join them first, with llama.cpp's "
                "llama-gguf-split --merge FIRST-PART WHOLE"
            )
        if not isinstance(architecture, str):
            raise self.fault("it names no general.architecture")
        blocks = metadata.get(f"{architecture}.block_count")
        if not isinstance(blocks, int):  # parsers would default to another model's
            raise self.fault(f"it lacks {architecture}.block_count")
        if not isinstance(metadata.get(f"{architecture}.embedding_length"), int):
            raise self.fault(f"it lacks {architecture}.embedding_length")
        largest = max((size for tensor in table.values() for size in tensor.shape), default=0)
        for name, value in metadata.items():
            if isinstance(value, float) and math.isnan(value):
                raise self.fault(f"{name} is NaN")
            match = _COUNTS.search(name)
            most = _LARGEST_SIZE if match is None else len(table) if match[1] == "block_count" else max(largest, 1)
            sized = match is not None or name.startswith(f"{architecture}.")
            if sized and isinstance(value, int | float) and value > most:
                raise self.fault(f"{name} is {value}, and its tensors allow {most} at most")
        start = -(-self.at // alignment) * alignment
        for tensor in table.values():
            if (found := _BLOCK.match(tensor.name)) and int(found[1]) >= blocks:
                raise self.fault(f"it has tensor {tensor.name}, but only {blocks} blocks")
            if tensor.begin % alignment or start + tensor.begin >= len(self.data):
                raise self.fault(
                    f"tensor {tensor.name} begins at byte {tensor.begin} of its data, where no tensor can begin"
                )
        return start

    def tensor(self) -> GgufTensor:
        name = self.text(_LONGEST_NAME)
        (dimensions,) = self.take("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self.fault(f"tensor {name} has {dimensions} dimensions, and {_MOST_DIMENSIONS} at most are possible")
        shape = self.take(f"{dimensions}Q")
        kind, begin = self.take("IQ")
        # No type takes less than one bit per element.
        if math.prod(shape) > 8 * len(self.data) or max(shape, default=0) > _LARGEST_SIZE:
            raise self.fault(f"tensor {name} of shape {shape} does not fit {len(self.data)} bytes")
        return GgufTensor(name, shape, kind, begin)

    def value(self, name: str) -> Value:
        (kind,) = self.take("I")
        if kind in _SCALARS:
            value: int | float = self.take(_SCALARS[kind])[0]
            return value
        if kind == _STRING:
            return self.text(len(self.data))
        if kind != _ARRAY:
            raise self.fault(f"entry {name} has type {kind}, which does not exist")
        kind, count = self.take("IQ")
        if count > _MOST_ELEMENTS:
            raise self.fault(f"entry {name} has {count} elements")
        if kind in _SCALARS:
            self.skip(struct.calcsize(f"<{_SCALARS[kind]}") * count)
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.take("Q")[0])
        else:
            raise self.fault(f"entry {name} is an array of type {kind}, which is not read")
        return [count]

    def text(self, longest: int) -> str:
        (length,) = self.take("Q")
        if length > longest:
            raise self.fault(f"a text of {length} bytes at byte {self.at - 8}")
        begin = self.at
        self.skip(length)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise self.fault(f"a text at byte {begin} is not UTF-8") from None

    def take(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        begin = self.at
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.data, begin)

    def skip(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise self.fault(f"it ends at byte {len(self.data)}, within an entry that begins at {self.at}")
        self.at += count

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is a corrupt GGUF file, or is cut off: {what}")


def matrices_of(header: GgufHeader) -> list[GgufTensor]:
    """The matrices of linear layers; those of experts have a third dimension. The embedding is not multiplied."""
    weights = (tensor for name, tensor in header.tensors.items() if name.endswith(".weight"))
    return [tensor for tensor in weights if len(tensor.shape) > 1 and not tensor.name.startswith("token_")]


def gguf_scheme(file: Path) -> Scheme | None:
    """The scheme of most weights in a file's matrices, from its header; None if none keeps its codes."""
    weights: Counter[str] = Counter()
    for tensor in matrices_of(read_gguf_header(file)):
        if (scheme := SCHEMES.get(tensor.type)) is not None:
            weights[scheme] += math.prod(tensor.shape)
    return Scheme.parse(max(weights, key=weights.__getitem__)) if weights else None
