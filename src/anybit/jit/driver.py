"""The CUDA driver's functions, found when a kernel is to be launched and not before."""

import ctypes
from functools import cache
from typing import Any

from anybit.errors import KernelError


@cache
def driver() -> Any:
    """cuda-bindings' module of them. Raises KernelError where it is not installed."""
    try:
        from cuda.bindings import driver as found
    except ImportError as error:
        raise KernelError("launching a kernel needs cuda-bindings: pip install 'anybit[cuda]'") from error
    return found


def checked(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver returned beside its status. Raises KernelError, saying what failed, for an error."""
    status, *values = result
    if status:
        raise KernelError(f"{what} failed: {status.name}")
    return values[0] if values else None


def capture_of(stream: int) -> int:
    """The number of the graph capture that a stream takes part in, another one for each capture; 0 where none does."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    # Not by cuda-bindings, which asks for dependencies, too: some versions fail where kernels overlap (LOSSY_QUERY).
    given = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    if error := _libcuda().cuStreamGetCaptureInfo_v2(*given):
        raise KernelError(f"asking for the capture of a stream failed: CUDA error {error}")
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")
