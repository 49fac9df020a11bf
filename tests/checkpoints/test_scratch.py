"""Scratch folders: locked while their process lives, and removed by the next run if it was killed."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anybit.checkpoints import scratch
from anybit.checkpoints.scratch import PREFIX, REPLACED, Scratch, replace_file, sweep
from anybit.checkpoints.writing import new_folder

HOLD = """
import sys
from pathlib import Path
from anybit.checkpoints.scratch import Scratch
held = Scratch(Path(sys.argv[1]))
(held.path / "half").write_text("half")
old = held.path / "replaced" / "model"
old.mkdir(parents=True)
(old / "config.json").write_text("whole")
print(held.path, flush=True)
input()
"""


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_scratch_goes_when_it_is_closed_or_nobody_holds_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Scratch(tmp_path) as path:
        (path / "half").mkdir()
        assert path.stat().st_mode & 0o777 == 0o700
        raise KeyError
    held = Scratch(tmp_path)
    assert len(left(tmp_path)) == 1
    del held
    gc.collect()
    assert left(tmp_path) == []


def test_ctrl_c_during_the_removal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shutil.rmtree

    def interrupted(path: Path, **_: bool) -> None:
        monkeypatch.setattr(shutil, "rmtree", whole)
        (path / "first").unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Scratch(tmp_path) as path:
        (path / "first").touch()
        (path / "second").touch()
        monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert left(tmp_path) == []


def test_what_was_replaced_is_not_restored_once_its_removal_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    for text in ("old", "new"):
        with new_folder(tmp_path / "model", overwrite=True) as work:
            (work / "config.json").write_text('{"model_type": "llama"}')
            (work / "LICENSE").write_text(text)
            if text == "new":
                monkeypatch.setattr(shutil, "rmtree", lambda path, **_: found.append(left(path / REPLACED)))
    assert found[0] == []
    assert (tmp_path / "model" / "LICENSE").read_text() == "new"


def test_ctrl_c_while_a_folder_is_renamed_away_brings_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        path.rename(target)
        raise KeyboardInterrupt

    with new_folder(tmp_path / "model") as work:
        (work / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model", overwrite=True) as work:
        monkeypatch.setattr(Path, "rename", interrupted)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").is_file()


def test_sweep_removes_what_a_killed_run_left_and_restores_what_it_replaced(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    sweep(tmp_path)
    assert (path / "half").exists()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left(tmp_path) == [path.name]
    with Scratch(tmp_path):
        pass
    assert left(tmp_path) == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "whole"


def test_a_newer_folder_is_not_replaced_by_an_old_one(tmp_path: Path) -> None:
    old = tmp_path / f"{PREFIX}abc" / REPLACED / "model"
    old.mkdir(parents=True)
    (tmp_path / "model").symlink_to(tmp_path / "nowhere")
    sweep(tmp_path)
    assert left(tmp_path) == ["model"]
    assert (tmp_path / "model").is_symlink()


def test_only_own_folders_of_that_name_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years of work")
    place = tmp_path / "place"
    place.mkdir()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").write_text("of somebody")
    os.mkfifo(place / f"{PREFIX}fifo")
    (place / ".unfinished-business").mkdir()
    before = left(place)
    sweep(place)
    assert left(place) == before
    assert left(elsewhere) == ["thesis.tex"]
    (place / f"{PREFIX}other").mkdir()
    monkeypatch.setattr(scratch.os, "getuid", lambda: os.geteuid() + 1)
    sweep(place)
    assert (place / f"{PREFIX}other").exists()


def test_a_file_system_without_locks_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{PREFIX}abc").mkdir()

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    with Scratch(tmp_path) as path:
        assert len(left(tmp_path)) == 2
        assert path.is_dir()
    assert left(tmp_path) == [f"{PREFIX}abc"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    replace_file(file, lambda work: work.write_text("one"))

    def half(work: Path) -> None:
        work.write_text("tw")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(file, half)
    assert file.read_text() == "one"
    assert left(tmp_path) == ["config.json"]
