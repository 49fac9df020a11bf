"""Random operands of bit-plane GEMMs, and the exact integer results: shared by all tests."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import emulate
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels import gemm_kernel
from anybit.kernels.bitplane import bitplane, bitplane_layout, bitplane_problem
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.bitplane.bitplane_problem import Facts, Params, facts, wgmma_n
from anybit.kernels.bitplane.sm90_gemm import sm90_bitplane_gemm
from anybit.kernels.bitplane.sm90_resident import sm90_bitplane_resident
from anybit.kernels.bitplane.sm90_skinny import sm90_bitplane_skinny
from anybit.kernels.bitplane.sm90_skinny.sm90_bitplane_skinny import AOperand
from anybit.kernels.bitplane.sm90_stacked import sm90_bitplane_stacked
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply as multiply_by
from anybit.scheme import CODES, ActivationFormat, Scheme, WeightFormat
from cases import random_codes

H200 = Device.named("sm_90a")
EMULATED = replace(H200, sms=2)
"""The emulated device: so few SMs that blocks process several tiles of tiny products."""
DEPENDENT = ("activations", "activation_scale", "activation_sum", "activation_zero", "y")
"""Launch parameters that the preceding kernel may still be writing or reading."""
POISON = 0x5A
TOKENS_A = {"tile_b": 32, "a_operand": AOperand.activations}
"""Tiles of 64 tokens and 32 weights."""


def rings(a_stages: int, b_stages: int, pass_chunks: int) -> dict[str, Any]:
    """The pipelines of a skinny config."""
    return {"a_stages": a_stages, "b_stages": b_stages, "pass_chunks": pass_chunks}


@dataclass(frozen=True)
class Operands:
    """Both operands, prepared, and V: the exact sum over k of the dequantized integers, float64 [m, n]."""

    x: Packed
    weight: PlaneWeight
    exact: Tensor
    unit: Tensor
    """The scale of V, float64 [m, n]."""


def assert_right(given: Operands, y: Tensor, bias: Tensor | None = None) -> None:
    """y is the exact integer product, or that scaled in a handful of fp32 roundings, then rounded once."""
    if y.dtype == torch.int32:
        assert torch.equal(y.double(), given.exact), f"{int((y.double() != given.exact).sum())} values are wrong"
        return
    expected = given.exact * given.unit + (0 if bias is None else bias.double())
    step = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}[y.dtype] + 2**-21
    bound = expected.abs() * step + 2**-24 * (y.dtype == torch.float16) + 1e-6 * (bias is not None)
    assert bool(((y.double() - expected).abs() <= bound).all())


def default(problem: LinearProblem) -> Facts:
    """The config where nothing was measured."""
    family = bitplane.family(problem)
    assert family is not None, f"no kernel for {problem}"
    config: Facts = family.default(problem)
    return config


def multiply(
    x: Packed, weight: PlaneWeight, y: Tensor, config: Facts | None = None, bias: Tensor | None = None
) -> Tensor:
    """Y after y[:] = x W^T + bias by the kernel of a config, or by the built-in one."""
    config = config or default(bitplane_problem.product(x, weight, y, bias)[0])
    multiply_by(bitplane.family_of(config), x, weight, y, bias, config)
    return y


def check_on_gpu(problem: LinearProblem, config: Facts | None = None, padding: int = 0, bias: bool = False) -> Tensor:
    """Multiply into poisoned memory; nothing around y is written. Returns y."""
    m, n = problem.m, problem.n
    given = operands(m, n, problem.k, problem.weights, problem.activations, "cuda")
    room = torch.full((m + 2, n + padding), 77, dtype=problem.output.dtype, device="cuda")
    y = room[1 : m + 1, :n]
    added = torch.linspace(-1, 1, n, device="cuda") if bias else None
    multiply(given.x, given.weight, y, config, added)
    assert_right(given, y, added)
    assert bool((room[0] == 77).all() and (room[m + 1] == 77).all() and (room[:, n:] == 77).all())
    return y


def check_emulated(problem: LinearProblem, config: Facts, seed: int = 0, padding: int = 0, bias: bool = False) -> None:
    """The same on the emulator."""
    family = bitplane.family_of(config)
    assert family.why_not(problem, config) is None
    m, n = problem.m, problem.n
    given = operands(m, n, problem.k, problem.weights, problem.activations, seed=seed)
    room = torch.full((m, n + padding), 77, dtype=problem.output.dtype)
    y, added = room[:, :n], torch.linspace(-1, 1, n) if bias else None
    y_map = emulate.Box(y, 64, config.tma_rows) if config.tma_rows else bytes(128)
    params = on_host(given, room, added, y_map)
    emulate.run(family.kernel(config), params, family.grid(problem, config), seed=seed, dependent=DEPENDENT)
    assert bool((room[:, n:] == 77).all())
    assert_right(given, y, added)


def emulated(scheme: str, m: int, n: int, k: int, output: Output) -> LinearProblem:
    """The problem of a scheme on the emulator."""
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, output.dtype, EMULATED)


def on_host(given: Operands, y: Tensor, bias: Tensor | None, y_map: Any) -> Params:
    """Launch parameters in the emulator, which takes tensors for addresses."""
    x, weight = given.x, given.weight
    problem = LinearProblem(x.m, *weight.shape, weight.format, x.format, y.dtype, EMULATED)
    by_threads = gemm(problem, 64)  # results are not stored by TMA
    pointers = gemm_kernel.Operands(x.codes, 0, weight.pointers, y, y.stride(0), bias, x.scale, x.sum, x.zero)
    return replace(bitplane_problem.arguments(pointers, problem, by_threads), y_map=y_map)


def operands(
    m: int, n: int, k: int, weights: WeightFormat, activations: ActivationFormat, device: str = "cpu", seed: int = 0
) -> Operands:
    """Uniform codes, scales and zeros; buffer contents that a kernel must not depend on are poisoned."""
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
    """The three code families on both sides, and two mixed pairs."""
    return [*((code, code) for code in CODES), ("asym", "bipolar"), ("sym", "asym")]


def gemm(problem: LinearProblem, tile_m: int, **change: Any) -> sm90_bitplane_gemm.Config:
    """A config for many tokens with the fewest legal stages, independent of the default."""
    p, q = problem.weights.bits, problem.activations.bits
    config = sm90_bitplane_gemm.Config(*facts(problem), tile_m, 2 if p == 1 else 1, 2 if q == 1 else 1)
    return replace(config, **change)


def skinny(
    problem: LinearProblem, tile_b: int, a_operand: AOperand = AOperand.weights, **change: Any
) -> sm90_bitplane_skinny.Config:
    """A config for few tokens with two stages of A and one chunk at a time."""
    n = columns(problem, tile_b, a_operand)
    one_pass = problem.chunks == 1
    config = sm90_bitplane_skinny.Config(*facts(problem), a_operand, tile_b, n, 2, 2 - one_pass, 1)
    return replace(config, **change)


def columns(problem: LinearProblem, tile_b: int, a_operand: AOperand) -> int:
    """The MMA's N for all planes of ``tile_b`` rows of B."""
    return wgmma_n((problem.activations if a_operand is AOperand.weights else problem.weights).bits * tile_b)


def resident(
    problem: LinearProblem, tile_b: int, a_operand: AOperand = AOperand.weights, **change: Any
) -> sm90_bitplane_resident.Config:
    """A config that holds its whole tile in shared memory."""
    n, chunks = columns(problem, tile_b, a_operand), problem.chunks
    return replace(
        sm90_bitplane_resident.Config(*facts(problem), a_operand, tile_b, n, chunks, prologue_stages=chunks), **change
    )


def stacked(problem: LinearProblem, tile_m: int, **change: Any) -> sm90_bitplane_stacked.Config:
    """A config with the tokens' planes side by side and the fewest legal stages."""
    config = sm90_bitplane_stacked.Config(*facts(problem), tile_m, max(problem.weights.bits, 2), 2)
    return replace(config, **change)
