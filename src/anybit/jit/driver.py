"""The CUDA driver API, loaded at the first launch."""

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from anybit.errors import KernelError


def driver() -> ModuleType:
    """The driver module of cuda-bindings. Raises KernelError if it is not installed."""
    try:
        from cuda.bindings import driver as loaded
    except ImportError as error:
        raise KernelError("launching a kernel needs cuda-bindings: pip install 'anybit[cuda]'") from error
    found: ModuleType = loaded
    return found


def checked(result: Sequence[Any], what: str) -> Any:
    """The value of a driver call besides its status. Raises KernelError, naming ``what``, for an error status."""
    status, *values = result
    if status:
        raise KernelError(f"{what} failed: {status.name}")
    return values[0] if values else None


def capture_of(stream: int) -> int:
    """The unique id of the graph capture that a stream is part of; 0 if it is not capturing."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    # Not through cuda-bindings, which also queries dependencies: with PDL some versions then fail with LOSSY_QUERY.
    given = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    if error := ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(*given):
        raise KernelError(f"asking for the capture of a stream failed: CUDA error {error}")
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE
