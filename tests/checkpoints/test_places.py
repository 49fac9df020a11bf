"""Where a folder may be written: only models are replaced, never the source, and links are followed."""

import json
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from anybit.checkpoints import writing
from anybit.checkpoints.writing import new_folder
from anybit.errors import CheckpointError
from anybit.quantization.methods.registry import quantize_folder


def model_at(path: Path, *more: str) -> Path:
    """Something like a model folder, with extra files."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("model.safetensors", "tokenizer.json", *more):
        (path / name).write_text("old")
    return path


def refused(path: Path, message: str, source: Path | None = None) -> None:
    """Replacing the folder is refused, and changes nothing."""
    before = sorted(path.rglob("*"))
    with pytest.raises(CheckpointError, match=message), new_folder(path, overwrite=True, source=source):
        pass
    assert sorted(path.rglob("*")) == before
    assert [f.name for f in path.parent.glob(".*")] == []


def written(path: Path, **files: str) -> Path:
    """A folder written by anybit."""
    with new_folder(path) as work:
        (work / "config.json").write_text('{"model_type": "llama"}')
        for name in ("model.safetensors", "tokenizer.json"):
            (work / name).write_text("old")
        for name, text in files.items():
            (work / name).write_text(text)
    return path


def test_new_folder_replaces_no_other_files(tmp_path: Path) -> None:
    """Folders without a manifest: of an earlier version, or of another tool."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    refused(thesis, r"thesis is not overwritten: it holds thesis\.tex, which would be lost, since anybit did not")
    refused(model_at(tmp_path / "b", "train.py", "optimizer.pt", "c.bin", "d"), r"holds c\.bin, d, optimizer\.pt and")
    for index, name in enumerate(("notes.txt", "README.md", "LICENSE", "LICENSE_KEY.txt", "NOTICE.mine", "foo.spm")):
        refused(model_at(tmp_path / f"a{index}", name), f"it holds {name}, which")
    (model_at(tmp_path / "c") / "checkpoint-500").mkdir()
    refused(tmp_path / "c", "it holds checkpoint-500, which")
    (model_at(tmp_path / "e") / "vocab.json").symlink_to(thesis / "thesis.tex")
    refused(tmp_path / "e", r"it holds vocab\.json, which")
    refused(model_at(tmp_path / "f", "\x1b[2Jred"), r"it holds \\x1b\[2Jred, which")
    for index, text in enumerate(('{"name": "website"}', "{", None)):
        other = model_at(tmp_path / f"other{index}")
        (other / "config.json").unlink()
        if text is not None:
            (other / "config.json").write_text(text)
        refused(other, r"no config\.json with a model_type, so it is no model folder")
    with new_folder(model_at(tmp_path / "model", "model-00001-of-00002.safetensors"), overwrite=True) as work:
        (work / "config.json").write_text("new")
    assert sorted(f.name for f in (tmp_path / "model").iterdir()) == [writing.MANIFEST, "config.json"]


def test_new_folder_replaces_what_its_manifest_lists_alone(tmp_path: Path) -> None:
    out = written(tmp_path / "out", README="of the model", LICENSE="free")
    (out / "config.json").write_text('{"converted": true}')
    (out / ".DS_Store").write_text("where the icons are")
    with new_folder(out, overwrite=True) as work:
        (work / "config.json").write_text("new")
    assert sorted(f.name for f in out.iterdir()) == [writing.MANIFEST, "config.json"]

    for index, (name, text) in enumerate(
        {"README": "my own words", "EVAL.md": "8.2", "model.safetensors": "x"}.items()
    ):
        mine = written(tmp_path / f"mine{index}", README="of the model")
        (mine / name).write_text(text)
        os.utime(mine / name, (time.time() + 5,) * 2)  # of the old size, perhaps, but newer
        refused(mine, f"it holds {name}, which would be lost, since anybit did not write it")
    (mine / writing.MANIFEST).write_text("{")  # its manifest is lost: README is of unknown origin
    refused(mine, "it holds README, which")
    wrong = written(tmp_path / "wrong")
    said = {"model.safetensors": {"bytes": 4}, "tokenizer.json": 3}
    (wrong / writing.MANIFEST).write_text(json.dumps({"files": said}))
    refused(wrong, r"it holds model\.safetensors, tokenizer\.json, which")


def test_new_folder_keeps_files_that_came_meanwhile(tmp_path: Path) -> None:
    for overwrite, message in ((False, "exists already and is not empty"), (True, r"it holds thesis\.tex")):
        with pytest.raises(CheckpointError, match=message), new_folder(tmp_path / "out", overwrite):
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert [f.name for f in tmp_path.rglob("*")] == ["out", "thesis.tex"]


def test_new_folder_never_replaces_its_source(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "around" / "source"
    shutil.copytree(llama, source)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(source)
    for output in (source, source / "..", tmp_path / "link", source / "x" / ".."):
        with pytest.raises(CheckpointError, match=r"holds the model that is read \(.*source\): choose another folder"):
            quantize_folder(source, output, "w4a16g32", overwrite=True)
    with pytest.raises(CheckpointError, match="holds the model that is read"):
        quantize_folder(tmp_path / "link", source, "w4a16g32", overwrite=True)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    # A folder of links, as in the hub's cache: the source is where they point.
    links = tmp_path / "links"
    links.mkdir()
    for file in source.iterdir():
        (links / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="holds the model that is read"):
        quantize_folder(links, source, "w4a16g32", overwrite=True)
    quantize_folder(source, source / "w4", "w4a16g32")  # a new folder beside its files is fine


def test_new_folder_never_replaces_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = model_at(tmp_path / "model") / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for place, message in ((".", "is the current directory"), ("", "is the current"), ("..", "a folder around")):
        with pytest.raises(CheckpointError, match=message), new_folder(place, overwrite=True):
            pass
    with new_folder("out"):
        pass
    assert (inner / "out").is_dir()


def test_new_folder_follows_links(tmp_path: Path) -> None:
    real = model_at(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    with pytest.raises(CheckpointError, match="real exists already and is not empty"), new_folder(tmp_path / "link"):
        pass
    for name, target in (("link", real), ("dangling", tmp_path / "later")):
        with new_folder(tmp_path / name, overwrite=True) as work:
            (work / "file").write_text("new")
        assert (tmp_path / name).is_symlink()
        assert sorted(f.name for f in target.iterdir()) == [writing.MANIFEST, "file"]
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(CheckpointError, match="a link that leads back to itself"), new_folder(tmp_path / "round"):
        pass
    (tmp_path / "round").unlink()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dangling", "later", "link", "real"]


@pytest.mark.parametrize("fails", ["nothing", "first", "second"])
def test_a_folder_is_replaced_by_two_renames_that_are_undone_if_one_fails(tmp_path, monkeypatch, fails) -> None:
    old, rename, seen = model_at(tmp_path / "out"), Path.rename, []

    def watched(path: Path, target: Path) -> Path:
        seen.append(path.parent.name)
        if fails == {1: "first", 2: "second"}.get(len(seen)):
            raise OSError(16, "Device or resource busy", str(old))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    refusal = pytest.raises(CheckpointError, match="out cannot be written: Device or resource busy")
    with nullcontext() if fails == "nothing" else refusal, new_folder(old, overwrite=True) as work:
        (work / "config.json").write_text("{}")
    assert len(seen) == {"nothing": 3, "first": 1, "second": 3}[fails]  # a third puts the old one elsewhere
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert (old / "config.json").read_text() == ("{}" if fails == "nothing" else '{"model_type": "llama"}')


def test_the_file_that_fails_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    (source / "tokenizer.json").write_text("{}")

    def unreadable(file: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    def full(file: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(file), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", unreadable)
    message = r"source/\S+ cannot be read, and \S+/out is not written: Permission denied"
    with pytest.raises(CheckpointError, match=message):
        quantize_folder(source, tmp_path / "out", "w4a16g32")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=r"^\S+/out cannot be written: No space left on device"):
        quantize_folder(source, tmp_path / "out", "w4a16g32")
    assert [f.name for f in tmp_path.iterdir()] == ["source"]


def test_a_current_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="out cannot be written: the current directory is gone"):
        writing.check_place("out")
