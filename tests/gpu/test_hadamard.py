"""The Hadamard transform's kernel on a GPU."""

import pytest
import torch

from anybit import hadamard, ops
from anybit.kernels import hadamard as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = (64, 576, 1536, 4096, 8192, 14336)


def kernels_used():
    return [
        kernel.kernel(kernel.default(kernel.Problem(1, k, d))) for k in SIZES for d in (torch.float16, torch.bfloat16)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", SIZES)
def test_same_as_in_double(k, dtype):
    x = torch.randn(2, 7, k + 8, generator=torch.Generator().manual_seed(k)).to("cuda", dtype)[..., :k]
    found = ops.hadamard(x)
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found.double(), hadamard.transform(x.double()), rtol=1e-2, atol=4e-3)


def test_other_sizes_and_types_take_torch():
    for x in (torch.randn(3, 11008, device="cuda", dtype=torch.float16), torch.randn(3, 576, device="cuda")):
        torch.testing.assert_close(ops.hadamard(x).double(), hadamard.transform(x.double()), rtol=1e-2, atol=4e-3)


def test_no_rows():
    assert ops.hadamard(torch.empty(0, 576, device="cuda", dtype=torch.float16)).shape == (0, 576)


def test_not_finite_rows_stay_to_themselves():
    x = torch.randn(3, 576, device="cuda", dtype=torch.float16)
    x[1, 7] = torch.inf
    found = ops.hadamard(x).isfinite().all(1)
    assert found.tolist() == [True, False, True]
