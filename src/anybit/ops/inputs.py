"""What every CUDA backend asks of its input, and how token counts are bucketed."""

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.ops.backend import LinearSpec


def check_input(x: Tensor, weight: Tensor, spec: LinearSpec) -> None:
    """Raise KernelError, naming both values, for an input that no kernel can take."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise KernelError(
            f"x is {str(x.dtype).removeprefix('torch.')}, and the kernels take float16 or bfloat16: cast the model, or "
            "use the reference backend (anybit.use_backend(model, 'reference-decoded'))"
        )
    if x.device != weight.device:
        raise KernelError(f"x is on {x.device}, and the weight was prepared on {weight.device}: move one of them")
    if x.ndim < 1 or x.shape[-1] != spec.k:
        raise KernelError(f"x has shape {tuple(x.shape)}, and the layer takes {spec.k} features in its last dimension")


def token_bucket(tokens: int) -> int:
    """The bucket of a number of tokens: the next power of two."""
    return 1 << (tokens - 1).bit_length()
