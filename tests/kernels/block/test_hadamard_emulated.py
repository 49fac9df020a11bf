"""hadamard.cuh on the CPU: the transform of anybit.codes.hadamard."""

import pytest
import torch

import emulate
from anybit.codes import hadamard
from anybit.errors import KernelError
from anybit.kernels.block import hadamard as kernel


@pytest.mark.parametrize(
    ("k", "dtype"),
    [(64, torch.float16), (48, torch.bfloat16), (144, torch.float16), (448, torch.float16), (1024, torch.bfloat16)],
)
def test_same_as_the_reference(k: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, k + 8, generator=torch.Generator().manual_seed(k)).to(dtype)[:, :k]
    config = kernel.default(kernel.Problem(3, k, dtype))
    y = torch.full((3, k), torch.nan, dtype=dtype)
    emulate.run(kernel.kernel(config), kernel.arguments(x, y, config), (3, 1, 1))
    torch.testing.assert_close(y, hadamard.transform(x), rtol=2e-3 if dtype == torch.float16 else 1e-2, atol=1e-3)


def test_sizes_without_a_kernel_are_named() -> None:
    assert "float32" in str(kernel.why_not(kernel.Problem(1, 64, torch.float32)))
    assert "344" in str(kernel.why_not(kernel.Problem(1, 11008)))
    assert "65536" in str(kernel.why_not(kernel.Problem(1, 65536)))
    with pytest.raises(KernelError, match="no kernel for the Hadamard transform"):
        kernel.default(kernel.Problem(1, 11008))
