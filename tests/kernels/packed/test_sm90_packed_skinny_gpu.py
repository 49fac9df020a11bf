"""sm90_packed_skinny on hardware: every width, code and group, the peers' shapes, repeated runs, chains under PDL."""

import pytest
import torch

from anybit.codes.packing import QuantizedWeight
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.scheme import WeightFormat
from cases_packed import FOREIGN, PackedCase, check_on_gpu, product

DTYPES = [torch.float16, torch.bfloat16, torch.int8]


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


@pytest.mark.parametrize("case", [*WIDTHS, *CODES, *MARLIN, *ORDERED, *RAGGED, *OTHER_TOOLS], ids=str)
def test_skinny_is_right_for_each_case(case: Case) -> None:
    m, n, k, format, dtype, ordered, bias = case
    check_on_gpu(
        sm90_packed_skinny, product(format, m, n, k, dtype, ordered=ordered, bias=bias, seed=n + m, device="cuda")
    )


@pytest.mark.parametrize("case", MACHETE, ids=str)
def test_skinny_is_right_for_machete_cases(case: Case) -> None:
    m, n, k, format, dtype, _, _ = case
    generator = torch.Generator("cuda").manual_seed(m)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device="cuda").to(torch.int32)
    scale = torch.rand(n, k // 128, generator=generator, device="cuda") + 0.5
    zero = torch.randint(0, 16, (n, k // 128), generator=generator, device="cuda").to(torch.uint8)
    weight = QuantizedWeight(words, scale, zero, (n, k), format)
    x, x_scale = torch.randn(m, k, generator=generator, device="cuda"), None
    if dtype == torch.int8:
        x, x_scale = (x * 30).clamp(-127, 127), torch.rand(m, generator=generator, device="cuda") / 100 + 0.001
    x = x.to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).T * (1 if x_scale is None else x_scale.double()[:, None])
    packed = packed_tiles.prepare(weight, "a16" if x_scale is None else "a8")
    check_on_gpu(sm90_packed_skinny, PackedCase(packed, x, x_scale, None, expected))
