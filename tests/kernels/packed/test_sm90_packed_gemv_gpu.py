"""sm90_packed_gemv and _skinny_f16 on hardware: widths, codes, groups, repeats, chains of dependent kernels."""

import itertools
from typing import Any

import pytest
import torch

from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.multiply import multiply
from anybit.kernels.packed import packed_problem, packed_tiles
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import WeightFormat
from cases_packed import FOREIGN, check_on_gpu, product, unpack

HALVES = (torch.float16, torch.bfloat16)
Case = tuple[GemmKernel[Any], int, int, int, WeightFormat, torch.dtype, bool, bool]
"""Kernel, m, n, k, format, activations, activation order, bias."""

D, M = sm90_packed_gemv, sm90_packed_skinny_f16
MOST = {D: 4, M: 16}
CODES = ("sym", "asym", "bipolar")
WIDTHS: list[Case] = [
    (kernel, 3, 512, 1024, WeightFormat(bits, CODES[bits % 3], 128), HALVES[bits % 2], False, False)
    for kernel in (D, M)
    for bits in range(1, 9)
]
GROUPS: list[Case] = [
    (kernel, MOST[kernel], 320, 768, WeightFormat((4, 3, 2, 8)[(i + j) % 4], code, group), HALVES[i % 2], False, True)
    for i, code in enumerate(CODES)
    for j, group in enumerate((32, 64, 128, 256, None))
    for kernel in ((D, M)[(i + j) % 2],)
]
TOKENS: list[Case] = [
    *((D, m, 512, 1024, WeightFormat(4, "sym", 128), torch.float16, False, False) for m in (1, 2)),
    *((M, m, 512, 1024, WeightFormat(4, "sym", g), torch.float16, False, False) for m, g in ((8, None), (24, 128))),
    *((M, m, 4096, 4096, WeightFormat(4, "sym", 128), torch.float16, False, False) for m in (5, 16)),
    (D, 1, 28672, 512, WeightFormat(4, "sym", 128), torch.float16, False, False),
    (M, 16, 28672, 512, WeightFormat(4, "sym", 128), torch.float16, False, False),
]
ODD: list[Case] = [
    (D, 2, 256, 1024, WeightFormat(4, "asym", 128), torch.float16, True, False),
    (M, 9, 256, 1024, WeightFormat(8, "asym", 32), torch.bfloat16, True, False),
    (D, 1, 1, 1, WeightFormat(4, "sym", 64), torch.float16, False, True),
    (D, 3, 77, 300, WeightFormat(3, "sym", 64), torch.float16, False, True),
    (M, 16, 130, 1000, WeightFormat(4, "sym", 64), torch.bfloat16, False, True),
    (M, 3, 77, 300, WeightFormat(4, "sym", 64), torch.float16, False, True),
]
OTHER_TOOLS: list[Case] = [
    (kernel, MOST[kernel] - i % 2, 320, 712, format, HALVES[i // 2 % 2], i % 3 == 0, True)
    for i, format in enumerate(FOREIGN)
    for kernel in (D, M)
]
TABLES: list[Case] = [  # a token or two, groups side by side
    (D, m, 320, 1024, format, dtype, False, False)
    for format in FOREIGN
    if format.tabled
    for m, dtype in zip((1, 2), HALVES, strict=True)
]
SPARSE: list[Case] = [
    (D, 1 + i % 4, 320, 768 + 4 * (i % 2), WeightFormat(bits, code, group, True), HALVES[i % 2], False, i % 3 == 0)  # type: ignore[arg-type]
    for i, (bits, (code, group)) in enumerate(
        itertools.product(range(2, 9), (("sym", 128), ("asym", 32), ("asym", None)))
    )
]
CASES = [*WIDTHS, *GROUPS, *TOKENS, *ODD, *OTHER_TOOLS, *TABLES, *SPARSE]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemv_is_right_for_each_case(case: Case) -> None:
    module, m, n, k, format, dtype, act_order, bias = case
    check_on_gpu(module, product(format, m, n, k, dtype, ordered=act_order, bias=bias, seed=n + m, device="cuda"))


def chain(module: GemmKernel[Any], packed: list[PackedWeight], x: torch.Tensor, links: int, pdl: bool) -> torch.Tensor:
    """y = x W^T repeatedly, each product the next one's activations."""
    buffers = [x.clone(), torch.empty_like(x)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(links):
            multiply(module, buffers[i % 2], packed[i % len(packed)], buffers[(i + 1) % 2], pdl=pdl)
    graph.replay()
    torch.cuda.synchronize()
    return buffers[links % 2]


@pytest.mark.parametrize(
    ("module", "m"), [(sm90_packed_skinny, 1), (sm90_packed_skinny, 8), (D, 1), (D, 4), (M, 8), (M, 16)]
)
def test_chains_under_programmatic_launch(module: GemmKernel[Any], m: int) -> None:
    """What a kernel prefetches before its predecessor has ended must not change a bit."""
    size = 4096
    layers = []
    for seed in range(6):
        generator = torch.Generator("cuda").manual_seed(seed)
        words = torch.randint(-(2**31), 2**31, (size, size // 8), generator=generator, device="cuda").to(torch.int32)
        scale = (torch.rand(size, size // 128, generator=generator, device="cuda") + 0.5) / (4.6 * 64 * 1.04)
        # Of both signs: sym codes have a mean of half a step, which would grow along the chain.
        scale *= torch.randint(0, 2, scale.shape, generator=generator, device="cuda") * 2 - 1
        weight = QuantizedWeight(words, scale, None, (size, size), WeightFormat(4, "sym", 128))
        layers.append(packed_tiles.prepare(weight))
    x = torch.randn(m, size, device="cuda").half()
    plain = chain(module, layers, x, 41, pdl=False)
    assert plain.isfinite().all() and plain.count_nonzero() > 0.9 * plain.numel()
    for _ in range(10):
        assert torch.equal(chain(module, layers, x, 41, pdl=True), plain)


@pytest.mark.parametrize(("module", "m", "step"), [(D, 2, 10), (M, 16, 20), (sm90_packed_skinny, 2, 60)])
def test_gemv_is_right_with_each_config(module: GemmKernel[Any], m: int, step: int) -> None:
    it = product(WeightFormat(2, "sym", 128), m, 1024, 2048, device="cuda")
    problem = packed_problem.problem_of(it.packed, m, torch.float16, torch.float16, Device.of(it.x))
    for config in itertools.islice(module.configs(problem), 0, None, step):
        y = it.empty()
        multiply(module, it.x, it.packed, y, config=config)
        assert it.error(y) < 1e-3, f"{config}: {it.error(y):.2e}"


def test_outliers_keep_their_place() -> None:
    """Fixed point in blocks of 128 columns: one channel a thousand times the others harms none."""
    it = product(WeightFormat(4, "sym", 128), 1, 512, 2048, device="cuda")
    x = it.x.clone()
    x[0, 77] = 1000.0
    y = it.empty()
    multiply(sm90_packed_gemv, x, it.packed, y)
    expected = x.double() @ unpack(it.packed).T
    assert (y.double() - expected).abs().mean() / expected.abs().mean() < 1e-3
