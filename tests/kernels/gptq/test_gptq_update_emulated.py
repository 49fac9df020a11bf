"""gptq_update.cuh on the CPU: the codes and errors of the plain loop."""

import pytest
import torch

import emulate
from anybit.kernels.gptq import gptq_update as kernel
from anybit.ops.gptq_update import sweep
from anybit.quantization.methods.gptq import _sparse_sweep
from anybit.quantization.methods.grid import Grid
from cases_calibration import sweep_case


@pytest.mark.parametrize("referenced", [False, True])
def test_sweep_finds_the_references_codes(referenced: bool) -> None:
    values, coupling, scale, zero, reference = sweep_case(9, 70)
    origin = reference if referenced else None
    codes, errors = sweep(values, coupling, scale, zero, 7, origin)
    config = kernel.Config(64, 16, referenced)
    found = [torch.full_like(values, torch.nan) for _ in range(2)]
    params = kernel.arguments(values, coupling, scale, zero, 7, *found, origin)
    emulate.run(kernel.kernel(config), params, (2, 1, 1))
    assert torch.equal(found[0], codes)
    torch.testing.assert_close(found[1], errors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("referenced", [False, True])
def test_masked_codes_are_zeros(referenced: bool) -> None:
    values, coupling, scale, zero, reference = sweep_case(12, 70)
    mask, origin = values.abs() > 0.7, reference if referenced else None
    codes, errors = sweep(values, coupling, scale, zero, 7, origin, mask)
    found = [torch.full_like(values, torch.nan) for _ in range(2)]
    params = kernel.arguments(values, coupling, scale, zero, 7, *found, origin, mask)
    emulate.run(kernel.kernel(kernel.Config(64, 16, referenced, masked=True)), params, (2, 1, 1))
    assert torch.equal(found[0], codes)
    torch.testing.assert_close(found[1], errors, rtol=1e-4, atol=1e-5)


def test_masks_are_those_of_the_plain_loop() -> None:
    values, coupling, scale, zero, _ = sweep_case(16, 70)
    diagonal = torch.rand(16, generator=torch.Generator().manual_seed(1)) + 0.5
    values[:4] = diagonal[:4, None]  # of equals the first
    codes, errors, kept = _sparse_sweep(values, coupling, scale, zero, Grid(3, "asym", None, torch.float32), diagonal)
    found = [torch.full_like(values, torch.nan) for _ in range(2)]
    mask = torch.zeros_like(kept)
    params = kernel.arguments(values, coupling, scale, zero, 7, *found, None, mask, diagonal)
    emulate.run(kernel.kernel(kernel.Config(64, 16, False, choosing=True)), params, (2, 1, 1))
    assert torch.equal(mask, kept) and bool(kept[:2].all()) and not bool(kept[2:4].any())
    assert torch.equal(found[0], codes)
    torch.testing.assert_close(found[1], errors, rtol=1e-4, atol=1e-5)
