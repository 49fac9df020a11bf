"""Shared by the commands: consoles, progress bars, sizes as text.

Command modules import torch and transformers inside the functions that need them, so that help and usage errors are
immediate.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from anybit.errors import SchemeError, duration, printable
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from anybit.hf.loading import Loaded


class _StandardOutput:
    """The current sys.stdout, with "standard output" as the file name of its OSErrors."""

    def write(self, text: str) -> int:
        """Write text."""
        with _named():
            return sys.stdout.write(text)

    def flush(self) -> None:
        """Flush sys.stdout."""
        with _named():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stdout, name)


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise


class _Console(Console):
    """A console that prints strings as they are, but for control characters (of names from files, for example)."""

    def print(self, *objects: Any, **more: Any) -> None:
        """Print strings, in which only newlines and tabs are not escaped, and other objects."""
        if all(isinstance(one, str) for one in objects):
            more = {"markup": False, "soft_wrap": True, **more}
        super().print(*(printable(o, "\n\t") if isinstance(o, str) else o for o in objects), **more)


stdout = cast(IO[str], _StandardOutput())
# Results go to stdout; progress, notes and errors go to stderr, so that stdout can be piped.
# No emoji: rich would replace text such as :cat: in paths, model output and JSON.
output = _Console(file=stdout, soft_wrap=True, highlight=False, emoji=False)
errors = _Console(stderr=True, highlight=False, emoji=False)


def overrides_of(words: list[str] | None) -> dict[str, str]:
    """Schemes by layer from ``--override`` options. Raises SchemeError for anything but LAYER=SCHEME."""
    if not words:
        return {}
    from anybit.checkpoints.configuration import parse_overrides

    found: dict[str, str] = {}
    for word in words:
        layer, equals, scheme = (part.strip() for part in word.rpartition("="))
        if not layer or not equals:
            raise SchemeError(f"--override {word!r} is not understood: write LAYER=SCHEME, such as lm_head=w8a16")
        found.pop(layer, None)  # the last one wins, at its own position
        found[layer] = scheme
    try:
        return {layer: str(scheme) for layer, scheme in parse_overrides(found).items()}
    except SchemeError as error:
        raise SchemeError(f"--override {error}") from None


def loader(
    scheme: str | None, override: list[str] | None, backend: str | None, device: str | None, trust_remote_code: bool,
    dequantize: bool = False, width: int | None = None,
) -> "Callable[[str], Loaded]":  # fmt: skip
    """What loads a model as a command's options say.

    Raises SchemeError for options that are not understood, before a library is imported.
    """
    parsed, overrides = None if scheme is None else Scheme.parse(scheme), overrides_of(override)

    def load(model: str) -> "Loaded":
        from anybit.hf.loading import load_model

        with status(f"Loading {model}" + (f" in {parsed}" if parsed else "")):
            return load_model(
                model, parsed, overrides=overrides, backend=backend, device=device,
                trust_remote_code=trust_remote_code, dequantize=dequantize, width=width,
            )  # fmt: skip

    return load


def in_short(schemes: Iterable[object]) -> str | None:
    """The schemes of layers, the most frequent first: "w4a16g128, 36 layers w3a16g128"; None without layers."""
    found = Counter(map(str, schemes)).most_common()
    others = [f"{count} layer{'s' * (count > 1)} {scheme}" for scheme, count in found[1:]]
    return ", ".join([found[0][0], *others]) if found else None


def print_json(value: Mapping[str, object]) -> None:
    """Print an object on stdout as JSON; infinities and NaN become null."""
    output.print(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        output.print("  ".join(cells).rstrip())


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def megabytes(count: float) -> str:
    """A number of bytes as text, in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


_SAY_SECONDS = 30.0


class Update(Protocol):
    """Reports progress; ``left``: seconds, if known better than from ``done`` and ``total``."""

    def __call__(self, text: str, done: int, total: int, left: float | None = None) -> None:
        """Show what was done last, and how much is done; with nothing done yet, say in a line what begins."""


@contextmanager
def progress_bar(what: str, counted: bool = False) -> Iterator[Update]:
    """Show a progress bar on stderr, or, where that is no terminal, a line every 30 s."""
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
    if counted:
        columns.insert(2, MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        began = said = last = time.monotonic()
        whole, before = -1, 0  # a task may have several parts, each with a total of its own

        def update(text: str, done: int, total: int, left: float | None = None) -> None:
            nonlocal began, said, last, whole, before
            bars.update(task, description=printable(text or what), completed=done, total=total)
            now = time.monotonic()
            if total != whole or done < before:
                began = last
            if not done and left is None:
                errors.print(text)
                said = now
            elif not errors.is_terminal and now - said >= _SAY_SECONDS:
                left = (now - began) * (total - done) / done if left is None else left
                share = f"{done} of {total}" if counted else f"{done / total:.0%}"
                shown = "" if math.isnan(left) else f", {duration(left)} left"
                errors.print(f"{share}: {text or what}{shown}")
                said = now
            last, whole, before = now, total, done

        yield update


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a status line while the context is active, and silence transformers' logs and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not errors.is_terminal:  # a file or pipe would get an empty line
        yield
        return
    with errors.status(Text(printable(what))):
        yield
