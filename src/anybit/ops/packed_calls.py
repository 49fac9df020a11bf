"""Cached calls of packed layers: launches with all parameters but addresses precomputed (``call_cache``)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, uint8

from anybit import jit
from anybit.device import Device
from anybit.jit.tensor_map import encode_at
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem
from anybit.kernels.packed.packed_layout import TILE_ROWS, PackedWeight, check_operands
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.ops.backend import CachedCall
from anybit.ops.prologue import ActivationPrologue
from anybit.scheme import ActivationFormat

Product = Callable[[int, list[Tensor], int, int, int, int], None]
"""Launches y = x W^T + bias, given (address of x, prepared weight, addresses of x's scales, x's sums, bias, y); 0 for
operands that do not exist."""


def call_16bit(
    rows: Tensor, shape: tuple[int, ...], weight: PackedWeight, bias: Tensor | None, kernel: Any, config: Any,
    silu: bool,
) -> CachedCall:  # fmt: skip
    """A cached ``linear`` (silu: ``linear_silu``) for 16-bit rows [m, k] like these; y has ``shape``."""
    multiply = _product(rows, weight, bias, rows.new_empty(len(rows), shape[-1]), kernel, config, silu)

    def linear(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
        y = x.new_empty(shape)
        multiply(x.data_ptr(), tensors, 0, 0, 0 if bias is None else bias.data_ptr(), y.data_ptr())
        return y

    return linear


def call_quantized(
    prologue: ActivationPrologue, shape: tuple[int, ...], weight: PackedWeight, bias: Tensor | None, kernel: Any,
    config: Any, quantizer: quantize_activations.Config, activations: ActivationFormat, silu: bool,
) -> CachedCall:  # fmt: skip
    """The same with quantized activations, and ``prologue`` fused into their quantization.

    With a residual, the call also takes gamma and the residual and returns (y, x + residual).
    """
    rows, k = prologue.rows, weight.shape[1]
    codes = Packed(len(rows), k, activations, Target.bytes, rows.device)
    problem = prologue.problem(activations, Target.bytes)
    quantize = jit.cached_launch(
        quantize_activations.kernel(quantizer), prologue.arguments(problem, quantizer, codes),
        quantize_activations.grid(problem, quantizer),
        ("x", "codes", "scale", "sum", "zero", "gamma", "residual", "residual_sum"), pdl=True, device=rows.get_device(),
    )  # fmt: skip
    multiply = _product(codes, weight, bias, rows.new_empty(len(rows), shape[-1]), kernel, config, silu)
    size, base = codes.buffer.numel(), codes.buffer.data_ptr()
    _, scale_at, sum_at, zero_at = (address and address - base for address in codes.addresses)

    def launch(x: Tensor, tensors: list[Tensor], bias: Tensor | None, gamma: int, residual: int, total: int) -> Tensor:
        y, room = x.new_empty(shape), x.new_empty(size, dtype=uint8)
        base = room.data_ptr()
        scale, sums = base + scale_at, sum_at and base + sum_at
        quantize(x.data_ptr(), base, scale, sums, zero_at and base + zero_at, gamma, residual, total)
        multiply(base, tensors, scale, sums, 0 if bias is None else bias.data_ptr(), y.data_ptr())
        return y

    def linear(x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
        return launch(x, tensors, bias, 0, 0, 0)

    def norm_linear(
        x: Tensor, tensors: list[Tensor], bias: Tensor | None, gamma: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = x.new_empty(x.shape)
        return launch(x, tensors, bias, gamma.data_ptr(), residual.data_ptr(), total.data_ptr()), total

    return linear if prologue.residual is None else norm_linear


def _product(
    x: Tensor | Packed, weight: PackedWeight, bias: Tensor | None, y: Tensor, kernel: Any, config: Any, silu: bool
) -> Product:
    if kernel is sm90_packed_gemm:
        return _large_product(x, weight, bias, y, config, silu)
    scale, rows = (None, x) if isinstance(x, Tensor) else (x.scale, x.codes[:, : x.k])
    problem = packed_problem.checked_problem(weight, rows, y, scale, bias, silu * y.shape[1])
    again = jit.cached_launch(
        kernel.kernel(config, silu) if silu else kernel.kernel(config),
        packed_problem.arguments(weight, rows, y, scale, bias), kernel.grid(problem, config),
        ("tiles", "row_scale", "row_zero", "x", "x_scale", "bias", "y"), pdl=True, device=y.get_device(),
    )  # fmt: skip

    def multiply(x: int, tensors: list[Tensor], scale: int, sums: int, bias: int, y: int) -> None:
        tiles, row_scale, row_zero = tensors[:3]
        again(tiles.data_ptr(), row_scale.data_ptr(), row_zero.data_ptr(), x, scale, bias, y)

    return multiply


def _large_product(
    x: Tensor | Packed, weight: PackedWeight, bias: Tensor | None, y: Tensor, config: Any, silu: bool
) -> Product:
    activations, rows, scale, total = (
        (ActivationFormat(), x, None, None) if isinstance(x, Tensor) else (x.format, x.codes[:, : x.k], x.scale, x.sum)
    )
    check_operands(weight, rows, y, scale, bias, silu * y.shape[1], ordered=True)
    (m, k), n, size = rows.shape, weight.shape[0], rows.element_size()
    problem = LinearProblem(m, n, k, weight.format, activations, y.dtype, Device.of(y))
    changing = ("tiles", "row_scale", "row_zero", "x", "x_tail", "x_scale", "x_sum", "bias", "y")
    again = jit.cached_launch(
        sm90_packed_gemm.kernel(config, silu),
        sm90_packed_gemm.params(problem, config, None, weight, y, bias, scale, total),
        sm90_packed_gemm.grid(problem, config), (*changing, *(("y_map",) if config.tensor_store else ())), pdl=True,
        device=y.get_device(),
    )  # fmt: skip
    shape, boxes = (size, m, k, rows.stride(0) * size), sm90_packed_gemm.boxes(config, size)
    stored = (2, m, n, 2 * n, TILE_ROWS, config.tile_m) if config.tensor_store else None
    maps: dict[int, list[bytes]] = {}  # the allocator reuses few addresses

    def multiply(x: int, tensors: list[Tensor], scale: int, sums: int, bias: int, y: int) -> None:
        found = maps.get(x)
        if found is None:
            if len(maps) >= 16:
                maps.clear()
            found = maps[x] = [encode_at(x, *shape, *box) for box in boxes]
        tiles, row_scale, row_zero = tensors[:3]
        addresses = tiles.data_ptr(), row_scale.data_ptr(), row_zero.data_ptr()
        again(*addresses, *found, scale, sums, bias, y, *(() if stored is None else (encode_at(y, *stored),)))

    return multiply
