"""Files that tests keep between runs: built once, and bounded."""

import os
from pathlib import Path

import pytest

import kept


def test_kept_files_are_built_once_and_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    made = []

    def build(target: Path) -> None:
        made.append(target.name)
        target.with_name("scratch").write_bytes(b"beside it")
        target.write_bytes(100 * b"x")

    for name in ("one.so", "two/header.gch", "three.so"):
        assert kept.built(name, build).read_bytes() == 100 * b"x"
        os.utime(tmp_path / name, (1, len(made)))
    kept.built("one.so", build)
    assert made == ["one.so", "header.gch", "three.so"]
    kept.prune(250)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in left if not name.endswith(".lock")} == {"one.so", "three.so"}
    assert kept.digest(b"ab", b"c") != kept.digest(b"a", b"bc")
