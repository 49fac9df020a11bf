"""Hadamard matrices of language models' sizes: orthogonal, with two values."""

import pytest
import torch

from anybit.codes import hadamard
from anybit.errors import LayerError


@pytest.mark.parametrize("size", [1, 2, 12, 20, 24, 28, 36, 48, 52, 64, 76, 100, 108, 148, 344, 576, 960, 1536])
def test_matrices_are_orthogonal_with_two_values(size):
    h = hadamard.matrix(size, torch.float64)
    torch.testing.assert_close(h @ h.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(h.abs(), torch.full_like(h, size**-0.5))


@pytest.mark.parametrize("size", [64, 576, 1536, 11008, 14336])
def test_inverse_undoes_transform(size):
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0))
    y = hadamard.transform(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(hadamard.inverse(y), x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_transform_is_the_matrix():
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard.transform(x), x @ hadamard.matrix(576).T, rtol=1e-4, atol=1e-4)


def test_an_outlier_is_spread_evenly():
    x = torch.zeros(1536)
    x[7] = 100
    torch.testing.assert_close(hadamard.transform(x).abs(), torch.full((1536,), 100 / 1536**0.5))


@pytest.mark.parametrize("size", [0, 3, 6, 18, 7 * 13])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(LayerError, match=str(size)):
        hadamard.transform(torch.zeros(2, size) if size else torch.zeros(2, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_kept(dtype):
    assert hadamard.transform(torch.ones(2, 36, dtype=dtype)).dtype == dtype
