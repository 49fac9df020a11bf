"""Which kernel and config runs a product: the space of them, the search, the maps it writes, and the look-up."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``dispatcher``, the earlier name of ``dispatch``, which programs may still use."""
    if name == "dispatcher":
        from anybit.tune import dispatch

        return dispatch
    raise AttributeError(f"module 'anybit.tune' has no attribute {name!r}")
