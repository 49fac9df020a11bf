"""Writing model folders: beside the place where they shall be, and renamed when they are whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from anybit.checkpoints.folder import INDEX, SINGLE
from anybit.checkpoints.safetensors import FileWriter
from anybit.errors import CheckpointError

SHARD_BYTES = 4 << 30


@contextmanager
def new_folder(path: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes ``path`` in one step at the end, or vanishes if anything fails.

    overwrite: an existing folder at ``path`` is replaced, at the end; otherwise it is refused unless it is empty.
    Raises CheckpointError for a place that cannot be written to.
    """
    path = Path(path).absolute()
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a folder shall be written there")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise CheckpointError(f"{path} exists already and is not empty: choose another folder, or overwrite it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.unfinished-", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror} ({error.filename})") from None
    try:
        # mkdtemp makes folders that only their owner may read; the result should be like any other folder.
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)
        yield work
        _publish(work, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, path: Path) -> None:
    if path.is_dir() and any(path.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
        path.rename(old)
        try:
            work.rename(path)
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        work.rename(path)  # an empty folder in its place is replaced


def write_text(file: Path, text: str) -> None:
    """Replace a file by a text in one step."""
    work = file.with_name(f".{file.name}.unfinished-{os.getpid()}")
    try:
        work.write_text(text, encoding="utf-8")
        work.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        work.unlink(missing_ok=True)


class ShardWriter:
    """Writes tensors one after another into safetensors files of at most ``shard_bytes``, and their index.

    Nothing is kept in memory. ``header_room`` must be enough for the header of all tensors (``header_room``).
    """

    def __init__(self, folder: Path, header_room: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.bytes = 0
        self._room = header_room
        self._names: set[str] = set()
        self._done: list[FileWriter] = []
        self._current: FileWriter | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor."""
        if name in self._names:
            raise CheckpointError(f"tensor {name} would be written twice")
        self._names.add(name)
        if self._current is not None and self._current.bytes + tensor.nbytes > self.shard_bytes and self._current.bytes:
            self._finish()
        if self._current is None:
            self._current = FileWriter(self.folder / f"shard-{len(self._done):05}.safetensors", self._room)
        self._current.add(name, tensor)
        self.bytes += tensor.nbytes

    def close(self) -> None:
        """Finish the last file, give the files their names, and write the index if there are several."""
        self._finish()
        count = len(self._done)
        if count == 1:
            self._done[0].file.rename(self.folder / SINGLE)
            return
        weight_map = {}
        for i, writer in enumerate(self._done, 1):
            name = f"model-{i:05}-of-{count:05}.safetensors"
            writer.file.rename(self.folder / name)
            weight_map.update(dict.fromkeys(writer.names, name))
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._current is not None:
            self._current.abandon()

    def _finish(self) -> None:
        if self._current is not None:
            self._current.close()
            self._done.append(self._current)
            self._current = None
