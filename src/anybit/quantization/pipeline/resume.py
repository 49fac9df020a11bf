"""A folder that remembers finished blocks, so that an interrupted calibration goes on where it stopped."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anybit.errors import CalibrationError
from anybit.packing import QuantizedWeight
from anybit.scheme import WeightFormat

_OTHERS = (
    "{} holds blocks of another calibration (another model, text, scheme or options): "
    "name another folder, or remove this one"
)
_PARTS = ("words", "scale", "zero", "group_index", "indices")


class Folder:
    """Finished blocks of one calibration, one file each; ``key`` says which model, text and options they belong to."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        _make(path)
        note = path / "calibration.json"
        if note.exists():
            try:
                found = json.loads(note.read_text()).get("key")
            except (ValueError, AttributeError):
                found = None
            if found != key:
                raise CalibrationError(_OTHERS.format(path))
        else:
            _publish(note, lambda file: file.write_text(json.dumps({"key": key})))

    def read(self, index: int, format: WeightFormat) -> dict[str, QuantizedWeight] | None:
        """The layers of a finished block, or None. A damaged file counts as none: the block is done again."""
        file = self._file(index)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as stored:
                shapes = json.loads(stored.metadata()["shapes"])
                tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118  not a dict
        except (SafetensorError, KeyError, TypeError, ValueError):
            return None
        layers = {}
        for name, (n, k) in shapes.items():
            words, scale, zero, group_index, indices = (tensors.get(f"{name}.{part}") for part in _PARTS)
            if words is None or scale is None:
                return None
            layers[name] = QuantizedWeight(words, scale, zero, (n, k), format, group_index, indices)
        return layers

    def write(self, index: int, layers: dict[str, QuantizedWeight]) -> None:
        """Remember a finished block; the file appears whole or not at all."""
        tensors: dict[str, Tensor] = {}
        for name, weight in layers.items():
            for part in _PARTS:
                tensor = getattr(weight, part)
                if isinstance(tensor, torch.Tensor):
                    tensors[f"{name}.{part}"] = tensor.contiguous()
        shapes = json.dumps({name: list(weight.shape) for name, weight in layers.items()})
        _publish(self._file(index), lambda file: save_file(tensors, file, metadata={"shapes": shapes}))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:04d}.safetensors"


def remembered(path: Path | None, key: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors that are found once, before any block, and from then on come from a folder, if there is one.

    key: what they depend on. Raises CalibrationError if the folder's depend on something else.
    """
    if path is None:
        return make()
    file = path / "before.safetensors"
    if file.exists():
        try:
            with safe_open(file, "pt") as stored:
                if stored.metadata().get("key") != key:
                    raise CalibrationError(_OTHERS.format(path))
                return [stored.get_tensor(f"{i:05d}") for i in range(len(stored.keys()))]
        except (SafetensorError, AttributeError):
            pass  # damaged: found again
    _make(path)  # before the work, not after
    found = make()
    tensors = {f"{i:05d}": tensor.contiguous() for i, tensor in enumerate(found)}
    _publish(file, lambda file: save_file(tensors, file, metadata={"key": key}))
    return found


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(
            f"option resume names a folder for finished blocks, and {path} cannot be one: {error.strerror}"
        ) from None


def _publish(file: Path, write) -> None:  # type: ignore[no-untyped-def]
    beside = file.with_name(file.name + ".part")
    try:
        write(beside)
        beside.replace(file)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CalibrationError(f"option resume: {file} cannot be written: {reason}") from None
    finally:
        with contextlib.suppress(OSError):  # gone where all went well
            beside.unlink(missing_ok=True)
