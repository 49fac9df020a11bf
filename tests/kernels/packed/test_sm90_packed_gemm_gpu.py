"""sm90_packed_gemm on hardware: every width, code, group and kind of cut against float64; bitwise repeatable.

Every seventh of the 285 formats is tested, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cases_packed
from anybit import jit
from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import quantize_activations
from anybit.kernels.block.quantize_activations import pitch
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import multiply
from anybit.kernels.packed.packed_tiles import prepare
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.ops.elementwise import silu_mul
from anybit.scheme import WeightFormat
from cases import random_weight
from cases_packed_gemm import FP8, INT8, Case, gpu_cases, silu_cases

CASES = gpu_cases(1 if os.environ.get("ANYBIT_EXHAUSTIVE") else 7)
SILU = [
    *silu_cases(),
    *(
        Case(problem)
        for m in (16, 128, 200, 512, 1000, 4096)
        for problem in (LinearProblem(m, 28672, 1024, WeightFormat(4), INT8),)
    ),
]


def operands(case: Case, seed: int = 0):
    """The layer, the kernel's x with its scales, and the exact product without bias, float64."""
    p = case.problem
    weight = random_weight(p.n, p.k, p.weights, seed).to("cuda")
    x = torch.randn(p.m, p.k, generator=torch.Generator().manual_seed(seed)).to("cuda", p.dtype)
    if not p.activations.quantized:
        return weight, spaced(x), None, x.double() @ weight.dequantize(torch.float64).T
    quantized = quantize_activations(x, p.activations)
    exact = quantized.dequantize(torch.float64) @ weight.dequantize(torch.float64).T
    if p.activations.integer:
        codes = (quantized.codes.to(torch.int16) - 2 ** (p.activations.bits - 1)).to(torch.int8)
        return weight, spaced(codes), quantized.scale, exact
    return weight, spaced(quantized.codes), quantized.scale, exact


def spaced(x: torch.Tensor) -> torch.Tensor:
    """A matrix with rows padded as by ops: each aligned to 16 bytes, NaN or -1 between them."""
    columns, kind = x.shape[1], torch.int16 if x.itemsize == 2 else torch.int8
    room = torch.full((len(x), pitch(columns, x.itemsize)), -1, dtype=kind, device=x.device).view(x.dtype)
    room[:, :columns] = x
    return room[:, :columns]


def product(case: Case, packed, x, x_scale, bias=None, silu=False) -> torch.Tensor:
    p = case.problem
    y = torch.full((p.m, p.n // (1 + silu)), torch.nan, dtype=p.dtype, device="cuda")
    x_sum = x.sum(1, dtype=torch.int32) if x.dtype == torch.int8 else None
    jit.launch(
        sm90_packed_gemm.kernel(case.config, silu),
        sm90_packed_gemm.arguments(cases_packed.operands(packed, x, y, bias, x_scale, x_sum), p, case.config),
        sm90_packed_gemm.grid(p, case.config),
        pdl=True,
    )
    return y


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile all kernels of the selected cases in parallel, in threads, since compilation dominates."""
    importlib.import_module("cuda.core")  # import before threads race for it
    selected = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    kernels = {sm90_packed_gemm.kernel(case.config) for case in (*CASES, *SILU) if case in selected}
    kernels |= {sm90_packed_gemm.kernel(case.config, True) for case in SILU if case in selected}
    with ThreadPoolExecutor() as pool:
        for result in pool.map(lambda kernel: jit.cached(kernel, "sm_90a"), kernels):
            assert result.spill_bytes == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemm_computes_the_product(case: Case) -> None:
    p = case.problem
    weight, x, x_scale, exact = operands(case)
    packed = prepare(weight, "a8" if p.activations.quantized else "a16")
    bias = torch.randn(p.n, device="cuda").to(p.dtype)
    y = product(case, packed, x, x_scale, bias)
    error = (y.double() - exact - bias.double()).abs().mean() / exact.abs().mean()
    assert error < (1e-3 if p.dtype == torch.float16 else 8e-3)
    assert torch.equal(y, product(case, packed, x, x_scale, bias)), "a second run gave other bits"


@pytest.mark.parametrize("case", SILU, ids=str)
def test_ends_with_silu(case: Case) -> None:
    """Equal to SiLU's own kernel on the product, bit for bit."""
    weight, x, x_scale, _ = operands(case)
    packed = prepare(weight, "a8" if case.problem.activations.quantized else "a16")
    bias = torch.randn(case.problem.n, device="cuda").to(case.problem.dtype)
    wanted = silu_mul(product(case, packed, x, x_scale, bias), paired=True)
    for _ in range(3):
        assert torch.equal(product(case, packed, x, x_scale, bias, silu=True), wanted)


def test_integer_sums_are_exact() -> None:
    """With scales of one and sums that fp16 can hold, every output is the exact integer."""
    for bits in range(1, 9):
        weights = WeightFormat(bits, "sym")
        problem = LinearProblem(40, 200, 512, weights, INT8)
        case = Case(problem, (64, 1, 2, 2, 1))
        weight = random_weight(200, 512, weights, bits).to("cuda")
        weight.scale.fill_(1)
        x = (torch.rand(40, 512, device="cuda") < 0.02).to(torch.int8) * torch.randint(
            -127, 128, (40, 512), device="cuda", dtype=torch.int8
        )
        exact = x.double() @ weight.centered(torch.float64).T
        y = product(case, prepare(weight, "a8"), x, torch.full((40,), 2.0**-6, device="cuda"))
        assert torch.equal(y, (exact / 64).to(torch.float16))


@pytest.mark.parametrize("group", [None, 128])
def test_float_sums_are_promoted(group: int | None) -> None:
    """e4m3's tensor cores accumulate in about 14 bits: a sum of 16,384 terms of one sign would be off by a percent."""
    weights = WeightFormat(4, "sym", group)
    problem = LinearProblem(64, 256, 16384, weights, FP8)
    case = Case(problem)
    codes = torch.randint(9, 16, (256, 16384), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scale = torch.full((256, weights.groups(16384)), 2.0**-8)
    weight = QuantizedWeight.from_codes(codes, scale, None, weights).to("cuda")
    quantized = quantize_activations(torch.rand(64, 16384, device="cuda").half() / 64, FP8)
    exact = quantized.dequantize(torch.float64) @ weight.dequantize(torch.float64).T
    y = product(case, prepare(weight, "a8"), quantized.codes, quantized.scale)
    assert ((y.double() - exact).abs() / exact).max() < 1e-3  # half of it may be rounding to fp16


def test_chain_of_dependent_launches() -> None:
    """Programmatic dependent launch changes nothing: a chain gives the same bits as with plain launches.

    Scales have both signs: uniform codes have mean -1/2, which would otherwise grow threefold per product (2e5).
    """
    weights = WeightFormat(4, "sym", 128)
    problem = LinearProblem(64, 1024, 1024, weights)
    config = sm90_packed_gemm.default(problem)
    layers, packed = [], []
    for seed in range(3):
        weight = random_weight(1024, 1024, weights, seed)
        signs = torch.randint(0, 2, weight.scale.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        weight.scale.mul_(0.1 * signs)  # a product's values are about as large as its input's
        weight = weight.to("cuda")
        layers.append(weight.dequantize(torch.float64))
        packed.append(prepare(weight))
    start = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float16)
    results = []
    for pdl in (False, True, True):
        x, buffers = start, [torch.empty_like(start), torch.empty_like(start)]
        for i in range(12):
            multiply(sm90_packed_gemm, x, packed[i % 3], buffers[i % 2], config=config, pdl=pdl)
            x = buffers[i % 2]
        results.append(x.clone())
    exact = start.double()
    for i in range(12):
        exact = (exact @ layers[i % 3].T).to(torch.float16).double()
    assert (results[0].double() - exact).abs().mean() / exact.abs().mean() < 4e-3  # twelve roundings of 1e-3 at most
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_activation_order() -> None:
    from anybit.codes.packing import QuantizedWeight

    weights = WeightFormat(4, "asym", 128)
    plain = random_weight(192, 512, weights)
    index = (torch.arange(512, dtype=torch.int32) // 128)[
        torch.randperm(512, generator=torch.Generator().manual_seed(3))
    ]
    weight = QuantizedWeight(plain.words, plain.scale, plain.zero, plain.shape, weights, index).to("cuda")
    packed = prepare(weight)
    assert packed.permutation is not None
    x = torch.randn(24, 512, device="cuda", dtype=torch.float16)
    gathered = torch.where(packed.permutation >= 0, x[:, packed.permutation.clamp(min=0).long()], 0)
    problem = LinearProblem(24, 192, gathered.shape[1], weights)
    case = Case(problem)
    exact = x.double() @ weight.dequantize(torch.float64).T
    y = product(case, packed, gathered.contiguous(), None)
    assert (y.double() - exact).abs().mean() / exact.abs().mean() < 1e-3
