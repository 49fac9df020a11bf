"""packed_large through the host emulation: every operand, every way of sharing, with races looked for."""

from dataclasses import replace

import pytest
import torch

import emulate
from anybit.kernels import packed_large
from anybit.kernels.packed_layout import prepare
from anybit.reference import quantize_activations
from cases import random_weight
from cases_packed_large import Case, tiny_cases

pytestmark = pytest.mark.emulate


@pytest.mark.parametrize("case", tiny_cases(), ids=str)
def test_product(case: Case) -> None:
    p, config = case.problem, replace(case.config, stages=2 * case.config.k_warpgroups, early=2)
    assert packed_large.why_not(p, config) is None
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
    for seed in range(2):
        y = torch.full((p.m, p.n), torch.nan, dtype=p.dtype)
        workspace = packed_large.workspace_for(config, torch.device("cpu"))
        if workspace is not None:
            workspace.random_(generator=torch.Generator().manual_seed(seed))  # stripes ask for no clean memory
        box = emulate.Box(operand, 128 // operand.element_size(), config.tokens // config.row_blocks)
        tail = emulate.Box(operand, 128 // operand.element_size(), config.tail_rows or 8)
        params = packed_large.params(p, config, None, packed, y, bias, x_scale, x_sum, workspace)
        params = replace(params, x=box, x_tail=tail)
        emulate.run(
            packed_large.kernel(config),
            params,
            packed_large.grid(p, config),
            seed=seed,
            dependent=("x", "x_tail", "x_scale", "y"),
        )
        error = (y.double() - exact).abs().mean() / exact.abs().mean()
        assert error < (1e-3 if p.dtype == torch.float16 else 8e-3)
