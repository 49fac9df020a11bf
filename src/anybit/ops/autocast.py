"""Ops under ``torch.autocast``: float32 activations are cast to its dtype, as for ``nn.Linear``.

Autocast is disabled inside the op: the reference must not have its sums rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def under_autocast(library: torch.library.Library, *names: str) -> None:
    """Register autocast kernels for ops of a library, by name; their first argument must be the activations."""
    for name in names:
        op = getattr(torch.ops.anybit, name)
        for device in ("cpu", "cuda"):
            library.impl(name, _outside(op, device), f"Autocast{device.upper()}")


def _outside(op: Callable[..., object], device: str) -> Callable[..., object]:
    def run(x: Tensor, *rest: object) -> object:
        wanted = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return op(x.to(wanted) if x.dtype == torch.float32 else x, *rest)

    return run
