"""Bit-plane products through mma.sync on the emulator: exact, ragged on every side."""

import pytest
import torch

import emulate
from anybit.codes.reference import QuantizedActivations, integer_product
from anybit.device import Device
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.bitplane.bitplane_problem import Params, facts
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.common.types import Output
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, WeightFormat
from cases import random_codes, random_weight

pytestmark = pytest.mark.emulate


# m, n, k, weights, activations, output, tile_n, tile_m, warps (n, m, k), stage_k, stages
CASES = [
    (5, 20, 700, WeightFormat(2), ActivationFormat(3, "asym"), Output.s32, 32, 8, (1, 1, 4), 1024, 2),
    (9, 41, 300, WeightFormat(1, "bipolar"), ActivationFormat(1, "bipolar"), Output.f16, 32, 16, (2, 1, 2), 512, 2),
    (17, 40, 1100, WeightFormat(3, "asym"), ActivationFormat(2, "bipolar"), Output.bf16, 32, 32, (2, 2, 1), 256, 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: tuple) -> None:
    m, n, k, weights, form, output, tile_n, tile_m, warps, stage_k, stages = case
    weight = random_weight(n, k, weights)
    codes = random_codes((m, k), form.bits, 3)
    zero = random_codes((m,), form.bits, 4).float() if form.zero is None else torch.full((m,), form.zero)
    x = QuantizedActivations(codes, torch.rand(m) + 0.5, zero)
    doubled = (weights.code == "bipolar") + (form.code == "bipolar")
    exact = integer_product(x, weight)
    ready = bitplane_layout.prepare(weight)
    aligned = n % 8 == 0
    problem = LinearProblem(m, n, k, weights, form, output.dtype, Device.named("sm_80"), y_aligned=aligned)
    config = sm80_bitplane_gemm.Config(*facts(problem)[:5], False, aligned, tile_n, tile_m, *warps, stage_k, stages)
    assert sm80_bitplane_gemm.why_not(problem, config) is None
    bias = torch.randn(n)
    for seed in range(2):
        y = torch.full((m, n), 77, dtype=output.dtype)
        params = Params(
            bytes(128),  # no tensor map
            ready.planes,
            bitplane_layout.pack(codes, form.bits),
            ready.scale,
            ready.correction,
            ready.zero,
            bias,
            x.scale,
            codes.sum(1, dtype=torch.int32),
            zero.int() if form.code == "asym" else None,
            y,
            n,
            m,
            n,
            bitplane_layout.padded_rows(m),
            bitplane_layout.padded_rows(n),
            bitplane_layout.chunks(k),
        )
        dependent = ("activations", "activation_scale", "activation_sum")
        emulate.run(
            sm80_bitplane_gemm.kernel(config),
            params,
            sm80_bitplane_gemm.grid(problem, config),
            seed=seed,
            dependent=dependent,
        )
        if output is Output.s32:
            assert torch.equal(y, (exact * 2**doubled).int())
        else:
            expected = exact * x.scale.double()[:, None] * weight.scale.double().T + bias
            torch.testing.assert_close(y.double(), expected, rtol=1e-3 if output is Output.f16 else 8e-3, atol=1e-4)
