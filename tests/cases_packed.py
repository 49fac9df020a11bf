"""Random products of packed weights for tests of all their kernels: weights, activations, expected results."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import emulate
from anybit.codes.packing import QuantizedWeight, table_of
from anybit.device import Device
from anybit.kernels.gemm_kernel import C, GemmKernel, Operands
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply
from anybit.kernels.packed import packed_problem, packed_tiles, sparse_layout
from anybit.kernels.packed.packed_layout import TILE_COLUMNS, PackedWeight, code_bytes, subgroups, tile_group
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import random_codes, random_weight

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Maximum mean relative error of a product with 16-bit activations."""


FOREIGN = tuple(
    Scheme.parse(word).weights
    for word in (
        "w4a16g32min", "w2a16g16min", "w8a16g64min", "w4a16min", "w3a16g16", "w6a16g16", "w4a16g32e2m1", "w4a16g16e2m1",
        "w4a16g64nf4", "w4a16g32iq4", "w8a16e4m3", "w8a16g128e4m3",
    )
)  # fmt: skip
"""Formats that other tools write: float minima, groups of 16, lookup tables."""


HOPPER = Device.named("sm_90a")


def scheme_of(format: WeightFormat) -> str:
    """The format as part of a test's name."""
    return str(Scheme(format))


@dataclass(frozen=True)
class PackedCase:
    """y = x W^T + bias on one device; `expected` is float64, from the weight before repacking."""

    packed: PackedWeight
    x: Tensor
    x_scale: Tensor | None
    bias: Tensor | None
    expected: Tensor

    @property
    def output(self) -> torch.dtype:
        """The dtype of y: that of x, or float16 with int8 activations."""
        return self.x.dtype if self.x.is_floating_point() else torch.float16

    def empty(self) -> Tensor:
        """An output buffer, filled with NaN."""
        return torch.full(self.expected.shape, torch.nan, dtype=self.output, device=self.x.device)

    def error(self, y: Tensor) -> float:
        """Mean relative error of y."""
        return float((y.double() - self.expected).abs().mean() / self.expected.abs().mean().clamp(min=1e-6))


def problem(
    m: int, n: int, k: int, format: WeightFormat, dtype: torch.dtype, device: Device = HOPPER, **more: Any
) -> LinearProblem:
    """The problem with 16-bit activations of a dtype, or with int8 ones and float16 outputs."""
    coded = dtype == torch.int8
    x, output = (ActivationFormat(8, "sym"), torch.float16) if coded else (ActivationFormat(), dtype)
    return LinearProblem(m, n, k, format, x, output, device, **more)


def act_order(weight: QuantizedWeight, generator: torch.Generator) -> QuantizedWeight:
    """The same layer with its columns' groups shuffled, if it has groups."""
    group, k = weight.format.group, weight.shape[1]
    if group is None:
        return weight
    index = (torch.arange(k) // group)[torch.randperm(k, generator=generator)].to(torch.int32)
    return replace(weight, group_index=index)


def product(
    format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, ordered: bool = False,
    bias: bool = False, seed: int = 0, device: str = "cpu",
) -> PackedCase:  # fmt: skip
    """A random product. dtype: of the activations; int8 ones have a scale per token. ordered: with activation order."""
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(n, k, format, seed)
    if ordered:
        weight = act_order(weight, generator)
    packed = packed_tiles.prepare(weight.to(device), "a8" if dtype == torch.int8 else "a16")
    scale = None
    if dtype == torch.int8:
        x = random_codes((m, k), 8, seed + 3).to(torch.int16).sub(128).clamp(-127, 127).to(torch.int8)
        scale = torch.rand(m, generator=generator) / 100 + 0.001
        exact = x.double() * scale.double()[:, None]
    else:
        x = torch.randn(m, k, generator=generator).to(dtype)
        exact = x.double()
    expected = exact.to(device) @ weight.dequantize(torch.float64).to(device).T
    b = torch.randn(n, generator=generator).to(dtype if dtype.is_floating_point else torch.float16) if bias else None
    if b is not None:
        b = b.to(device)
        expected = expected + b.double()
    return PackedCase(packed, x.to(device), None if scale is None else scale.to(device), b, expected)


def check_emulated(
    kernel: GemmKernel[C], case: PackedCase, make: Callable[[LinearProblem], C] | None = None, seed: int = 0,
    **changes: Any,
) -> None:  # fmt: skip
    """A product of few tokens on the emulator, by the config of ``make`` (default: the kernel's own) with changes."""
    dtype, size = case.x.dtype, case.x.element_size()
    problem = packed_problem.problem_of(case.packed, len(case.x), dtype, case.output, replace(HOPPER, sms=2))
    problem = replace(problem, aligned=case.x.shape[1] * size % 16 == 0)
    config: Any = replace((make or kernel.default)(problem), **changes)  # type: ignore[type-var]
    assert kernel.why_not(problem, config) is None
    y = case.empty()
    params = packed_problem.arguments(operands(case.packed, case.x, y, case.bias, case.x_scale), problem)
    dependent = ("x", "y", "x_scale")
    emulate.run(kernel.kernel(config), params, kernel.grid(problem, config), seed=seed, dependent=dependent)
    assert case.error(y) < TOLERANCE[case.output], f"{problem} by {config}: error {case.error(y):.2e}"


def check_on_gpu(kernel: GemmKernel[Any], case: PackedCase) -> None:
    """A product by the built-in config is right, and the same from run to run."""
    y = case.empty()
    multiply(kernel, case.x, case.packed, y, case.bias, x_scale=case.x_scale)
    assert case.error(y) < TOLERANCE[case.output], f"mean relative error {case.error(y):.2e}"
    for _ in range(3):
        again = case.empty()
        multiply(kernel, case.x, case.packed, again, case.bias, x_scale=case.x_scale)
        assert torch.equal(y, again), "results differ from run to run"


def unpack(packed: PackedWeight) -> Tensor:
    """Dequantize tiles by reading the layout back: float64 [N, K]."""
    format = packed.format
    units = packed_tiles._units(packed.tiles, format)
    if format.sparse:
        n, k = units.shape[1] * 64, units.shape[0] * 128
        codes, places = sparse_layout.read(units, format.bits, packed.order, n, k)
        pruned = torch.full((n, k // 4, 4), torch.nan, dtype=torch.float64, device=codes.device)
        values = pruned.scatter_(-1, places.view(n, -1, 2).long(), codes.view(n, -1, 2).double()).view(n, k)
    else:
        values = packed_tiles._tile_codes(packed).double()
    if format.tabled:
        values = table_of(format.code).to(values)[values.long()]
    zero, group = format.zero, tile_group(format)
    if group == 0:
        values -= zero if zero is not None else _known(packed.row_zero).double()[:, None]
    else:
        parts, at = subgroups(group), code_bytes(format.bits, format.sparse)
        scale, rest = units[..., at : at + 32 * parts].contiguous().view(torch.float16), units[..., at + 32 * parts :]
        values -= zero if zero is not None else _by_column(rest, parts)
        values *= _by_column(scale, parts)
        if format.code == "min":
            values += _by_column(rest.contiguous().view(torch.float16), parts)
    values *= packed.row_scale.double()[:, None]
    n, k = packed.shape
    if format.sparse:
        values = values.where(values.isfinite(), 0.0)  # pruned weights
    if packed.permutation is None:
        return values[:n, :k]
    result = values.new_zeros(n, k)
    used = packed.permutation >= 0
    result[:, packed.permutation[used].long()] = values[:n, : used.numel()][:, used]
    return result


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _by_column(values: Tensor, parts: int) -> Tensor:
    """Inverse of `packed_tiles._by_unit`, expanded to columns: float64 [N', K']."""
    blocks, tile_count = values.shape[:2]
    rows = values.reshape(blocks, tile_count, 4, parts, 8, 2).permute(1, 2, 5, 4, 0, 3).reshape(tile_count * 64, -1)
    return torch.repeat_interleave(rows.double(), TILE_COLUMNS // parts, dim=1)


def operands(
    weight: PackedWeight, x: Tensor, y: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None,
    x_sum: Tensor | None = None, scratch: tuple[Any, Any] = (None, None),
) -> Operands:  # fmt: skip
    """The operands of a product of tensors, unchecked."""
    return Operands(x, x.stride(0), weight.pointers, y, y.stride(0), bias, x_scale, x_sum, scratch=scratch)
