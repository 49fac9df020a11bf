"""A model's chat template, rendered in a process of its own: it is a program from a file, and may be a bad one.

transformers runs it in jinja2's sandbox, which keeps it from files and from Python, but not from loops that do not end
or texts that fill the memory.
"""

import contextlib
import gc
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from anybit.errors import TextError

SECONDS = 20.0
LENGTH = 16 << 20
"""The most bytes of a rendered text, some four million tokens."""
MEMORY = 1 << 30
"""What the template's process may take beyond what this one has."""


def render(apply: Callable[..., Any], messages: list[dict[str, Any]], name: str, **words: Any) -> str:
    """Messages as the text that a model continues. Raises TextError where its template fails, or takes too much.

    apply: a tokenizer's ``apply_chat_template``.  name: of the model.  words: what else the template is given.
    """
    words |= {"add_generation_prompt": True, "tokenize": False}
    if not hasattr(os, "fork"):
        return _outcome(_answer(apply, messages, words), name)
    with _child(apply, messages, words) as reader, selectors.DefaultSelector() as arrivals:
        arrivals.register(reader, selectors.EVENT_READ)
        answer, end = bytearray(), time.monotonic() + SECONDS
        while True:
            if not arrivals.select(max(0.0, end - time.monotonic())):
                raise TextError(f"the chat template of {name} takes more than {SECONDS:.0f} s: it may have no end")
            part = os.read(reader, 1 << 16)
            if not part:
                return _outcome(bytes(answer), name)
            answer += part
            if len(answer) > LENGTH:
                raise TextError(f"the chat template of {name} makes a text of more than {LENGTH >> 20} MiB")


def _outcome(answer: bytes, name: str) -> str:
    if not answer:
        raise TextError(f"the chat template of {name} needs more than {MEMORY >> 30} GiB of memory")
    text = answer[1:].decode(errors="replace")
    if answer[:1] == b"-":
        raise TextError(f"the chat template of {name} cannot be used: {' '.join(text.split())[:500]}")
    return text


@contextlib.contextmanager
def _child(apply: Callable[..., Any], messages: list[dict[str, Any]], words: dict[str, Any]) -> Iterator[int]:
    """A process that renders, and what it writes; it ends with the context."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child touches no lock of theirs
        child = os.fork()
    if not child:
        try:
            gc.disable()  # what this process holds on a GPU is the other one's
            _limit_memory()
            with os.fdopen(writer, "wb") as answer:
                answer.write(_answer(apply, messages, words))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(apply: Callable[..., Any], messages: list[dict[str, Any]], words: dict[str, Any]) -> bytes:
    """The rendered text behind a plus, or what went wrong behind a minus."""
    try:
        text: str = apply(messages, **words)
        return b"+" + text.encode()
    except MemoryError:
        return b""
    except Exception as error:  # a template can fail in any way
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        return b"-" + f"{kind}{error}".encode(errors="backslashreplace")


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # elsewhere than on Linux the time is the limit
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
