"""Write model folders under a temporary name, and move them into place atomically when complete."""

import filecmp
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from anybit.checkpoints.companions import companions
from anybit.checkpoints.folder import INDEX, SINGLE, Folder, read_json
from anybit.checkpoints.safetensors import FileWriter, header_room
from anybit.checkpoints.scratch import PREFIX, REPLACED, Scratch, replace_file
from anybit.errors import CheckpointError, counted, printable

SHARD_BYTES = 4 << 30
MANIFEST = ".anybit-files.json"
"""In every folder that anybit writes: its files and their sizes, written after them."""
# Files that are recognized by name and size only; ``convert`` rewrites config.json, of any size.
_MODEL = ("config.json", INDEX, SINGLE, "model-*-of-*.safetensors")
# For folders without a manifest (older versions, transformers): files that may be deleted because tools generate them;
# no documents, pickles or scripts.
_MADE_BY_TOOLS = (
    *_MODEL, "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model",
    "sentencepiece.bpe.model", "spm.model", "tekken.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt",
    "merges.txt", "spiece.model",
)  # fmt: skip
_OF_SYSTEMS = (MANIFEST, ".DS_Store")


@contextmanager
def new_folder(path: Path | str, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A folder to write into, which atomically becomes ``path`` at the end, or is removed if anything fails.

    overwrite, source: see ``check_place``. Links are followed: their target is written. A folder to replace is renamed
    away, and back if the second rename fails; after a kill between the two, the next run there restores it. That run
    also removes whatever a killed run left (``.anybit-unfinished-*``).
    Raises CheckpointError if ``path`` cannot be written.
    """
    path = check_place(path, overwrite, source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Scratch(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror} ({error.filename})") from None
    work = scratch.path / "model"
    try:
        work.mkdir()
        yield work
        files = {file.relative_to(work).as_posix(): {"bytes": file.stat().st_size} for file in _files(work)}
        (work / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        check_place(path, overwrite, source)  # it may have changed since
        _publish(work, path)
    except OSError as error:
        reason = error.strerror or error
        other = _other_file(error, (work, path))
        what = f"{path} cannot be written" if other is None else f"{other} cannot be read, and {path} is not written"
        raise CheckpointError(f"{what}: {reason}") from error
    finally:
        scratch.close()


def check_place(path: Path | str, overwrite: bool = False, source: Path | None = None) -> Path:
    """The real path to write to; raises CheckpointError if that would destroy anything but an earlier result.

    overwrite: a model folder at ``path`` may be replaced if all its files, in sub-folders too, are in ``MANIFEST``, of
    the size that it gives and no newer than it, or are the same in the source; without a manifest, if it is a model and
    tools generate all its files. Otherwise ``path`` must not exist or be an empty folder.  source: the model folder
    that is read, never replaced; its files must be such as may be copied (``companions``).
    """
    given = Path(path)
    try:
        path = Path(os.path.realpath(given))  # unlike Path.resolve, never raises for circular links
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
    if source is not None:
        for read in _read_from(source):
            real = Path(os.path.realpath(read))
            if path in (real, *real.parents):
                raise CheckpointError(f"{path} holds the model that is read ({read}): choose another folder")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise CheckpointError(
                f"{path} exists already and is not empty: choose another folder, or replace it with --overwrite "
                "(overwrite=True)"
            )
        _refuse_to_replace(path, source)
    return path


def _read_from(source: Path) -> Iterator[Path]:
    """A model folder and what is read in it, but no other folders in it; files may be links, as in the hub's cache."""
    yield source
    yield from (file for file in source.iterdir() if not file.is_dir())
    yield from (source / name for name in companions(source)[0])


def _refuse_to_replace(path: Path, source: Path | None) -> None:
    """Raise CheckpointError unless a folder is a model folder with nothing in it that a user could lose."""
    listed = _manifest(path)
    copied = set() if source is None else set(companions(source)[0])
    strangers = []
    for top in sorted(path.iterdir()):
        for entry in (top, *top.rglob("*")) if not top.name.startswith(PREFIX) else ():
            name = entry.relative_to(path)
            if not _replaceable(path, name, listed, source / name if source and name in copied else None):
                strangers.append(str(name))
                break  # one of a sub-folder is enough
    if strangers:
        named = counted([*map(printable, strangers)], 3)
        raise CheckpointError(
            f"{path} is not overwritten: it holds {named}, which would be lost, since anybit did not write it, or it "
            "was changed since; choose another folder, or move it away"
        )
    try:
        known = listed is not None or "model_type" in read_json(path / "config.json")
    except CheckpointError:
        known = False
    if not known:
        raise CheckpointError(
            f"{path} is not overwritten: it has no config.json with a model_type, so it is no model folder; choose "
            "another folder, or remove this one yourself"
        )


def _replaceable(folder: Path, name: Path, listed: Mapping[str, object] | None, twin: Path | None) -> bool:
    """Whether a file or sub-folder of a folder may be deleted without loss. twin: the source's file of that name."""
    entry, own = folder / name, (listed or {}).get(name.as_posix())
    if entry.is_symlink() or not entry.is_file():  # a folder is judged by what is in it
        return entry.is_dir() and not entry.is_symlink() and os.access(entry, os.R_OK) and any(entry.iterdir())
    if name == Path("config.json") or name.name in _OF_SYSTEMS or (listed is None and _is_one_of(name, _MADE_BY_TOOLS)):
        return True
    if isinstance(own, dict) and own.get("bytes") == entry.stat().st_size:
        older = entry.stat().st_mtime_ns <= (folder / MANIFEST).stat().st_mtime_ns
        return older or _is_one_of(name, _MODEL)
    # Identical companions of the source were copied from it, or are about to be.
    return twin is not None and filecmp.cmp(twin, entry, shallow=False)


def _is_one_of(name: Path, patterns: tuple[str, ...]) -> bool:
    return any(Path("/", name).match(f"/{pattern}") for pattern in patterns)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _manifest(folder: Path) -> Mapping[str, object] | None:
    """The files that anybit wrote into a folder, from its manifest; None without one."""
    with suppress(CheckpointError):
        files = read_json(folder / MANIFEST).get("files")
        if isinstance(files, dict):
            return files
    return None


def _other_file(error: OSError, ours: tuple[Path, ...]) -> str | None:
    """The file that an error names, unless it is being written: a copy can also fail while reading."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes | os.PathLike)]
    files = [Path(os.fsdecode(name)).absolute() for name in names]
    if not files or any(place in (file, *file.parents) for file in files for place in ours):
        return None
    return str(files[0])


def _publish(work: Path, path: Path) -> None:
    """Move a finished folder into place; a folder that it replaces ends up in the scratch folder."""
    if not path.is_dir() or not any(path.iterdir()):
        work.rename(path)  # also replaces an empty folder
        return
    for file in _files(work):  # before the old files go, make the new ones durable
        with file.open("rb") as written:
            os.fsync(written.fileno())
    old = work.parent / REPLACED / path.name
    old.parent.mkdir()
    try:
        path.rename(old)  # Ctrl-C during it is raised after it
        work.rename(path)
    except BaseException:
        if not path.exists():
            old.rename(path)
        raise
    old.rename(work)  # out of REPLACED, or a later sweep might restore what is left of it


def rewrite(source: Folder, folder: Path, config: Mapping[str, object], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a changed copy of a model folder, with the files beside its weights. Raises CheckpointError.

    tensors: by names no longer than those of the source's, and no more of them.
    """
    try:
        with ShardWriter(folder, source.entries) as writer:
            for name, tensor in tensors:
                writer.add(name, tensor)
        source.copy_companions(folder)
        write_config(folder, config)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def write_config(folder: Path, config: Mapping[str, object]) -> None:
    """Write a folder's config.json atomically. Raises OSError."""
    text = json.dumps(config, indent=2) + "\n"
    replace_file(folder / "config.json", lambda work: work.write_text(text, encoding="utf-8"))


class ShardWriter:
    """Streams tensors into safetensors files of at most ``shard_bytes`` (or one larger tensor), and their index.

    names: of all tensors that may come, for which every file's header gets room.
    """

    def __init__(self, folder: Path, names: Iterable[str], shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.bytes = 0
        self._room = header_room(names)
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
        """Finish the last file, rename the files, and write the index if there are several."""
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
            self._current.stream.close()

    def _finish(self) -> None:
        if self._current is not None:
            self._current.close()
            self._done.append(self._current)
            self._current = None
