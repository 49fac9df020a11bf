"""Checkpoints: folders of safetensors, read and written safely. No pickle is ever loaded."""

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.safetensors import Entry, read_header, read_tensor
from anybit.checkpoints.source import is_gguf, local_folder
from anybit.checkpoints.writing import ShardWriter, new_folder

__all__ = ["Entry", "Folder", "ShardWriter", "is_gguf", "local_folder", "new_folder", "read_header", "read_tensor"]
