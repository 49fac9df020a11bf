"""Disk cache of the kernels that a model's layers launch, so that a second load skips the dry run.

An entry's name is a hash of the build of anybit, the GPU, its policy maps and the list of layers.
"""

import contextlib
import hashlib
import io
import pickle
from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import anybit
from anybit.choose.dispatch import Choices, allowed, given
from anybit.choose.policy import own_file
from anybit.device import Device
from anybit.jit import Kernel
from anybit.jit.cache import keep_note, note

_PACKAGE = Path(anybit.__file__).parent
_DECIDING = ("*.py", "kernels/**/*.py", "tune/**/*", "ops/*.py", "jit/*.py")
"""Files of the package that decide which kernels are chosen."""


class Chosen(NamedTuple):
    """Kernels of a model's layers, and the dispatcher's choices behind them."""

    kernels: list[Kernel]
    choices: Choices


def name_of(layers: Iterable[str], most: int, device: Device) -> str | None:
    """The name of an entry, a hash of everything that decides; None if policy maps were set by hand."""
    if given():
        return None
    own = b""
    with contextlib.suppress(OSError):  # missing, or unreadable (already warned about)
        own = own_file(device.name).read_bytes()
    parts = [_build(), str(device).encode(), own, str(most).encode()]
    parts += [text.encode() for text in (*sorted(allowed()), "layers", *layers)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return "chosen-" + digest.hexdigest()[:40]


@cache
def _build() -> bytes:
    """A hash of torch's version and the deciding files."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted({path for pattern in _DECIDING for path in _PACKAGE.glob(pattern) if path.is_file()}):
        if path.suffix in (".py", ".json"):
            digest.update(str(path.relative_to(_PACKAGE)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def read(name: str) -> Chosen | None:
    """Read an entry; None if it is missing or unreadable."""
    content = note(name)
    if content is None:
        return None
    try:
        kernels, choices = _Reader(io.BytesIO(content)).load()
        return Chosen(kernels, choices)
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, TypeError, ValueError):
        return None


def write(name: str, chosen: Chosen) -> None:
    """Write an entry for later processes."""
    keep_note(name, pickle.dumps(tuple(chosen), protocol=5))


class _Reader(pickle.Unpickler):
    """A restricted unpickler: only anybit's dataclasses and enums, and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up an allowed class or dtype. Raises UnpicklingError for any other."""
        found = super().find_class(module, name) if module == "torch" or module.startswith("anybit.") else None
        value = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
        if value or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"an entry of chosen kernels has {module}.{name}, which is not allowed")
