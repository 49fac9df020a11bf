"""A model folder as Hugging Face lays it out: config.json and safetensors, one file or many with an index."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoints.safetensors import Entry, read_header, read_tensor
from anybit.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Weights in whatever format; everything else in a model folder (tokenizer, templates, licence) belongs to its copy.
_WEIGHTS = (
    *_PICKLES,
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin.index.json",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
)


def path_of(place: Path | str, name: str) -> Path:
    """A location as a path. Raises CheckpointError, naming the argument, for anything else."""
    if not isinstance(place, (str, os.PathLike)):
        raise CheckpointError(f"{name} must be a path, as text or as a pathlib.Path, not {place!r}")
    return Path(place)


class Folder:
    """A model folder, open for reading; tensors are read one at a time. Raises CheckpointError, naming the file."""

    def __init__(self, path: Path | str) -> None:
        self.path = path_of(path, "the folder of a model")
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder")
        self.config = read_json(self.path / "config.json")
        self.entries = _entries(self.path)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: what config.json says, else that of its first float tensor."""
        said = self.config.get("dtype") or self.config.get("torch_dtype")
        named = getattr(torch, said.removeprefix("torch."), None) if isinstance(said, str) else None
        if isinstance(named, torch.dtype):
            return named
        kinds = (entry.dtype for entry in self.entries.values())
        return next((kind for kind in kinds if kind.is_floating_point and kind.itemsize > 1), torch.float32)

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The dtype its layers run in on a GPU: kernels take 16-bit floats, and bfloat16 has float32's range."""
        return self.dtype if self.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16

    def read(self, name: str, *, finite: bool = False) -> Tensor:
        """Read a tensor; ``finite``: refuse NaN and infinity."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        entry = self.entries[name]
        tensor = read_tensor(entry)
        if finite and tensor.is_floating_point() and tensor.element_size() > 1:
            refuse_not_finite(tensor, entry)
        return tensor

    def companions(self) -> list[Path]:
        """The files that go with the weights: tokenizer, templates, generation settings. Never a pickle."""
        return companions(self.path)


def companions(path: Path) -> list[Path]:
    """What goes with the weights of a model folder: see ``Folder.companions``."""
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file()
        and file.name != "config.json"
        and not file.name.startswith(".")
        and not any(file.match(pattern) for pattern in _WEIGHTS)
    )


def refuse_not_finite(tensor: Tensor, entry: Entry) -> None:
    """Raise CheckpointError for the first NaN or infinity of a tensor, if it has one."""
    # A sum is finite only if all terms are, and takes one pass; it may overflow without them, hence the closer look.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if count:
        place = bad.flatten().to(torch.uint8).argmax()
        index = [int(i) for i in torch.unravel_index(place, tensor.shape)]
        value = float(tensor.flatten()[place])
        what = f"{count} values that are" if count > 1 else "a value that is"
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} has {what} not finite, the first {value} at {index}; "
            "quantizing it would hide the fault"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or say what is wrong with the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}, so it is not a model folder") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def _entries(path: Path) -> dict[str, Entry]:
    if (path / SINGLE).is_file():
        return {entry.name: entry for entry in read_header(path / SINGLE)}
    if (path / INDEX).is_file():
        return _sharded(path)
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} has no {SINGLE}, only {', '.join(pickles[:3])}: pickles can run code, and anybit never loads one; "
            "save the model as safetensors first"
        )
    raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}")


def _sharded(path: Path) -> dict[str, Entry]:
    index = path / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    entries: dict[str, Entry] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} points outside its folder: {name}")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, and {index.name} says that it holds tensors")
        for entry in read_header(path / name):
            if entry.name in entries:
                raise CheckpointError(
                    f"tensor {entry.name} appears twice: in {entries[entry.name].file} and {entry.file}"
                )
            entries[entry.name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"tensor {name} is missing from {path / file}, where {index.name} says it is")
    return entries
