"""Calls of a packed layer that are like one before: launches whose parameters are known but for addresses."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, uint8

from anybit import jit
from anybit.device import Device
from anybit.jit.tensor_map import encode_at
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.elementwise.quantize_activations import Packed, Target
from anybit.kernels.gemm import packed_problem, sm90_packed_gemm
from anybit.kernels.gemm.packed_layout import PackedWeight
from anybit.ops.backend import Repeated
from anybit.scheme import ActivationFormat

Product = Callable[[int, int, int, int, int], None]
"""Launches y = x W^T + bias, given the addresses of x, its scales and sums, the bias and y; 0 for what is not there."""


def plain(
    rows: Tensor, shape: tuple[int, ...], weight: PackedWeight, bias: Tensor | None, kernel: Any, config: Any
) -> Repeated:
    """``linear`` for 16-bit rows [m, k] like these, that a kernel of packed weights took; y has ``shape``."""
    multiply = _product(rows, weight, bias, rows.new_empty(len(rows), weight.shape[0]), kernel, config)

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(shape)
        multiply(x.data_ptr(), 0, 0, 0 if bias is None else bias.data_ptr(), y.data_ptr())
        return y

    return linear


def coded(
    rows: Tensor, shape: tuple[int, ...], weight: PackedWeight, bias: Tensor | None, kernel: Any, config: Any,
    quantizer: quantize_activations.Config, activations: ActivationFormat,
) -> Repeated:  # fmt: skip
    """The same with activations that are quantized first."""
    codes = Packed(len(rows), rows.shape[1], activations, Target.bytes, rows.device)
    problem = quantize_activations.problem_of(rows, activations, Target.bytes)
    quantize = jit.repeated(
        quantize_activations.kernel(quantizer), quantize_activations.arguments(problem, quantizer, codes, rows),
        quantize_activations.grid(problem, quantizer), ("x", "codes", "scale", "sum", "zero"), pdl=True,
        device=rows.get_device(),
    )  # fmt: skip
    multiply = _product(codes, weight, bias, rows.new_empty(len(rows), weight.shape[0]), kernel, config)
    size, base = codes.buffer.numel(), codes.buffer.data_ptr()
    _, scale_at, sum_at, zero_at = (address and address - base for address in codes.addresses)

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        y, room = x.new_empty(shape), x.new_empty(size, dtype=uint8)
        base = room.data_ptr()
        scale, total = base + scale_at, sum_at and base + sum_at
        quantize(x.data_ptr(), base, scale, total, zero_at and base + zero_at)
        multiply(base, scale, total, 0 if bias is None else bias.data_ptr(), y.data_ptr())
        return y

    return linear


def _product(
    x: Tensor | Packed, weight: PackedWeight, bias: Tensor | None, y: Tensor, kernel: Any, config: Any
) -> Product:
    if kernel is sm90_packed_gemm:
        return _large_product(x, weight, bias, y, config)
    scale, rows = (None, x) if isinstance(x, Tensor) else (x.scale, x.codes[:, : x.k])
    again = jit.repeated(
        kernel.kernel(config), packed_problem.arguments(weight, rows, y, scale, bias),
        kernel.grid(packed_problem.checked_problem(weight, rows, y, scale, bias), config),
        ("x", "x_scale", "bias", "y"), pdl=True, device=y.get_device(),
    )  # fmt: skip

    def multiply(x: int, scale: int, total: int, bias: int, y: int) -> None:
        again(x, scale, bias, y)

    return multiply


def _large_product(x: Tensor | Packed, weight: PackedWeight, bias: Tensor | None, y: Tensor, config: Any) -> Product:
    activations, rows, scale, total = (
        (ActivationFormat(), x, None, None) if isinstance(x, Tensor) else (x.format, x.codes[:, : x.k], x.scale, x.sum)
    )
    (m, k), size = rows.shape, rows.element_size()
    problem = sm90_packed_gemm.Problem(m, y.shape[1], k, weight.format, activations, y.dtype, Device.of(y))
    again = jit.repeated(
        sm90_packed_gemm.kernel(config),
        sm90_packed_gemm.params(problem, config, rows, weight, y, bias, scale, total),
        sm90_packed_gemm.grid(problem, config), ("x", "x_tail", "x_scale", "x_sum", "bias", "y"), pdl=True,
        device=y.get_device(),
    )  # fmt: skip
    shape, boxes = (size, m, k, rows.stride(0) * size), sm90_packed_gemm.boxes(config, size)
    maps: dict[int, list[bytes]] = {}  # memory is handed out at a few addresses again and again

    def multiply(x: int, scale: int, total: int, bias: int, y: int) -> None:
        found = maps.get(x)
        if found is None:
            if len(maps) >= 64:
                maps.clear()
            found = maps[x] = [encode_at(x, *shape, *box) for box in boxes]
        again(*found, scale, total, bias, y)

    return multiply
