"""Compiled kernels, kept in memory and on disk.

A disk entry is one file named by a hash of all that decides the machine code: the generated source, every header that
it can reach, the flags, the compiler's version, the architecture. It is written beside its place and renamed, holds a
checksum of itself, and is compiled by one process at a time. A folder that cannot be written costs time, no more.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from anybit.jit.compile import FLAGS, Compiled, compile, reachable_headers
from anybit.jit.source import Kernel

LIMIT_BYTES = 4 << 30
"""When the folder grows beyond this, the entries not used for longest are removed."""
_LOOKS = 64
"""A process looks how large the folder is at its first new entry, and after each 64th of the limit that it has added:
to look at ten thousand entries takes a fifth of the time of compiling one."""

_MAGIC = b"anybit kernel 1\n"
_SUFFIX = ".kernel"
_memory: dict[tuple[Kernel, str], Compiled] = {}
_memory_lock = threading.Lock()
_logger = logging.getLogger(__name__)
_added: int | None = None
"""Bytes of entries added since this process last looked; None: it never has."""


@cache
def folder() -> Path:
    """Where entries are kept: ANYBIT_CACHE_DIR, else ~/.cache/anybit (XDG_CACHE_HOME is honoured). Read once."""
    if chosen := os.environ.get("ANYBIT_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anybit"


def cached(kernel: Kernel, arch: str) -> Compiled:
    """The machine code of `kernel` for `arch`: from memory, else from disk, else compiled. Raises as `compile` does."""
    found = _memory.get((kernel, arch))
    if found is None:
        found = _from_disk(kernel, arch)
        with _memory_lock:
            found = _memory.setdefault((kernel, arch), found)
    return found


def clear_memory() -> None:
    """Forget what this process has loaded, and where the folder is; the disk stays as it is."""
    with _memory_lock:
        _memory.clear()
    folder.cache_clear()


def key(kernel: Kernel, arch: str) -> str:
    """The name of a kernel's entry: a hash of everything that decides its machine code."""
    digest = hashlib.sha256()
    parts = [_MAGIC, arch.encode(), json.dumps(FLAGS, sort_keys=True).encode(), _compiler_version().encode()]
    parts += [kernel.source.encode()]
    for name, content in reachable_headers(kernel).items():
        parts += [name.encode(), content]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


@cache
def _compiler_version() -> str:
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):  # tells patch releases apart, and loads no library
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def _from_disk(kernel: Kernel, arch: str) -> Compiled:
    path = folder() / (key(kernel, arch) + _SUFFIX)
    found = _load(path)
    if found is not None:
        return found
    with _locked(path):
        found = _load(path)  # another process may have been first
        if found is None:
            found = compile(kernel, arch)
            _store(path, found)
    return found


def _load(path: Path) -> Compiled | None:
    """The entry, or None where it is missing, truncated, corrupt or unreadable."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    body = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        _logger.warning("the cached kernel %s is damaged and is compiled again", path)
        return None
    length = int.from_bytes(body[:4], "little")
    try:
        found = Compiled(cubin=body[4 + length :], **json.loads(body[4 : 4 + length]))
    except (TypeError, ValueError):
        _logger.warning("the cached kernel %s was written by another version of anybit and is compiled again", path)
        return None
    with contextlib.suppress(OSError):  # tells the removal of old entries that this one is in use
        os.utime(path)
    return found


def _store(path: Path, compiled: Compiled) -> None:
    figures = {f.name: getattr(compiled, f.name) for f in dataclasses.fields(compiled) if f.name != "cubin"}
    header = json.dumps(figures).encode()
    body = len(header).to_bytes(4, "little") + header + compiled.cubin
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                file.close()
                Path(file.name).chmod(0o644)  # made for its owner alone, and the folder may be shared
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
        global _added
        if _added is None or (_added := _added + len(body)) > LIMIT_BYTES // _LOOKS:
            _added = 0
            _remove_oldest(path.parent)
    except OSError as error:
        _warn_unwritable(path.parent, str(error))


def _remove_oldest(entries: Path) -> None:
    files = []
    for path in entries.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may remove it first
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    size = sum(bytes_ for _, bytes_, _ in files)
    for _, bytes_, path in sorted(files):
        if size <= LIMIT_BYTES:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        size -= bytes_
    for path in entries.glob(".new-*"):  # left behind by a process that was killed
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - 3600:
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of an entry, across processes and threads; goes on without where the folder cannot be written.

    Lock files are shared by entries whose names begin alike, so that their number is bounded without removing any:
    removing a lock file that another process is about to lock would let two in.
    """
    with contextlib.ExitStack() as stack:
        try:
            locks = path.parent / "locks"
            locks.mkdir(parents=True, exist_ok=True)
            import fcntl

            file: IO[bytes] = stack.enter_context((locks / path.name[:3]).open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except (OSError, ImportError) as error:
            _warn_unwritable(path.parent, str(error))
        yield


@cache
def _warn_unwritable(entries: Path, reason: str) -> None:
    _logger.warning("every process compiles its kernels again, since %s cannot be written: %s", entries, reason)
