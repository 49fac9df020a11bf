"""What tests build once and keep between runs, named by a hash of its content: emulated kernels and disassembly.

They lie beside the compiled kernels (``ANYBIT_CACHE_DIR``, else ``~/.cache/anybit``), where a fresh clone finds them.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from anybit.jit.cache import folder

FOLDER = folder() / "tests"
LIMIT_BYTES = 2 << 30
"""Beyond this size, least recently used files are removed."""


def digest(*parts: bytes) -> str:
    """A hash of all parts, each with its length."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:32]


def built(name: str, build: Callable[[Path], None]) -> Path:
    """The file of this name. If it is absent, ``build`` writes it first, in one process at a time."""
    file = FOLDER / name
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name[:2]}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
                new = Path(scratch) / file.name
                build(new)
                new.rename(file)
            _prune_once()
    return file


@cache
def _prune_once() -> None:
    prune(LIMIT_BYTES)


def prune(limit: int) -> None:
    """Remove the least recently used files beyond ``limit`` bytes; another process may do the same."""
    found = []
    for file in FOLDER.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if file.is_file() and file.suffix != ".lock":
                found.append((status.st_mtime, status.st_size, file))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, file in sorted(found):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
