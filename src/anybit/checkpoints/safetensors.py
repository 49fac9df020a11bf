"""The safetensors file format, read and written a tensor at a time, so that a model never has to fit in memory.

8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, then contiguous data
(https://huggingface.co/docs/safetensors). The header may be padded with spaces: the writer reserves room and fills it
in at the end.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anybit.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from anybit.models.experts import Part

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000
_LARGEST_SIZE = 1 << 48
"""Largest dimension or offset: larger files are not models, and sizes beyond 63 bits would overflow."""
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, at bytes [begin, end).

    part: (a stored tensor, the part of it that this one is), for an expert of many in one tensor.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    part: "tuple[Entry, Part] | None" = None

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return self.end - self.begin


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file. Raises CheckpointError unless they cover every byte exactly once and names are unique."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(
                    f"{file} is not a safetensors file, or is cut off: its header does not fit {size} bytes"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _without_doubles(file, pairs))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(
                f"{file} has a corrupt safetensors header: its __metadata__ must map names to strings"
            )
        entries = [_entry(file, name, value, 8 + length) for name, value in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has a corrupt safetensors header: {error}") from None
    position = 8 + length
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{file} is corrupt: tensor {entry.name} starts at byte {entry.begin}, not {position}"
            )
        position = entry.end
    if position != size:
        state = "cut off" if position > size else "corrupt"
        raise CheckpointError(f"{file} is {state}: its header describes {position} bytes, and the file has {size}")
    return entries


def read_tensor(entry: Entry) -> Tensor:
    """Read one tensor, mapped from its file: it takes memory as it is used. Raises CheckpointError."""
    if entry.part is not None:
        whole, part = entry.part
        return part.of(read_tensor(whole))
    if not entry.bytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    try:  # not by safetensors, which parses the header for each
        data = np.memmap(entry.file, np.uint8, "c", entry.begin, entry.bytes)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry.file} cannot be read at tensor {entry.name}: {one_line(error)}") from None
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


class FileWriter:
    """Writes one file, a tensor at a time; ``close`` fills in the header. Closing ``stream`` instead gives up."""

    def __init__(self, file: Path, header_room: int) -> None:
        self.file = file
        self.names: list[str] = []
        self.bytes = 0
        self._room = max(-(-header_room // 8) * 8, 64)
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        # Data is contiguous: tensors that are not multiples of 8 bytes go last, to keep the others aligned.
        self._odd: list[tuple[str, Tensor]] = []
        self.stream: IO[bytes] = file.open("wb")
        self.stream.write(b"\0" * (8 + self._room))

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor."""
        self.names.append(name)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel() == 1:  # contiguous with any strides
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.nbytes % 8:
            self._odd.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Write the deferred tensors and the header."""
        for name, tensor in sorted(self._odd, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise CheckpointError(f"{self.file} needs {len(header)} bytes of header, and {self._room} were reserved")
        self.stream.seek(0)
        self.stream.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self.stream.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        begin, self.bytes = self.bytes, self.bytes + tensor.nbytes
        shape, dtype = list(tensor.shape), NAMES[tensor.dtype]
        self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, self.bytes]}
        if tensor.nbytes:
            self.stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def header_room(names: Iterable[str]) -> int:
    """An upper bound on the bytes of a header for tensors of these names."""
    return 256 + sum(len(json.dumps(name)) + 160 for name in names)


def _entry(file: Path, name: str, value: dict[str, Any], base: int) -> Entry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; anybit reads {', '.join(DTYPES)}")
    sizes = (*shape, begin, end)
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in sizes):
        raise CheckpointError(
            f"{file}: tensor {name} has shape {shape} and offsets {begin}, {end}, which are impossible"
        )
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{file}: tensor {name} of shape {shape} in {dtype} does not take {end - begin} bytes")
    return Entry(name, file, DTYPES[dtype], shape, base + begin, base + end)


def _without_doubles(file: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"{file}: tensor {name} appears twice")
    return result
