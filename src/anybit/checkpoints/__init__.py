"""Checkpoints: folders of safetensors, read and written safely. No pickle is ever loaded."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybit.checkpoints.folder import Folder
    from anybit.checkpoints.safetensors import Entry, read_header, read_tensor
    from anybit.checkpoints.source import is_gguf, local_folder
    from anybit.checkpoints.writing import ShardWriter, new_folder

__all__ = ["Entry", "Folder", "ShardWriter", "is_gguf", "local_folder", "new_folder", "read_header", "read_tensor"]

_MODULES = {
    "Folder": "folder", "Entry": "safetensors", "read_header": "safetensors", "read_tensor": "safetensors",
    "is_gguf": "source", "local_folder": "source", "ShardWriter": "writing", "new_folder": "writing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a GGUF header can be read without importing torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
