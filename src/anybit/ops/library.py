"""Definition of torch.library ops: schema, fake, and an implementation per device."""

from collections.abc import Callable

import torch

Function = Callable[..., object]
COMPLIANT = (torch.Tag.pt2_compliant_tag,)


def define(
    library: torch.library.Library, signature: str, fake: Function, cpu: Function, cuda: Function | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:  # fmt: skip
    """Define an op of anybit. fake: the meta implementation.  cuda: the implementation on GPUs; None: ``cpu``."""
    library.define(signature, tags=tags)
    name = signature.partition("(")[0]
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda or cpu, "CUDA")
    torch.library.register_fake(f"anybit::{name}", fake)
