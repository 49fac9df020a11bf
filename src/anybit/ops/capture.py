"""CUDA graph capture of one thread's launches."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock, _captures, _collects = threading.Lock(), 0, False


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, pool: Any = None) -> Iterator[None]:
    """Capture this thread's launches into a ``torch.cuda.CUDAGraph``; other threads may keep launching.

    pool: memory that it shares with graphs which never run at the same time (``torch.cuda.graph_pool_handle``).
    Python's garbage collector is disabled meanwhile: it may collect a dead model, and destroying that model's CUDA
    graphs would invalidate the capture.
    """
    with without_collector(), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's automatic garbage collection until the last thread has left this context."""
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
