"""Render a model's chat template in a child process: it is an untrusted program.

transformers runs it in jinja2's sandbox, which blocks file access and Python, but not endless loops or output that
fills the memory.
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
"""Most bytes of a rendered text: about four million tokens."""
MEMORY = 1 << 30
"""Bytes that the child process may allocate beyond this process's size."""


def render(apply: Callable[..., Any], messages: list[dict[str, Any]], name: str, **words: Any) -> str:
    """Render messages to the model's prompt. Raises TextError if the template fails or exceeds a limit.

    apply: a tokenizer's ``apply_chat_template``.  name: the model's, for errors.  words: template variables.
    """
    words |= {"add_generation_prompt": True, "tokenize": False}
    if not hasattr(os, "fork"):
        return _outcome(_answer(apply, messages, words), name)
    with _child(apply, messages, words) as reader, selectors.DefaultSelector() as arrivals:
        arrivals.register(reader, selectors.EVENT_READ)
        answer, end = bytearray(), time.monotonic() + SECONDS
        while True:
            if not arrivals.select(max(0.0, end - time.monotonic())):
                raise TextError(f"the chat template of {name} takes more than {SECONDS:.0f} s: it may loop endlessly")
            part = os.read(reader, 1 << 16)
            if not part:
                return _outcome(bytes(answer), name)
            answer += part
            if len(answer) > LENGTH:
                raise TextError(f"the chat template of {name} renders more than {LENGTH >> 20} MiB")


def _outcome(answer: bytes, name: str) -> str:
    if not answer:
        raise TextError(f"the chat template of {name} needs more than {MEMORY >> 30} GiB of memory")
    text = answer[1:].decode(errors="replace")
    if answer[:1] == b"-":
        raise TextError(f"the chat template of {name} cannot be used: {' '.join(text.split())[:500]}")
    return text


@contextlib.contextmanager
def _child(apply: Callable[..., Any], messages: list[dict[str, Any]], words: dict[str, Any]) -> Iterator[int]:
    """Fork a child that renders the messages. Yields the pipe that it writes to; kills the child on exit."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child takes none of their locks
        child = os.fork()
    if not child:
        try:
            gc.disable()  # the child must not free GPU objects, which belong to the parent
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
    """b"+" and the rendered text, or b"-" and the error; empty if memory ran out."""
    try:
        text: str = apply(messages, **words)
        return b"+" + text.encode()
    except MemoryError:
        return b""
    except Exception as error:  # a template can raise anything
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        return b"-" + f"{kind}{error}".encode(errors="backslashreplace")


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # other systems than Linux only limit the time
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
