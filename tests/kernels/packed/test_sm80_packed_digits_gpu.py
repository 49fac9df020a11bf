"""sm80_packed_digits on hardware: widths, codes, groups, shapes of models, repeated runs, chains under PDL."""

import pytest
import torch

from anybit.kernels.multiply import multiply
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.scheme import WeightFormat
from cases_packed import problem, product

Case = tuple[int, int, int, WeightFormat, torch.dtype, bool, bool]
"""m, n, k, format, dtype, activation order, bias."""

HALF, BRAIN = torch.float16, torch.bfloat16
CASES: list[Case] = [
    *((m, 512, 1024, WeightFormat(bits, "sym", 128), HALF, False, False) for bits in range(1, 5) for m in (2, 7, 16)),
    *((32, 2048, 12288, WeightFormat(bits, "sym", 128), BRAIN, False, False) for bits in range(1, 5)),
    *(
        (5, 320, 768, WeightFormat(bits, code, group), dtype, False, True)  # type: ignore[arg-type]
        for code in ("sym", "asym", "bipolar")
        for group in (32, 64, 256, None)
        for bits, dtype in ((2, HALF), (3, BRAIN))
    ),
    (2, 256, 1024, WeightFormat(4, "asym", 128), HALF, True, False),
    (9, 256, 1000, WeightFormat(3, "asym", 64), BRAIN, True, True),
    (1, 1, 1, WeightFormat(4, "sym", 64), HALF, False, True),
    (3, 77, 301, WeightFormat(2, "sym", 64), HALF, False, True),
    (12, 2880, 2880, WeightFormat(3, "sym", 128), BRAIN, False, False),
    (16, 5120, 25600, WeightFormat(2, "asym", 128), HALF, False, False),
    (28, 28672, 4096, WeightFormat(2, "sym", 128), HALF, False, False),
    (64, 2048, 4096, WeightFormat(2, "asym", 64), BRAIN, False, True),
    (39, 1000, 2880, WeightFormat(3, "bipolar", None), HALF, False, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    """As exact as the codes as 16-bit floats; the same bits again."""
    m, n, k, format, dtype, ordered, bias = case
    it = product(format, m, n, k, dtype, ordered=ordered, bias=bias, seed=m, device="cuda")
    y = it.empty()
    multiply(sm80_packed_digits, it.x, it.packed, y, it.bias)
    error = it.error(y)
    assert error < (3e-4 if dtype == HALF else 2e-3), f"error {error:.2e}"
    for _ in range(3):
        again = it.empty()
        multiply(sm80_packed_digits, it.x, it.packed, again, it.bias)
        assert torch.equal(y, again)


@pytest.mark.parametrize(("m", "bits"), [(4, 2), (16, 3), (32, 1)])
def test_every_config(m: int, bits: int) -> None:
    it = product(WeightFormat(bits, "sym", 128), m, 2064, 4096, seed=m, device="cuda")
    asked = problem(m, 2064, 4096, it.packed.format, HALF)
    for config in list(sm80_packed_digits.configs(asked))[:: 8 if m < 32 else 12]:
        y = it.empty()
        multiply(sm80_packed_digits, it.x, it.packed, y, config=config)
        assert it.error(y) < 3e-4, config


def test_a_chain_overlaps_safely() -> None:
    """Each product's input is the one before's output, under PDL, as without."""
    it = product(WeightFormat(2, "sym", 128), 8, 4096, 4096, device="cuda")
    ends = []
    for pdl in (False, True):
        x, y = it.x / it.x.abs().amax(), it.empty()
        for _ in range(30):
            multiply(sm80_packed_digits, x, it.packed, y, pdl=pdl)
            x, y = (y / y.abs().amax(1, keepdim=True)).half(), torch.full_like(y, torch.nan)
        ends.append(x)
    assert torch.equal(*ends) and ends[0].isfinite().all()
