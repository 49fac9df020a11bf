"""Render a model's chat template in a child process: it is an untrusted program.

transformers runs it in jinja2's sandbox, which blocks file access and Python, but not endless loops or output that
fills the memory.
"""

import contextlib
import gc
import multiprocessing
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from anybit.errors import TextError

Messages = Sequence[Mapping[str, str]]

SECONDS = 20.0
LENGTH = 16 << 20
"""Most bytes of a rendered text: about four million tokens."""
MEMORY = 1 << 30
"""Bytes that the child process may allocate beyond this process's size."""


def render(apply: Callable[..., str], messages: Messages, name: str) -> str:
    """Render messages to the model's prompt. Raises TextError if the template fails or exceeds a limit.

    apply: a tokenizer's ``apply_chat_template``.  name: the model's, for errors.
    """
    answer = _limited(apply, messages, name) if "fork" in multiprocessing.get_all_start_methods() else None
    answer = _answer(apply, messages) if answer is None else answer
    if not answer:
        raise TextError(f"the chat template of {name} needs more than {MEMORY >> 30} GiB of memory")
    text = answer[1:].decode(errors="replace")
    if answer[:1] == b"-":
        raise TextError(f"the chat template of {name} cannot be used: {' '.join(text.split())[:500]}")
    return text


def _limited(apply: Callable[..., str], messages: Messages, name: str) -> bytes:
    """``_answer``, by a child process."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(writer, apply, messages))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child takes none of their locks
        child.start()
    writer.close()
    try:
        if not reader.poll(SECONDS):
            raise TextError(f"the chat template of {name} takes more than {SECONDS:.0f} s: it may loop endlessly")
        return reader.recv_bytes(LENGTH)
    except EOFError:  # killed for its memory
        return b""
    except OSError:
        raise TextError(f"the chat template of {name} renders more than {LENGTH >> 20} MiB") from None
    finally:
        reader.close()
        child.kill()
        child.join()


def _send(writer: Connection, apply: Callable[..., str], messages: Messages) -> None:
    gc.disable()  # the child must not free GPU objects, which belong to the parent
    with contextlib.suppress(ImportError, OSError, ValueError):  # other systems than Linux only limit the time
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(MemoryError, BrokenPipeError):
        writer.send_bytes(_answer(apply, messages))


def _answer(apply: Callable[..., str], messages: Messages) -> bytes:
    """b"+" and the rendered text, or b"-" and the error; empty if memory ran out."""
    try:
        return b"+" + apply(messages, add_generation_prompt=True, tokenize=False).encode()
    except MemoryError:
        return b""
    except Exception as error:  # a template can raise anything
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        return b"-" + f"{kind}{error}".encode(errors="backslashreplace")
