"""The CUDA driver's functions, found when a kernel is to be launched and not before."""

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
