"""The files beside a model's weights: what is copied with the model, and what is left out."""

import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from anybit.checkpoints.sidecars import FILES
from anybit.errors import CheckpointError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_WEIGHTS = (
    *PICKLES,
    *("*.safetensors", "*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.distcp"),
)
_CODE = ("*.py", "*.pyc", "*.so")
# Written anew with the weights.
_REWRITTEN = ("config.json", *FILES, "*.safetensors.index.json", "*.bin.index.json")


def companions(folder: Path, programs: bool = False) -> tuple[list[Path], list[Path]]:
    """(files to copy with a model, what else it holds but hidden files), as sorted paths within its folder.

    Copied are tokenizer, templates, settings and documents, also in sub-folders, but no weights and, unless
    ``programs``, no code. A sub-folder with weights is another model, an adapter or an export: nothing of it is copied.
    Raises CheckpointError for a link out of the folder, as a copy would leak its target, and for an unreadable one.
    """
    copied: list[Path] = []
    left: list[Path] = []
    for at, folders, names in os.walk(folder, onerror=_refuse_unreadable):
        place = Path(at)
        if place != folder and any(_matches(name, _WEIGHTS) for name in names):
            left.append(place.relative_to(folder))
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (place / name).is_symlink()]  # which ``walk`` does not enter
        for name in (*links, *names):
            file = place / name
            if name.startswith(".") or (place == folder and _matches(name, _REWRITTEN)):
                continue
            code = _matches(name, _CODE) and not (programs and name.endswith(".py"))
            if code or _matches(name, _WEIGHTS) or not file.exists():
                left.append(file.relative_to(folder))
                continue
            if file.is_symlink() and not _is_inside(folder, file.resolve()):
                raise CheckpointError(
                    f"{file} is a link to {file.resolve()}, outside of its folder, and would be copied into the "
                    "result: put the file itself there, or remove the link"
                )
            (copied if file.is_file() else left).append(file.relative_to(folder))
    return sorted(copied), sorted(left)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_inside(folder: Path, target: Path) -> bool:
    """Whether a file is inside a model folder; files in the hub's cache are links into its ``blobs``."""
    real = folder.resolve()
    places = [real]
    if real.parent.name == "snapshots":
        places.append(real.parent.parent / "blobs")
    return any(place in target.parents for place in places)


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
