"""Layers with integer activations of 1 to 8 bits on the 1-bit tensor cores: quantize-and-pack, then the GEMM."""

import torch
from torch import Tensor

from anybit.choose.families import Layout
from anybit.codes.packing import QuantizedWeight, pack_words
from anybit.device import Device
from anybit.kernels.bitplane import bitplane, bitplane_layout, bitplane_problem
from anybit.kernels.linear_problem import LinearProblem
from anybit.ops.backend import Backend, LinearSpec
from anybit.ops.checks import layout_of
from anybit.scheme import ActivationFormat


class Bitwise(Backend):
    """Weights in bit planes, activations quantized and packed per call; sm_80 to sm_90.

    wgmma on sm_90a, else mma.sync (kernels/bitplane/bitplane.py).
    """

    name = "bitwise"
    unasked = ("cuda",)
    codes = True
    planes = True

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why no kernel runs this layer on its device, as a sentence; None if one does."""
        if not activations.quantized:
            return "it needs quantized activations, and these have 16 bits"
        if weight.device.type != "cuda":
            return f"its kernels need a CUDA device, and the weight is on {weight.device}"
        n, k = weight.shape
        return why_not(n, k, weight, activations, Device.of(weight.words))

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """0 if the policy map (without one: the built-in choice) picks bit planes for this layer, else 2."""
        return 0 if layout_of(weight, activations) is Layout.planes else 2

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """Planes, float32 scales, corrections and zero points; then the original scale and group index, for restore."""
        ready = bitplane_layout.prepare(weight)
        empty = torch.empty(0, dtype=torch.int32, device=weight.device)
        zero = empty if ready.zero is None else ready.zero
        group_index = empty if weight.group_index is None else weight.group_index
        return [ready.planes, ready.scale, ready.correction, zero, weight.scale, group_index]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        stored, _, _, zero, scale, group_index = tensors
        codes = bitplane_layout.unpack(stored, spec.n, spec.k)
        return QuantizedWeight(
            pack_words(codes, spec.weights.bits),
            scale,
            zero.to(torch.uint8)[:, None] if zero.numel() else None,
            (spec.n, spec.k),
            spec.weights,
            group_index if group_index.numel() else None,
        )


def why_not(
    n: int, k: int, weight: QuantizedWeight, activations: ActivationFormat, device: Device, m: int = 1
) -> str | None:
    """Why no bit-plane kernel multiplies m x k activations with an n x k weight on ``device``; None if one does."""
    ordered = weight.group_index is not None and weight.format.group is not None
    problem = LinearProblem(m, n, k, weight.format, activations, device=device, act_order=ordered)
    reason = bitplane_problem.why_not(problem, 80)
    if reason is None and bitplane.family(problem) is None:
        reason = f"no tile of its bit planes fits the shared memory of {device.arch}"
    return reason
