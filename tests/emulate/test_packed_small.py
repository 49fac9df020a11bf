"""packed_small.cuh on the CPU: every width, code, group and activation; act-order, ragged ends, bias."""

from dataclasses import replace

import pytest
import torch

import emulate
from anybit.device import Device
from anybit.kernels import packed_layout, packed_small
from anybit.packing import QuantizedWeight
from anybit.scheme import WeightFormat
from cases import random_codes, random_weight

pytestmark = pytest.mark.emulate
HOPPER = replace(Device.named("sm_90a"), sms=2)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(
    format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, act_order: bool = False,
    bias: bool = False, split: bool = False, seed: int = 0, **changes: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(n, k, format, seed)
    if act_order and format.group is not None:
        index = (torch.arange(k) // format.group)[torch.randperm(k, generator=generator)].to(torch.int32)
        weight = QuantizedWeight(weight.words, weight.scale, weight.zero, weight.shape, format, index)
    integer = dtype == torch.int8
    output = torch.float16 if integer else dtype
    packed = packed_layout.prepare(weight, "a8" if integer else "a16")
    scale = None
    if integer:
        x = random_codes((m, k), 8, seed + 3).to(torch.int16).sub(128).clamp(-127, 127).to(torch.int8)
        scale = torch.rand(m, generator=generator) / 100 + 0.001
        exact = x.double() * scale.double()[:, None]
    else:
        x = torch.randn(m, k, generator=generator).to(dtype)
        exact = x.double()
    # Dequantized weights as the tiles hold them: group scales rounded to fp16.
    expected = exact @ packed_layout.unpack(packed).T
    b = torch.randn(n, generator=generator).to(output) if bias else None
    if b is not None:
        expected = expected + b.double()
    y = torch.full((m, n), torch.nan, dtype=output)
    problem = packed_small.problem_of(packed, m, dtype, output, HOPPER)
    problem = replace(problem, aligned=k * x.element_size() % 16 == 0)
    config = packed_small.default(problem)
    if split:
        config = packed_small._fitted(problem, 8, 1, 2, 32 << 10, 1, True)
    config = replace(config, **changes)
    assert packed_small.why_not(problem, config) is None
    params = packed_small.arguments(packed, x, y, scale, b)
    emulate.run(
        packed_small.kernel(config),
        params,
        packed_small.grid(problem, config),
        seed=seed,
        dependent=("x", "y", "x_scale"),
    )
    error = (y.double() - expected).abs().mean() / expected.abs().mean().clamp(min=1e-6)
    assert error < TOLERANCE[output] / 2, f"{format} m={m} n={n} k={k} {dtype} {config}: error {error:.2e}"


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        *((bits, torch.float16) for bits in range(1, 9)),
        *((bits, torch.bfloat16) for bits in (1, 3, 4, 8)),
        *((bits, torch.int8) for bits in (2, 5, 6, 7, 8)),
    ],
    ids=str,
)
def test_widths(bits: int, dtype: torch.dtype) -> None:
    run(WeightFormat(bits, "sym", 128), 3, 64, 384, dtype, seed=bits)


@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
@pytest.mark.parametrize("group", [32, 64, 256, None])
def test_codes_and_groups(code: str, group: int | None) -> None:
    for i, dtype in enumerate((torch.float16, torch.bfloat16, torch.int8)):
        bits = {0: 4, 1: 3, 2: 2}[i]
        run(WeightFormat(bits, code, group), 2, 64, 512, dtype, seed=i, bias=True)


@pytest.mark.parametrize(
    ("bits", "code", "group"), [(1, "bipolar", 128), (2, "asym", 64), (4, "sym", 32), (8, "sym", None)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_activations(bits: int, code: str, group: int | None, dtype: torch.dtype) -> None:
    run(WeightFormat(bits, code, group), 3, 64, 256, dtype, split=True, seed=bits)


def test_activation_order() -> None:
    run(WeightFormat(4, "asym", 64), 2, 64, 320, act_order=True)
    run(WeightFormat(3, "sym", 256), 1, 64, 300, torch.bfloat16, act_order=True)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 20, 130), (5, 72, 37), (16, 100, 264), (9, 330, 128)])
def test_ragged(m: int, n: int, k: int) -> None:
    run(WeightFormat(4, "sym", 128), m, n, k, bias=True)
    run(WeightFormat(2, "asym", 32), m, n, k, torch.int8)


@pytest.mark.parametrize("seed", range(3))
def test_small_rings(seed: int) -> None:
    """Rings that turn over many times, activations that are fetched again, warps that share rows."""
    format = WeightFormat(4, "sym", 128)
    run(format, 4, 192, 1024, seed=seed, stages=2, prefetch=1, x_stages=1, x_resident=False, warps=4, k_warps=2)
    run(format, 1, 192, 1024, seed=seed, stages=3, prefetch=2, warps=4, k_warps=4, x_stages=2, trigger=1)


def test_refusals() -> None:
    packed = packed_layout.prepare(random_weight(64, 128, WeightFormat(4, "sym", 128)))
    problem = packed_small.problem_of(packed, 1, torch.float16, torch.float16, HOPPER)
    assert "sm_90" in str(packed_small.why_not(replace(problem, device=Device.named("sm_80"))))
    assert "tokens" in str(packed_small.why_not(replace(problem, m=17)))
    config = packed_small.default(problem)
    assert "another problem" in str(packed_small.why_not(problem, replace(config, bits=3)))
    assert "shared memory" in str(packed_small.why_not(problem, replace(config, stages=4000)))
    assert all(packed_small.why_not(problem, c) is None for c in packed_small.configs(problem))
