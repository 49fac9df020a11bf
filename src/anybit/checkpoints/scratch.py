"""Scratch folders for unfinished work: removed when the work ends or, after a kill, by the next run."""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where killed runs leave their folders
    fcntl = None  # type: ignore[assignment]

PREFIX = ".anybit-unfinished-"
REPLACED = "replaced"
"""Subfolder of a scratch folder for folders that are being replaced; see ``Scratch``."""


class Scratch:
    """A folder inside ``parent`` that only its owner can read; removed when closed or garbage-collected.

    It is locked while its process lives, so that a later run can recognize leftovers of a killed one (``sweep``, which
    every new Scratch runs first). ``sweep`` moves folders in ``REPLACED`` back if their place is free.
    """

    def __init__(self, parent: Path) -> None:
        sweep(parent)
        self.path, lock = _locked_folder(parent)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the folder and its contents."""
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path) -> None:
    """Remove this user's scratch folders in ``parent`` whose processes have ended."""
    for entry in parent.glob(f"{PREFIX}*") if fcntl else ():
        with contextlib.suppress(OSError):  # not a folder, another user's, locked by a live process, or already gone
            lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for old in (entry / REPLACED).glob("*"):
                        if not os.path.lexists(parent / old.name):
                            old.rename(parent / old.name)
                    shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(lock)


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: ``write`` gets a path in a scratch folder, which is then renamed. Raises OSError."""
    with Scratch(file.parent) as work:
        write(work / file.name)
        (work / file.name).replace(file)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new folder and its lock; unlocked on file systems without locks, where ``sweep`` does nothing either."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = None
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            pass  # lost a race with another run's sweep
        except (OSError, AttributeError):  # no locks here, or no fcntl
            return path, lock
        if path.exists():
            return path, lock
        if lock is not None:
            os.close(lock)


def _remove(path: Path, lock: int | None) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:  # again, if Ctrl-C came in between: a finalizer runs only once
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
