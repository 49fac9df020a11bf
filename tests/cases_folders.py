"""Changes to model folders: entries of config.json, and tensors of their only file."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases_models import save_tiny


class Sources(dict[str, Path]):
    """Folders of tiny models by architecture, saved when first asked for. They are to be read, not changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, architecture: str) -> Path:
        with torch.random.fork_rng(devices=[]):  # a test's own numbers do not depend on who asks first
            self[architecture] = save_tiny(architecture, self.root / architecture)
        return self[architecture]


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def quantization_of(folder: Path) -> Any:
    return config_of(folder)["quantization_config"]


def configure(folder: Path, quantization: Any = None, **entries: Any) -> Path:
    """Change entries of config.json, and of its quantization_config."""
    config = config_of(folder) | entries
    if quantization is not None:
        config["quantization_config"] |= quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def retensor(folder: Path, **tensors: Tensor | None) -> Path:
    """Replace, add, or remove (None) tensors."""
    file = folder / "model.safetensors"
    whole = {name: tensor for name, tensor in {**load_file(file), **tensors}.items() if tensor is not None}
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file, {"format": "pt"})
    return folder


def copied(source: Path, target: Path, **tensors: Tensor | None) -> Path:
    """A copy of a folder with some tensors replaced, added, or removed (None)."""
    return retensor(shutil.copytree(source, target), **tensors)
