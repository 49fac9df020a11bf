"""marlin.cuh on an H200: its own case list, int8 activations, repeated runs."""

import pytest
import torch

from anybit.kernels import marlin, packed_layout
from anybit.packing import QuantizedWeight
from anybit.scheme import WeightFormat
from cases import random_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def check(format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    host = random_weight(n, k, format, m)
    zero = None if host.zero is None else host.zero.cuda()
    weight = QuantizedWeight(host.words.cuda(), host.scale.cuda(), zero, host.shape, format)
    packed = packed_layout.prepare(weight, "a8" if dtype == torch.int8 else "a16")
    scale = None
    if dtype == torch.int8:
        x = torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
        scale = torch.rand(m, device="cuda") / 100 + 0.001
        exact = x.double() * scale.double()[:, None]
    else:
        x = torch.randn(m, k, device="cuda").to(dtype)
        exact = x.double()
    expected = exact @ weight.dequantize(torch.float64).T
    output = dtype if dtype.is_floating_point else torch.float16
    y = torch.full((m, n), torch.nan, device="cuda", dtype=output)
    marlin.launch(packed, x, y, scale)
    error = (y.double() - expected).abs().mean() / expected.abs().mean()
    assert error < (1e-3 if output == torch.float16 else 8e-3), f"{format} m={m} {dtype}: error {error:.2e}"
    for _ in range(3):
        again = torch.full_like(y, torch.nan)
        marlin.launch(packed, x, again, scale)
        assert torch.equal(y, again)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 118, 128, 152, 768, 1024])
def test_marlin_cases(m: int) -> None:
    check(WeightFormat(4, "sym", 128), m, 512, 1024, torch.float16)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 4096, 4096), (257, 128, 4096), (257, 4224, 4160)])
def test_machete_cases(m: int, n: int, k: int) -> None:
    check(WeightFormat(4, "asym", 128), m, n, k, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("bits", "code", "group"), [(8, "sym", None), (3, "bipolar", 64), (2, "asym", 32), (4, "sym", 128)]
)
def test_formats(bits: int, code: str, group: int | None, dtype: torch.dtype) -> None:
    check(WeightFormat(bits, code, group), 20, 640, 1024, dtype)
