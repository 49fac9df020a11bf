"""sm90_packed_gemm on the emulator: every operand, every kind of cut, with race detection."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import emulate
from anybit.codes.reference import quantize_activations
from anybit.jit.params import KERNELS
from anybit.kernels.block import norm_act
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.packed_tiles import prepare
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.scheme import WeightFormat
from cases import SEEDS, random_weight
from cases_packed import operands
from cases_packed_gemm import A16, INT8, Case, silu_cases, tiny_cases

_SPARSE = WeightFormat(4, "asym", 64, True)


def emulated(case: Case, config: sm90_packed_gemm.Config, seed: int, header: Path | None = None) -> float:
    """A product's mean error, relative to its mean size; `header` replaces sm90_packed_gemm.cuh."""
    y, exact = made(case, config, seed, header=header)
    return float((y.double() - exact).abs().mean() / exact.abs().mean())


def made(
    case: Case, config: sm90_packed_gemm.Config, seed: int, silu: bool = False, header: Path | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's output, and the exact product."""
    p = case.problem
    weight = random_weight(p.n, p.k, p.weights)
    x = torch.randn(p.m, p.k, generator=torch.Generator().manual_seed(1)).to(p.dtype)
    bias = torch.linspace(-1, 1, p.n).to(p.dtype)
    operand, x_scale, x_sum, values = x, None, None, x.double()
    if p.activations.quantized:
        quantized = quantize_activations(x, p.activations)
        operand, x_scale, values = quantized.codes, quantized.scale, quantized.dequantize(torch.float64)
        if p.activations.integer:
            operand = (quantized.codes.to(torch.int16) - 128).to(torch.int8)
            x_sum = operand.sum(1, dtype=torch.int32)
    exact = values @ weight.dequantize(torch.float64).T + bias.double()
    packed = prepare(weight, "a8" if p.activations.quantized else "a16")
    y = torch.full((p.m, p.n // (1 + silu)), torch.nan, dtype=p.dtype)
    pitch = -(-p.k // 16) * 16
    if p.k < pitch:  # rows aligned to 16 bytes, with NaN between them
        wide = torch.full((p.m, pitch), 127 if operand.dtype == torch.int8 else torch.nan, dtype=operand.dtype)
        wide[:, : p.k] = operand
        operand = wide[:, : p.k]
    box = emulate.Box(operand, 128 // operand.element_size(), config.tile_m // config.cluster_n)
    tail = emulate.Box(operand, 128 // operand.element_size(), config.tail_rows or 8)
    params = sm90_packed_gemm.arguments(operands(packed, operand, y, bias, x_scale, x_sum), p, config)
    stored = {"y_map": emulate.Box(y, 64, config.tile_m)} if config.tensor_store else {}
    kernel = sm90_packed_gemm.kernel(config, silu)
    emulate.run(
        replace(kernel, header=str(header)) if header else kernel,
        replace(params, x=box, x_tail=tail, **stored),
        sm90_packed_gemm.grid(p, config),
        seed=seed,
        dependent=("x", "x_tail", "x_scale", "y", "y_map"),
    )
    return y, exact


@pytest.mark.parametrize("case", tiny_cases(), ids=str)
def test_gemm_computes_the_product(case: Case) -> None:
    config = replace(
        case.config, stages=2 * case.config.split_k_warpgroups, prologue_stages=0 if case.config.direct else 2
    )
    assert sm90_packed_gemm.why_not(case.problem, config) is None
    for seed in SEEDS:
        assert emulated(case, config, seed) < (1e-3 if case.problem.dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("case", silu_cases(), ids=str)
def test_ends_with_silu(case: Case) -> None:
    """Equal to SiLU's own kernel on the plain product, bit for bit."""
    config, p = replace(case.config, stages=2 * case.config.split_k_warpgroups, prologue_stages=0), case.problem
    assert sm90_packed_gemm.why_not(p, config) is None
    plain, exact = made(case, config, 1)
    assert float((plain.double() - exact).abs().mean() / exact.abs().mean()) < 8e-3
    wanted = torch.empty(p.m, p.n // 2, dtype=p.dtype)
    rows = norm_act.Problem(p.m, p.n // 2, p.dtype)
    emulate.launched(norm_act.silu_mul(rows, plain, p.n, wanted, paired=True), dependent=("x",))
    for seed in SEEDS:
        assert torch.equal(made(case, config, seed, silu=True)[0], wanted)


@pytest.mark.parametrize("block_tiles", [0, 3])
def test_sparse_products_of_many_tokens(block_tiles: int) -> None:
    """Ranges of row tiles, with a warpgroup that has none at the end; tensor map stores; a staggered start."""
    for weights, activations, dtype in (
        (_SPARSE, A16, torch.bfloat16),
        (replace(_SPARSE, group=None), INT8, torch.float16),
    ):
        problem = LinearProblem(37, 312, 384, weights, activations, dtype)
        config = sm90_packed_gemm.config_for(problem, 32, 2)
        config = replace(config, stages=2, prologue_stages=2, span=1, block_tiles=block_tiles, tensor_store=True)
        assert sm90_packed_gemm.why_not(problem, config) is None
        for seed in SEEDS:
            assert emulated(Case(problem), config, seed) < 8e-3


@pytest.mark.parametrize("stages", [3, 5])
def test_stages_dealt_unevenly_are_named(stages: int, tmp_path: Path) -> None:
    """Wrong once in thousands of launches on hardware; detected here in every thread order."""
    case = Case(LinearProblem(12, 64, 1024, WeightFormat(4, "sym", 128)), (16, 1, 2, 1, 1))
    config = replace(case.config, stages=stages, prologue_stages=2, span=1)
    assert "stages must be a multiple of split_k_warpgroups" in str(sm90_packed_gemm.why_not(case.problem, config))
    rule = "static_assert(Config::stages % Config::split_k_warpgroups == 0"
    before, after = (KERNELS / "packed/sm90_gemm/sm90_packed_gemm.cuh").read_text().split(rule)
    header = tmp_path / "uneven.cuh"
    header.write_text(before + after.split(";", 1)[1])
    for seed in range(4):
        with pytest.raises(emulate.EmulationError, match="skipped wait: the mbarrier at shared memory"):
            emulated(case, config, seed, header)
