"""sm90_packed_skinny on hardware: every width, code and group, the peers' shapes, repeated runs, chains under PDL."""

import itertools

import pytest
import torch

from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.jit import Kernel
from anybit.kernels.multiply import multiply
from anybit.kernels.packed import packed_problem, packed_tiles
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.scheme import WeightFormat
from cases import random_weight
from cases_packed import FOREIGN, TOLERANCE, act_order, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = [torch.float16, torch.bfloat16, torch.int8]


def cuda(weight: QuantizedWeight, ordered: bool = False) -> QuantizedWeight:
    weight = act_order(weight, torch.Generator().manual_seed(weight.shape[1])) if ordered else weight
    return weight.to("cuda")


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.int8:
        x = torch.randint(-127, 128, (m, k), generator=generator, device="cuda", dtype=torch.int8)
        return x, torch.rand(m, generator=generator, device="cuda") / 100 + 0.001
    return torch.randn(m, k, generator=generator, device="cuda").to(dtype), None


def check(weight: QuantizedWeight, m: int, dtype: torch.dtype, bias: bool = False) -> None:
    n, k = weight.shape
    packed = packed_tiles.prepare(weight, "a8" if dtype == torch.int8 else "a16")
    x, scale = activations(m, k, dtype, n + m)
    output = torch.float16 if dtype == torch.int8 else dtype
    b = torch.randn(n, device="cuda").to(output) if bias else None
    expected = x.double() @ weight.dequantize(torch.float64).T
    if scale is not None:
        expected *= scale.double()[:, None]
    if b is not None:
        expected += b.double()
    y = torch.full((m, n), torch.nan, device="cuda", dtype=output)
    multiply(sm90_packed_skinny, x, packed, y, b, x_scale=scale)
    error = (y.double() - expected).abs().mean() / expected.abs().mean()
    assert error < TOLERANCE[output], f"{weight.format} m={m} n={n} k={k} {dtype}: mean relative error {error:.2e}"
    again = torch.full_like(y, torch.nan)
    for _ in range(3):
        multiply(sm90_packed_skinny, x, packed, again, b, x_scale=scale)
        assert torch.equal(y, again), f"{weight.format} m={m}: results differ from run to run"


def kernels_used() -> list[Kernel]:
    """Kernels of the tests below, for precompile.py."""
    found = set()
    for m, n, k, format, dtype, ordered, _ in CASES:
        size = 1 if dtype == torch.int8 else 2
        asked = problem(m, n, k, format, dtype, act_order=ordered, aligned=k * size % 16 == 0)
        found.add(sm90_packed_skinny.kernel(sm90_packed_skinny.default(asked)))
    return list(found)


Case = tuple[int, int, int, WeightFormat, torch.dtype, bool, bool]
"""m, n, k, format, activations, activation order, bias."""

WIDTHS: list[Case] = [
    *((5, 512, 1024, WeightFormat(bits, "sym", 128), dtype, False, False) for bits in range(1, 9) for dtype in DTYPES),
    *((m, 512, 1024, WeightFormat(bits, "sym", 128), torch.float16, False, False) for m in (1, 16) for bits in (3, 8)),
]
CODES: list[Case] = [
    (3, 320, 768, WeightFormat(bits, code, group), dtype, False, True)
    for i, code in enumerate(("sym", "asym", "bipolar"))
    for j, group in enumerate((32, 64, 128, 256, None))
    for bits, dtype in [((4, 3, 2)[(i + j) % 3], DTYPES[(i + j) % 3])]
]
MARLIN: list[Case] = [
    (m, 512, 1024, WeightFormat(4, "sym", group), torch.float16, False, False)
    for m in (1, 2, 3, 4, 8, 12, 16)
    for group in (None, 128)
]
ORDERED: list[Case] = [
    (2, 256, 1024, WeightFormat(4, "asym", 128), torch.float16, True, False),
    (2, 256, 1024, WeightFormat(8, "asym", 32), torch.bfloat16, True, False),
    (2, 256, 1024, WeightFormat(3, "asym", 64), torch.int8, True, False),
]
RAGGED: list[Case] = [
    (1, 1, 1, WeightFormat(4, "sym", 64), torch.float16, False, True),
    (3, 77, 300, WeightFormat(4, "sym", 64), torch.int8, False, True),
    (16, 130, 1000, WeightFormat(4, "sym", 64), torch.bfloat16, False, True),
]
MACHETE: list[Case] = [
    (1, 128, 128, WeightFormat(4, "asym", 128), torch.float16, False, False),
    (1, 8192, 28672, WeightFormat(4, "asym", 128), torch.float16, False, False),
    (13, 8192, 4096, WeightFormat(4, "asym", 128), torch.bfloat16, False, False),
    (13, 8192, 4096, WeightFormat(4, "asym", 128), torch.int8, False, False),
]
OTHER_TOOLS: list[Case] = [
    (3 + i % 9, 320, 712, format, DTYPES[i % 2], i % 3 == 0, True) for i, format in enumerate(FOREIGN)
]
CASES = [*WIDTHS, *CODES, *MARLIN, *ORDERED, *RAGGED, *OTHER_TOOLS, *MACHETE]


@pytest.mark.parametrize("case", [*WIDTHS, *CODES, *MARLIN, *ORDERED, *RAGGED, *OTHER_TOOLS], ids=str)
def test_cases(case: Case) -> None:
    m, n, k, format, dtype, ordered, bias = case
    check(cuda(random_weight(n, k, format, n + m), ordered), m, dtype, bias)


@pytest.mark.parametrize("case", MACHETE, ids=str)
def test_machete_cases(case: Case) -> None:
    m, n, k, format, dtype, _, _ = case
    generator = torch.Generator("cuda").manual_seed(m)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device="cuda").to(torch.int32)
    scale = torch.rand(n, k // 128, generator=generator, device="cuda") + 0.5
    zero = torch.randint(0, 16, (n, k // 128), generator=generator, device="cuda").to(torch.uint8)
    check(QuantizedWeight(words, scale, zero, (n, k), format), m, dtype)


def test_every_config_agrees() -> None:
    weight = cuda(random_weight(1024, 2048, WeightFormat(2, "sym", 128)))
    packed = packed_tiles.prepare(weight)
    x, _ = activations(2, 2048, torch.float16)
    expected = x.double() @ weight.dequantize(torch.float64).T
    problem = packed_problem.problem_of(packed, 2, torch.float16, torch.float16, Device.of(x))
    for config in itertools.islice(sm90_packed_skinny.configs(problem), 0, None, 60):
        y = torch.full((2, 1024), torch.nan, device="cuda", dtype=torch.float16)
        multiply(sm90_packed_skinny, x, packed, y, config=config)
        error = (y.double() - expected).abs().mean() / expected.abs().mean()
        assert error < 1e-3, f"{config}: {error:.2e}"
