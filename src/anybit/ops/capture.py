"""CUDA graphs of what a thread launches."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock, _captures, _collects = threading.Lock(), 0, False


@contextmanager
def capture(graph: Any, stream: Any = None) -> Iterator[None]:
    """Record what this thread launches into a ``torch.cuda.CUDAGraph``; other threads may go on as they do.

    Python's garbage collector waits meanwhile: it may find a dead model, and a CUDA graph that is destroyed during a
    capture ends it.
    """
    with without_collector(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's garbage collector from running by itself, until the last thread has left."""
    global _captures, _collects
    with _lock:
        if not _captures:
            _collects = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if not _captures and _collects:
                gc.enable()
