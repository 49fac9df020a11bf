"""gptq_update.cuh on the CPU: the codes and errors of the plain loop."""

import pytest
import torch

import emulate
from anybit.kernels.quantization import gptq_update as kernel
from anybit.ops.gptq_update import sweep
from cases_calibration import sweep_case

pytestmark = pytest.mark.emulate


@pytest.mark.parametrize("referenced", [False, True])
def test_same_codes(referenced: bool) -> None:
    values, coupling, scale, zero, reference = sweep_case(9, 70)
    origin = reference if referenced else None
    codes, errors = sweep(values, coupling, scale, zero, 7, origin)
    config = kernel.Config(64, 16, referenced)
    found = [torch.full_like(values, torch.nan) for _ in range(2)]
    params = kernel.arguments(values, coupling, scale, zero, 7, *found, origin)
    emulate.run(kernel.kernel(config), params, (2, 1, 1))
    assert torch.equal(found[0], codes)
    torch.testing.assert_close(found[1], errors, rtol=1e-4, atol=1e-5)
