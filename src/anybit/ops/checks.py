"""Input checks shared by the CUDA backends, and the problems that their kernels are chosen for."""

import torch
from torch import Tensor

from anybit.choose.builtin import builtin_layout
from anybit.choose.dispatch import dispatcher
from anybit.choose.families import Layout
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.errors import KernelError, dtype_name
from anybit.kernels.linear_problem import LinearProblem
from anybit.ops.backend import LinearSpec
from anybit.scheme import ActivationFormat


def check_input(x: Tensor, weight: Tensor, spec: LinearSpec, bias: Tensor | None = None) -> None:
    """Raise KernelError, naming both values, if x or the bias does not fit the layer and its kernels."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise KernelError(
            f"x is {dtype_name(x.dtype)}, and the kernels take float16 or bfloat16: load the model "
            "with dtype=torch.float16 or torch.bfloat16, or use the reference backend (anybit.use_backend(model, "
            "'reference-decoded'))"
        )
    if x.device != weight.device:
        raise KernelError(f"x is on {x.device}, and the weight was prepared on {weight.device}: move one of them")
    if x.ndim < 1 or x.shape[-1] != spec.k:
        raise KernelError(f"x has shape {tuple(x.shape)}, and the layer takes {spec.k} features in its last dimension")
    if bias is not None:
        if bias.shape != (spec.n,):
            raise KernelError(f"the bias has shape {tuple(bias.shape)}, and the layer has {spec.n} outputs")
        if bias.device != x.device:
            raise KernelError(f"the bias is on {bias.device}, and x is on {x.device}: move one of them")


def copy_of(x: Tensor) -> Tensor:
    """A contiguous copy of x, as the fakes promise: an op must not return its input."""
    return x.clone(memory_format=torch.contiguous_format)


def dense_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias as kernels read it: contiguous, in ``dtype``."""
    if bias is None or (bias.dtype == dtype and bias.is_contiguous()):
        return bias
    return bias.to(dtype).contiguous()


def layout_of(weight: QuantizedWeight, activations: ActivationFormat) -> Layout:
    """The layout for a layer's weights, from the policy map of its GPU; without a map, the built-in one."""
    n, k = weight.shape
    if not weight.words.is_cuda:
        return builtin_layout(LinearProblem(1, n, k, weight.format, activations))
    product = LinearProblem(1, n, k, weight.format, activations, device=Device.of(weight.words))
    return dispatcher(product.device.name).layout(product)
