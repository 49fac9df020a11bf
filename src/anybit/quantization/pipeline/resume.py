"""The resume folder: finished blocks, from which an interrupted calibration continues.

Every file begins with a checksum of the rest, which includes the calibration's key: damaged files and those of another
run are never used.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from anybit.checkpoints.scratch import Scratch, replace_file
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CalibrationError
from anybit.scheme import WeightFormat

Note = dict[str, Any]
"""What a file says besides its tensors, as JSON."""
_PARTS = ("words", "scale", "zero", "group_index", "indices")


class Folder:
    """Finished blocks of one calibration, one file each. key: ``calibrate.fingerprint`` of model, text and options."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        note = SavedState(path, "calibration", key)
        if note.read() is None:
            note.write({}, {})

    def read(self, index: int, formats: Mapping[str, WeightFormat]) -> dict[str, QuantizedWeight] | None:
        """The layers of a finished block, or None, also if its file is damaged: the block is then redone."""
        found = _read(self._file(index))
        if found is None or found[0].get("key") != self.key or found[0].get("block") != index:
            return None
        note, tensors = found
        layers = {}
        for name, (n, k) in note["shapes"].items():
            words, scale, zero, group_index, indices = (tensors.get(f"{name}.{part}") for part in _PARTS)
            if words is None or scale is None or name not in formats:
                return None
            layers[name] = QuantizedWeight(words, scale, zero, (n, k), formats[name], group_index, indices)
        return layers

    def write(self, index: int, layers: dict[str, QuantizedWeight]) -> None:
        """Store a finished block, atomically."""
        parts = {f"{name}.{part}": getattr(weight, part) for name, weight in layers.items() for part in _PARTS}
        tensors = {name: tensor.contiguous() for name, tensor in parts.items() if tensor is not None}
        shapes = {name: list(weight.shape) for name, weight in layers.items()}
        _write(self._file(index), {"key": self.key, "block": index, "shapes": shapes}, tensors)

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:04d}"


class SavedState:
    """A file of the resume folder with a note and tensors: what was made before any block, or a learner's state.

    key: a fingerprint of what they depend on.
    """

    def __init__(self, path: Path, name: str, key: str) -> None:
        make_folder(path)  # fail before the work, not after
        self._file, self._key = path / name, key

    def read(self) -> tuple[Note, dict[str, Tensor]] | None:
        """The note and the tensors, or None. Raises CalibrationError if they have another key."""
        found = _read(self._file)
        if found is not None and found[0].get("key") != self._key:
            raise CalibrationError(
                f"{self._file.parent} holds blocks of another calibration (another model, text, scheme or options): "
                "name another folder, or remove this one"
            )
        return found

    def write(self, note: Note, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file, atomically."""
        _write(self._file, {"key": self._key, **note}, dict(tensors))


def remembered(saved: SavedState | None, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors that are computed once, and then taken from the resume folder, if there is one."""
    if saved is None:
        return make()
    stored = saved.read()
    if stored is None:
        stored = {}, {f"{i:05d}": tensor.contiguous() for i, tensor in enumerate(make())}
        saved.write(*stored)
    tensors = stored[1]
    return [tensors[f"{i:05d}"] for i in range(len(tensors))]


def make_folder(path: Path, option: str = "resume", content: str = "finished blocks") -> None:
    """Create the folder of an option. Raises CalibrationError if that fails or it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        Scratch(path).close()
    except OSError as error:
        raise CalibrationError(
            f"option {option} names a folder for {content}, and {path} cannot be one: {error.strerror}"
        ) from None


def _write(file: Path, note: Note, tensors: dict[str, Tensor]) -> None:
    """Write a note and tensors, preceded by their SHA-256."""
    content = json.dumps(note).encode() + b"\n" + save(tensors)
    try:
        replace_file(file, lambda work: work.write_bytes(hashlib.sha256(content).digest() + content))
    except OSError as error:
        raise CalibrationError(f"option resume: {file} cannot be written: {error.strerror or error}") from None


def _read(file: Path) -> tuple[Note, dict[str, Tensor]] | None:
    """Read a file of ``_write``; None if it is missing, unreadable or damaged."""
    try:
        if not file.is_file():  # reading a pipe would hang
            return None
        found = file.read_bytes()
    except OSError:
        return None
    digest, content = found[:32], found[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    note, _, tensors = content.partition(b"\n")
    return json.loads(note), load(tensors)
