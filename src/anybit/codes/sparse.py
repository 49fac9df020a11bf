"""2:4 sparsity: two of every four neighbouring inputs are kept."""

import torch
from torch import Tensor


def two_of_four(sizes: Tensor, dim: int = -1) -> Tensor:
    """True at the two largest of four along a dimension, bool of the same shape; ties go to the first."""
    parts = sizes.unbind(dim)
    # Pairwise comparisons: a sort over a dimension of 4 is slow on a GPU.
    beaten = [torch.zeros_like(parts[0], dtype=torch.uint8) for _ in parts]
    for i in range(4):
        for j in range(i + 1, 4):
            wins = parts[i] >= parts[j]
            beaten[j] += wins
            beaten[i] += ~wins
    return torch.stack([count < 2 for count in beaten], dim=dim)
