"""Random operands of the bitwise GEMM, and the integers that it must give: shared by every rung."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybit.device import Device
from anybit.kernels.elementwise.quantize_activations import Packed, Target
from anybit.kernels.gemm import (
    bitplane_layout,
    sm90_bitplane,
    sm90_bitplane_stacked,
)
from anybit.kernels.gemm.bitplane_layout import PlaneWeight
from anybit.kernels.gemm.sm90_bitplane import (
    Config,
    Output,
    Path,
    Problem,
    Turns,
    Walk,
)
from anybit.packing import QuantizedWeight
from anybit.scheme import CODES, ActivationFormat, Scheme, WeightFormat
from cases import random_codes

H200 = Device.named("sm_90a")
EMULATED = replace(H200, sms=2)
"""What the emulator is asked to be: so few multiprocessors that blocks of tiny products have several tiles."""
DEPENDENT = ("activations", "activation_scale", "activation_sum", "activation_zero", "y")
"""The parameters of a launch that the kernel ahead may still be writing or reading."""
POISON = 0x5A


@dataclass(frozen=True)
class Operands:
    """Both operands, prepared, and V: the exact sum over k of the integers that the codes stand for, float64 [m, n]."""

    x: Packed
    weight: PlaneWeight
    exact: Tensor
    unit: Tensor
    """What V is multiplied with, float64 [m, n]."""


def emulated(scheme: str, m: int, n: int, k: int, output: Output) -> Problem:
    """A product by the text of its scheme, on the emulator."""
    parsed = Scheme.parse(scheme)
    return Problem(m, n, k, parsed.weights, parsed.activations, output, EMULATED)


def on_host(given: Operands, y: Tensor, bias: Tensor | None, y_map: Any) -> sm90_bitplane.Params:
    """The parameters of a launch in the emulator, which takes tensors for addresses."""
    return replace(
        sm90_bitplane.arguments(given.x, given.weight, y, bias),
        activations=given.x.codes,
        activation_scale=given.x.scale,
        activation_sum=given.x.sum,
        activation_zero=given.x.zero,
        y_map=y_map,
    )


def operands(
    m: int, n: int, k: int, weights: WeightFormat, activations: ActivationFormat, device: str = "cpu", seed: int = 0
) -> Operands:
    """Uniform codes, scales and zeros; all of the buffer that a kernel must not depend on is poisoned."""
    codes = random_codes((n, k), weights.bits, seed).to(device)
    scale = ((torch.rand(n, 1, generator=torch.Generator().manual_seed(seed)) + 0.5) / 64).to(device)
    stored = random_codes((n, 1), weights.bits, seed + 1).to(device) if weights.code == "asym" else None
    quantized = QuantizedWeight.from_codes(codes, scale, stored, weights)
    weight = bitplane_layout.prepare(quantized)

    x_codes = random_codes((m, k), activations.bits, seed + 2).to(device)
    x = Packed(m, k, activations, Target.planes, torch.device(device))
    x.buffer.fill_(POISON)
    x.codes.copy_(bitplane_layout.pack(x_codes, activations.bits))
    x.scale.copy_((torch.rand(m, generator=torch.Generator().manual_seed(seed + 3)) + 0.5) / 16)
    assert x.sum is not None
    x.sum.copy_(x_codes.sum(1, dtype=torch.int32))
    if x.zero is not None:
        x.zero.copy_(random_codes((m,), activations.bits, seed + 4))
        x_zero = x.zero.double()[:, None]
    else:
        x_zero = torch.full((m, 1), activations.zero or 0.0, dtype=torch.float64, device=device)

    doubled = (1 + (weights.code == "bipolar")) * (1 + (activations.code == "bipolar"))
    w_values = codes.double() - quantized.zeros().double()
    exact = doubled * ((x_codes.double() - x_zero) @ w_values.T)
    unit = x.scale.double()[:, None] * weight.scale.double()[None] / doubled
    return Operands(x, weight, exact, unit)


def code_pairs() -> list[tuple[str, str]]:
    """The three families on both sides, and two that mix them."""
    return [*((code, code) for code in CODES), ("asym", "bipolar"), ("sym", "asym")]


def short_sums(problem: Problem) -> bool:
    most = (2**problem.weights.bits - 1) * (2**problem.activations.bits - 1)
    return problem.k * most < 2**22


def large(problem: Problem, tokens: int, **change: object) -> Config:
    """A large config with the fewest slots that are legal, whatever the default would be."""
    p, q = problem.weights.bits, problem.activations.bits
    codes = bitplane_layout.Code(problem.weights.code), bitplane_layout.Code(problem.activations.code)
    groups = {"weight_groups": 2 if p == 1 else 1, "activation_groups": 2 if q == 1 else 1}
    config = Config(Path.large, p, q, *codes, problem.output, tokens, short_sums(problem), **groups)
    return replace(config, **change)


def small(problem: Problem, tokens: int, walk: Walk = Walk.weights, **change: object) -> Config:
    """A small config with two slots and one chunk at a time."""
    p, q = problem.weights.bits, problem.activations.bits
    codes = bitplane_layout.Code(problem.weights.code), bitplane_layout.Code(problem.activations.code)
    stacked = sm90_bitplane.stacked_columns((q if walk is Walk.weights else p) * tokens)
    one_span = bitplane_layout.chunks(problem.k) == 1
    config = Config(
        Path.small,
        p,
        q,
        *codes,
        problem.output,
        tokens,
        short_sums(problem),
        walk=walk,
        slots=2,
        stages=2 - one_span,
        span=1,
    )
    return replace(config, **({"stacked": stacked} | change))


def once(problem: Problem, tokens: int, walk: Walk, **change: object) -> Config:
    """A config that holds all of its tile in shared memory."""
    chunks = bitplane_layout.chunks(problem.k)
    return replace(small(problem, tokens, walk, path=Path.once, stages=chunks, span=0, slots=0, early=chunks), **change)


__all__ = ["H200", "Operands", "Output", "Problem", "Turns", "Walk", "code_pairs", "large", "once", "operands", "small"]


def wide(problem: Problem, tokens: int, **change: object) -> sm90_bitplane_stacked.Config:
    """A config whose tokens' planes stand side by side, with the fewest slots that are legal."""
    p, q = problem.weights.bits, problem.activations.bits
    codes = bitplane_layout.Code(problem.weights.code), bitplane_layout.Code(problem.activations.code)
    config = sm90_bitplane_stacked.Config(p, q, *codes, problem.output, short_sums(problem), tokens, max(p, 2), 2)
    return replace(config, **change)
