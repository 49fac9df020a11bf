"""Which kernel and config runs a GEMM: the search space, the search, the policy maps it writes, and their lookup."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``dispatcher``: the former name of ``dispatch``, kept for compatibility."""
    if name == "dispatcher":
        from anybit.choose import dispatch

        return dispatch
    raise AttributeError(f"module 'anybit.tune' has no attribute {name!r}")
