"""Rows of results/, and tables of them."""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def rows(name: str, machine: str = "h200") -> list[Row]:
    """The rows of one results file; [] if it does not exist."""
    path = RESULTS / machine / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def commit() -> str:
    """The measured commit: ``ANYBIT_COMMIT`` if set, else git's. Raises SystemExit where neither tells it."""
    if given := os.environ.get("ANYBIT_COMMIT"):
        return given
    if (ROOT / ".git").exists():  # else git would answer for a repository around this one
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    raise SystemExit(f"{ROOT} is no git checkout, so rows have no commit: set ANYBIT_COMMIT to it")


def origin() -> dict[str, str]:
    """Provenance of a row except its GPU: torch, commit, date."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"torch": metadata.version("torch"), "commit": commit(), "date": date}


def publish(path: Path, text: str) -> None:
    """Write a file atomically: an interrupted run keeps the previous rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other processes of this machine during read-modify-write; the lock file is elsewhere."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"anybit-rows-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def add(path: Path, new: Iterable[Row], key: Sequence[str]) -> None:
    """Add rows to the JSON list at ``path``, each replacing an older one with the same ``key``. Safe for concurrent
    processes.
    """
    with locked(path):
        old = json.loads(path.read_text()) if path.exists() else []
        merged = {json.dumps([row.get(name) for name in key], sort_keys=True): row for row in [*old, *new]}
        publish(path, "[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")


def find(found: Iterable[Row], **wanted: object) -> Row | None:
    """The row with these fields, None if not measured; raises ValueError for several."""
    matching = [row for row in found if all(row.get(name) == value for name, value in wanted.items())]
    if len(matching) > 1:
        raise ValueError(f"{len(matching)} rows have {wanted}; a row is measured once")
    return matching[0] if matching else None


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
