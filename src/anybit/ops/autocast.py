"""Ops under ``torch.autocast``: float32 activations become its type, as those of ``nn.Linear`` do, and then it ends.

What is inside an op has types of its own: a reference whose sums autocast rounded would be no reference.
"""

from typing import Any

import torch
from torch import Tensor


def under_autocast(library: torch.library.Library, *names: str) -> None:
    """Give ops of a library, by name, a kernel for autocast; their first argument is the activations."""
    for name in names:
        op = getattr(torch.ops.anybit, name)
        for device in ("cpu", "cuda"):
            library.impl(name, _outside(op, device), f"Autocast{device.upper()}")


def _outside(op: Any, device: str) -> Any:
    def run(x: Tensor, *rest: Any) -> Any:
        wanted = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return op(x.to(wanted) if x.dtype == torch.float32 else x, *rest)

    return run
