"""A model folder in Hugging Face's layout: config.json and safetensors, one file or shards with an index."""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoints.companions import PICKLES, companions
from anybit.checkpoints.safetensors import Entry, read_header, read_tensor
from anybit.checkpoints.sidecars import with_quantization
from anybit.checkpoints.verify import check_config, check_layers
from anybit.errors import CheckpointError, counted, one_line, printable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_JSON = 100_000_000


def path_of(place: Path | str, name: str) -> Path:
    """Convert to a Path. Raises CheckpointError, naming the argument, for anything that is not a path."""
    if not isinstance(place, (str, os.PathLike)):
        raise CheckpointError(f"{name} must be a path, a str or pathlib.Path, not {place!r}")
    return Path(place)


class Folder:
    """A model folder, open for reading one tensor at a time. Raises CheckpointError, naming the file.

    Opening runs all of ``verify``'s checks that need no model. quantization: how anybit quantized it, or None.
    layers: names of the layers that it quantized.
    trust_remote_code: the model's own Python files may run, and are copied with it.
    """

    def __init__(self, path: Path | str, trust_remote_code: bool = False) -> None:
        self.trust_remote_code = trust_remote_code
        self.path = path_of(path, "the folder of a model")
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder")
        refuse_adapter(self.path)
        self.config = with_quantization(read_json(self.path / "config.json"), self.path, read_json)
        self.entries = _entries(self.path)
        self.quantization = check_config(self.config, self.path / "config.json", self.entries)
        self.layers = [] if self.quantization is None else check_layers(self.quantization, self.entries)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: config.json's, else that of its first float tensor."""
        said = self.config.get("dtype") or self.config.get("torch_dtype")
        named = getattr(torch, said.removeprefix("torch."), None) if isinstance(said, str) else None
        if isinstance(named, torch.dtype):
            return named
        kinds = (entry.dtype for entry in self.entries.values())
        return next((kind for kind in kinds if kind.is_floating_point and kind.itemsize > 1), torch.float32)

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The dtype to run in on a GPU: kernels take 16-bit floats; bfloat16 replaces others, for its range."""
        return self.dtype if self.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16

    def read(self, name: str, *, finite: bool = False) -> Tensor:
        """Read a tensor; CheckpointError if there is none, or if ``finite`` and it holds NaN or infinity."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        entry = self.entries[name]
        tensor = read_tensor(entry)
        if finite and tensor.is_floating_point() and tensor.element_size() > 1:
            refuse_not_finite(tensor, entry)
        return tensor

    def copy_companions(self, target: Path) -> None:
        """Copy the files beside the weights; warn of what is left out."""
        copied, left = companions(self.path, self.trust_remote_code)
        for name in copied:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, target / name)
        files = {*left} - {entry.file.relative_to(self.path) for entry in self.entries.values()}
        names = [printable(f"{name}/" if (self.path / name).is_dir() else name) for name in sorted(files)]
        if names:
            told = f"not copied from {self.path}: {counted(names, 5)}"
            warnings.warn(f"{told} (code, other weights, folders with weights)", stacklevel=2)


def refuse_not_finite(tensor: Tensor, entry: Entry) -> None:
    """Raise CheckpointError, naming the first one, if a tensor holds NaN or infinity."""
    # A finite sum proves all terms finite in one pass; it may also overflow, hence the closer look.
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


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError for a folder with a PEFT adapter, alone or beside a model: it would be dropped."""
    found = [file.name for name in ("adapter_config.json", "adapter_model.*") for file in sorted(folder.glob(name))]
    if found:
        raise CheckpointError(
            f"{folder} holds a PEFT adapter ({found[0]}), which anybit does not load: merge it into the model first, "
            f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload()"
            ".save_pretrained('MERGED'), copy the tokenizer's files there, and use that folder; or, to do without the "
            "adapter, move these files away"
        )


def without_tokenizer(folder: Path, error: Exception) -> CheckpointError:
    """The error to raise where no tokenizer can be read from a folder, and what to do if it has none."""
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    saved = any((folder / name).exists() for name in known)
    do = "" if saved else f" (save it there: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({str(folder)!r}))"
    return CheckpointError(f"{folder} has no tokenizer that can be read{do}: {one_line(error)}")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, saying what is wrong with the file."""
    try:
        if file.exists() and not file.is_file():  # reading a pipe might never end
            raise CheckpointError(f"{file} is not a regular file")
        if file.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, more than {_LARGEST_JSON}")
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        models = sorted(file.parent.glob("*.gguf"))  # each is a model by itself
        instead = f": give one of its GGUF files instead, such as {models[0]}" if models else ""
        raise CheckpointError(f"{file.parent} has no {file.name}, so it is not a model folder{instead}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{file} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise CheckpointError(f"{file} holds {kind}, not an object")
    return value


def _entries(path: Path) -> dict[str, Entry]:
    if (path / SINGLE).is_file():
        return {entry.name: entry for entry in read_header(path / SINGLE)}
    if (path / INDEX).is_file():
        return _sharded(path)
    alone = sorted(path.glob("*.safetensors"))
    if len(alone) == 1 and (path / "quantize_config.json").is_file():  # AutoGPTQ: gptq_model-4bit-128g.safetensors
        return {entry.name: entry for entry in read_header(alone[0])}
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
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
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name or Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{index} points outside its folder: {name}")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, and {index.name} says that it holds tensors")
    entries = _joined(path / name for name in names)
    for name, file in weight_map.items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"tensor {name} is missing from {path / file}, where {index.name} says it is")
    return entries


def check_index(path: Path) -> None:
    """Raise CheckpointError for a bad shard index, if a folder has shards."""
    if (path / INDEX).is_file() and not (path / SINGLE).is_file():
        _sharded(path)


def read_entries(files: Sequence[Path], root: Path) -> dict[str, Entry] | None:
    """The tensors of files that transformers chose in a folder, checked like those of a ``Folder``.

    None if there are no such files, or not all are safetensors. root: the folder that was requested. Raises
    CheckpointError for a file outside of it, and for an adapter beside the files.
    """
    if files:
        refuse_adapter(files[0].parent)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return None
    for file in files:
        outside = os.path.relpath(file, root).startswith("..") if root.is_dir() else ".." in file.parts
        if outside:
            raise CheckpointError(f"{file} lies outside of {root}, whose index names it")
    folder, names = files[0].parent, {file.name for file in files}
    if SINGLE not in names and (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if isinstance(weight_map, dict) and names == {item for item in weight_map.values() if isinstance(item, str)}:
            return _sharded(folder)
    return _joined(files)


def _joined(files: Iterable[Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.name in entries:
                raise CheckpointError(
                    f"tensor {entry.name} appears twice: in {entries[entry.name].file} and {entry.file}"
                )
            entries[entry.name] = entry
    return entries
