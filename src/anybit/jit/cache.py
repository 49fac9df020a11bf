"""Cache of compiled kernels, on disk.

An entry is one file, named by a hash of everything that decides the machine code: generated source, reachable
headers, flags, compiler version, architecture. It is written to a temporary file and renamed; it contains its name, the
architecture and a checksum; and only one process at a time compiles it.

Entries run on the GPU, so only files of this user or root are trusted: entries and their folder must belong to one of
them and must not be writable by others. Links, FIFOs, devices and huge files are rejected, and no process waits for
another for ever. Without a usable folder, kernels are just compiled again.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from anybit.errors import KernelError
from anybit.jit.compile import FLAGS, Compiled, compile, reachable_headers
from anybit.jit.source import Kernel

LIMIT_BYTES = 4 << 30
"""Beyond this folder size, least recently used entries are removed."""
ENTRY_BYTES = 64 << 20
"""Files larger than this cannot be kernels."""
SAY_SECONDS, WAIT_SECONDS = 5.0, 120.0
"""Seconds of waiting for an entry's lock until that is logged, and until this process goes on without it."""
_LOOKS = 64
"""A process checks the folder's size at its first new entry, and after every 64th of the limit that it adds: scanning
ten thousand entries takes a fifth of the time of compiling one."""

_MAGIC = b"anybit kernel 2\n"
_SUFFIX = ".kernel"
_NEW = ".new-"
_logger = logging.getLogger(__name__)
_added: int | None = None
"""Bytes added since this process last checked the folder's size; None: never checked."""


def folder() -> Path:
    """The cache folder: ANYBIT_CACHE_DIR, else ~/.cache/anybit (XDG_CACHE_HOME is honoured).

    Raises KernelError for an empty or relative ANYBIT_CACHE_DIR, or an unknown home directory.
    """
    chosen, shared = os.environ.get("ANYBIT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen is not None:
            path = Path(chosen).expanduser()
        elif shared and Path(shared).is_absolute():  # the XDG specification: a relative one is ignored
            path = Path(shared) / "anybit"
        else:
            path = Path.home() / ".cache" / "anybit"
    except RuntimeError:
        whose = "your home is unknown" if chosen is None else f"ANYBIT_CACHE_DIR names an unknown home: {chosen!r}"
        raise KernelError(f"{whose}: set ANYBIT_CACHE_DIR to an absolute folder for compiled kernels") from None
    if chosen is not None and not path.is_absolute():
        what = "is empty" if not chosen else f"is {chosen!r}, a relative path"
        raise KernelError(f"ANYBIT_CACHE_DIR {what}: set it to an absolute folder for compiled kernels, or unset it")
    return path


def cached(kernel: Kernel, arch: str) -> Compiled:
    """The machine code of `kernel` for `arch`: from disk, else compiled. Raises like `compile`."""
    with _opened(folder()) as place:
        if place is None:
            return compile(kernel, arch)
        name = key(kernel, arch)
        found = _load(place, name, arch)
        if found is None:
            with _locked(place, name):
                found = _load(place, name, arch)  # another process may have been first
                if found is None:
                    found = compile(kernel, arch)
                    _store(place, name, found)
        return found


def fetch(kernel: Kernel, arch: str) -> Compiled | None:
    """The machine code of a kernel, if it is on disk; never compiles."""
    with _opened(folder()) as place:
        return None if place is None else _load(place, key(kernel, arch), arch)


def key(kernel: Kernel, arch: str) -> str:
    """The name of a kernel's entry: a hash of everything that decides its machine code."""
    digest = hashlib.sha256()
    parts = [_MAGIC, arch.encode(), json.dumps(FLAGS, sort_keys=True).encode(), compiler_version().encode()]
    parts += [kernel.source.encode()]
    for name, content in reachable_headers(kernel).items():
        parts += [name.encode(), content]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


@cache
def compiler_version() -> str:
    """The compiler's name and version, patch release included if it is a pip package."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):  # has the patch release, and loads no library
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """The folder as a descriptor, so that it cannot be swapped meanwhile; None if it is unusable (warned about)."""
    found: int | None = None
    with contextlib.ExitStack() as stack:
        try:
            if os.name != "posix":
                raise OSError("POSIX file permissions are needed")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            place = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, place)
            status = os.fstat(place)
            own = status.st_uid == os.geteuid() and "ANYBIT_CACHE_DIR" not in os.environ
            if own and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
                os.chmod(place, 0o700)  # noqa: PTH101  created under a group-writable umask
            if reason := _not_trusted(os.fstat(place)):
                raise OSError(f"{reason}; set ANYBIT_CACHE_DIR to a folder that only you can write")
            found = place
        except OSError as error:
            _warn_unusable(path, error.strerror or str(error))
        yield found


def _not_trusted(status: os.stat_result) -> str | None:
    """Why a file or folder is not trusted (others may have written it), or None."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({status.st_uid})"
    if status.st_mode & 0o022:
        return f"others can write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


class _UnusableError(Exception):
    """What is wrong with an entry."""


def _load(place: int, name: str, arch: str) -> Compiled | None:
    """The entry; None if it is missing or (with a warning) damaged, not trusted or another kernel's."""
    try:
        return _parse(_read(place, name + _SUFFIX), name, arch)
    except FileNotFoundError:
        return None
    except (OSError, _UnusableError) as error:
        what = f"cannot be opened ({error.strerror})" if isinstance(error, OSError) else str(error)
        _warn_once(f"the cached kernel {folder() / (name + _SUFFIX)} {what} and is compiled again")
        return None


def _read(place: int, file_name: str) -> bytes:
    # O_NONBLOCK: opening a FIFO without a writer would block for ever.
    file = os.open(file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > ENTRY_BYTES:
            raise _UnusableError("is not a regular file, or is too large,")
        if reason := _not_trusted(status):
            raise _UnusableError(f"is not loaded, since {reason},")
        with contextlib.suppress(OSError):  # mark as used, for the eviction of old entries
            os.utime(file)
        with os.fdopen(file, "rb", closefd=False) as entry:
            return entry.read(ENTRY_BYTES)
    finally:
        os.close(file)


def _parse(content: bytes, name: str, arch: str) -> Compiled:
    start = len(_MAGIC) + 32
    body = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        raise _UnusableError("is damaged")
    length = int.from_bytes(body[:4], "little")
    try:
        figures = json.loads(body[4 : 4 + length])
        own = figures.pop("key")
        found = Compiled(cubin=body[4 + length :], **figures)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _UnusableError("was written by another version of anybit") from None
    if (own, found.arch) != (name, arch):
        raise _UnusableError("holds another kernel")
    return found


def _store(place: int, name: str, compiled: Compiled) -> None:
    figures = {f.name: getattr(compiled, f.name) for f in dataclasses.fields(compiled) if f.name != "cubin"}
    header = json.dumps({"key": name, **figures}).encode()
    body = len(header).to_bytes(4, "little") + header + compiled.cubin
    new = f"{_NEW}{secrets.token_hex(8)}"
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=place)
        try:
            with os.fdopen(file, "wb") as entry:
                entry.write(_MAGIC + hashlib.sha256(body).digest() + body)
                os.chmod(file, 0o644)  # noqa: PTH101  root's entries may serve all users
            os.replace(new, name + _SUFFIX, src_dir_fd=place, dst_dir_fd=place)
        except OSError:
            os.unlink(new, dir_fd=place)
            raise
        global _added
        if _added is None or (_added := _added + len(body)) > LIMIT_BYTES // _LOOKS:
            _added = 0
            _remove_oldest(place)
    except OSError as error:
        _warn_unusable(folder(), error.strerror or str(error))


def _remove_oldest(place: int) -> None:
    files, size = [], 0
    for entry in os.scandir(place):
        with contextlib.suppress(OSError):  # another process may remove it first
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith(_SUFFIX) and stat.S_ISREG(status.st_mode):
                files.append((status.st_mtime, status.st_size, entry.name))
                size += status.st_size
            elif entry.name.startswith(_NEW) and status.st_mtime < time.time() - 3600:  # left by a killed process
                os.unlink(entry.name, dir_fd=place)
    for _, bytes_, name in sorted(files):
        if size <= LIMIT_BYTES:
            break
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=place)
        size -= bytes_


@contextlib.contextmanager
def _locked(place: int, name: str) -> Iterator[None]:
    """Hold the lock of an entry, across processes and threads; continue without it if it cannot be acquired.

    Entries with the same name prefix share a lock file. This bounds the number of files without deleting any: deleting
    one that another process is about to lock would let two processes in.
    """
    lock = f"locks/{name[:3]}"
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir("locks", 0o700, dir_fd=place)
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=place)
            stack.callback(os.close, file)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{lock} is not a regular file")
            _wait_for(file, lock)
        except OSError as error:
            _warn_unusable(folder(), error.strerror or str(error))
        yield


def _wait_for(file: int, lock: str) -> None:
    import fcntl

    began, said = time.monotonic(), False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - began
        if waited >= WAIT_SECONDS:
            _logger.warning(
                "another process has held %s for %.0f s: compiling the kernel in this one", folder() / lock, waited
            )
            return
        if waited >= SAY_SECONDS and not said:
            said = True
            _logger.warning("waiting for another process to compile a kernel (it holds %s)", folder() / lock)
        time.sleep(min(0.005 + waited / 20, 0.5))


def _warn_unusable(entries: Path, reason: str) -> None:
    _warn_once(f"every process compiles its kernels again, since {entries} cannot be used: {reason}")


@cache
def _warn_once(message: str) -> None:
    _logger.warning("%s", message)
