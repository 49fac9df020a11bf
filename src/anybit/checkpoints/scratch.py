"""Folders for what is not finished: gone when the work ends, and after a kill gone with the next run beside them."""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where leftovers of killed runs stay
    fcntl = None  # type: ignore[assignment]

PREFIX = ".anybit-unfinished-"
REPLACED = "replaced"
"""Where a scratch folder keeps folders that are being replaced; see ``Scratch``."""


class Scratch:
    """A folder inside ``parent`` that its owner alone can read; removed when it is closed or nobody holds it.

    It is locked as long as its process lives, so that a later run can tell what a killed one has left (``sweep``, which
    every new scratch folder does first). Folders in its ``REPLACED`` are put back then, if nothing has their place.
    """

    def __init__(self, parent: Path) -> None:
        sweep(parent)
        self.path, lock = _locked_folder(parent)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the folder and what is in it."""
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path) -> None:
    """Remove the scratch folders of this user in ``parent`` whose processes have ended."""
    for entry in parent.glob(f"{PREFIX}*") if fcntl else ():
        with contextlib.suppress(OSError):  # not a folder, another's, locked by a living process, or gone by now
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
    """Write a file in one step: ``write`` is called with a path beside it, which takes its place. Raises OSError."""
    with Scratch(file.parent) as work:
        write(work / file.name)
        (work / file.name).replace(file)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new folder and its lock; None on file systems without locks, where ``sweep`` removes nothing either."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = None
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            pass  # the sweep of another run has just come by
        except (OSError, AttributeError):  # no locks here, or no fcntl
            return path, lock
        if path.exists():
            return path, lock
        if lock is not None:
            os.close(lock)


def _remove(path: Path, lock: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
