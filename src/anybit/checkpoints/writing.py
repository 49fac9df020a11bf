"""Write model folders under a temporary name, and rename them when they are complete."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from anybit.checkpoints.folder import INDEX, SINGLE, companions, read_json
from anybit.checkpoints.safetensors import FileWriter
from anybit.errors import CheckpointError

SHARD_BYTES = 4 << 30
# What anybit and transformers write into a model folder, and the papers that go with it. What is replaced is deleted,
# so the list is a narrow one: no pickles, no scripts, no *.txt of any name.
_OWN = (
    SINGLE,
    INDEX,
    "model-*-of-*.safetensors",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    ".gitattributes",
    ".DS_Store",
)


@contextmanager
def new_folder(path: Path | str, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A folder to write into, which becomes ``path`` in one step at the end, or vanishes if anything fails.

    overwrite, source: see ``check_place``, which says what is refused. A link is followed: the folder that it points to
    is written.
    Raises CheckpointError for a place that cannot be written to.
    """
    path = check_place(path, overwrite, source)
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
        check_place(path, overwrite, source)  # much may have come there since
        _publish(work, path)
    except OSError as error:
        reason = error.strerror or error
        other = _other_file(error, (work, path))
        what = f"{path} cannot be written" if other is None else f"{other} cannot be read, and {path} is not written"
        raise CheckpointError(f"{what}: {reason}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_place(path: Path | str, overwrite: bool = False, source: Path | None = None) -> Path:
    """Where a folder would be written; raises CheckpointError if that would destroy anything but an earlier result.

    overwrite: a model folder at ``path`` may be replaced, if all that it holds is what models are made of; otherwise
    the place has to be free or an empty folder.  source: the model folder that is read, which is never replaced.
    """
    given = Path(path)
    try:
        path = _real(given)
        here = [Path.cwd(), *Path.cwd().parents]
    except OSError as error:
        raise CheckpointError(f"{given} cannot be written: the current directory is gone ({error.strerror})") from None
    if path.is_symlink():
        raise CheckpointError(f"{given} cannot be written: it is a link that leads back to itself")
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, so no folder can be written there")
    if path in here:
        which = "the current directory" if path == here[0] else "a folder around the current directory"
        raise CheckpointError(f"{path} is {which}, which cannot be replaced: name a folder inside it")
    if source is not None and path.is_dir():
        # Files may be links out of their folder, as in the cache of the hub.
        for read in (source, *source.iterdir()):
            if path in (_real(read), *_real(read).parents):
                raise CheckpointError(f"{path} holds the model that is read ({read}): choose another folder")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{path} exists already and is not empty: choose another folder, or overwrite it")
        _refuse_to_replace(path, source)
    return path


def _real(path: Path) -> Path:
    """Links followed, as far as they lead; Path.resolve raises for those in a circle, in some versions of Python."""
    return Path(os.path.realpath(path))


def _refuse_to_replace(path: Path, source: Path | None) -> None:
    """Raise CheckpointError for a folder that holds more than a model."""
    # What goes with the source was copied from it, or is about to be.
    copied = {file.name for file in companions(source)} if source is not None else set()
    strangers = sorted(
        entry.name
        for entry in path.iterdir()
        if not (entry.is_file() and (entry.name in copied or any(map(entry.match, _OWN))))
    )
    if strangers:
        named = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise CheckpointError(
            f"{path} is not overwritten: it holds {named}, which anybit does not write into a model folder and which "
            "would be lost; choose another folder, or move it away"
        )
    try:
        known = "model_type" in read_json(path / "config.json")
    except CheckpointError:
        known = False
    if not known:
        raise CheckpointError(
            f"{path} is not overwritten: it has no config.json with a model_type, so it is no model folder; choose "
            "another folder, or remove this one yourself"
        )


def _other_file(error: OSError, ours: tuple[Path, ...]) -> str | None:
    """The file that an error is about, if it is not one being written: a copy can fail while reading."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes | os.PathLike)]
    files = [Path(os.fsdecode(name)).absolute() for name in names]
    if not files or any(place in (file, *file.parents) for file in files for place in ours):
        return None
    return str(files[0])


def _publish(work: Path, path: Path) -> None:
    if not path.is_dir() or not any(path.iterdir()):
        work.rename(path)  # an empty folder in its place is replaced
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    moved = False
    try:
        path.rename(old)
        work.rename(path)
        moved = True
    finally:
        # Whatever went wrong, and when: what was there is there again, or beside what somebody else has put there.
        if moved or not any(old.iterdir()):
            shutil.rmtree(old, ignore_errors=True)
        elif not path.exists():
            old.rename(path)


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
