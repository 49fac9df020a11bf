"""Experts on a GPU: the op against the reference, in CUDA graphs, and bit by bit from run to run."""

import pytest
import torch

from anybit.scheme import Scheme, WeightFormat
from cases_experts import Mixture, error, on_gpu, run
from cases_packed import FOREIGN, TOLERANCE, scheme_of

WORDS = (
    "w1a16bipolar",
    "w2a16g64",
    "w3a16g128asym",
    "w4a16g128",
    "w4a16",
    "w5a16g32",
    "w6a16g64asym",
    "w7a16",
    "w8a16asym",
)
FORMATS = tuple(Scheme.parse(word).weights for word in WORDS) + FOREIGN


@pytest.mark.parametrize("format", FORMATS, ids=scheme_of)
@pytest.mark.parametrize("tokens", [1, 4])
def test_formats(format: WeightFormat, tokens: int) -> None:
    dtype = (torch.float16, torch.bfloat16)[tokens % 2]
    mixture = Mixture(format, 8, 512, 264, tokens, dtype, bias=tokens > 1, seed=tokens)
    prepared = on_gpu(mixture)
    ids, weights = mixture.routing(3)
    y = run(mixture, prepared, ids, weights)
    assert error(y, mixture.expected(ids, weights)) < 2 * TOLERANCE[dtype]
    assert torch.equal(y, run(mixture, prepared, ids, weights)), "results differ from run to run"
    for found, given in zip(prepared.restore(), (mixture.gate_up, mixture.down), strict=True):
        assert torch.equal(found.words.cpu(), given.words) and torch.equal(found.scale.cpu(), given.scale)


@pytest.mark.parametrize(("hidden", "inner"), [(100, 40), (2880, 360), (332, 200)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 21])
def test_shapes_and_tokens(hidden: int, inner: int, tokens: int) -> None:
    mixture = Mixture(WeightFormat(4, "sym", 128), 6, hidden, inner, tokens)
    ids, weights = mixture.routing(2)
    y = run(mixture, on_gpu(mixture), ids.int() if tokens % 2 else ids, weights)
    assert error(y, mixture.expected(ids, weights)) < 2 * TOLERANCE[torch.float16]


def test_kinds_of_routing() -> None:
    """All to one, duplicates, ids out of range, no expert at all, NaN in one token."""
    mixture = Mixture(WeightFormat(4, "sym", 128), 4, 256, 128, 6)
    prepared, (_, weights) = on_gpu(mixture), mixture.routing(3)
    for ids in (
        [[2, 1, 0]] * 6,
        [[3, 3, 3]] * 6,
        [[0, 1, 0], [-1, 2, -1], [-1, -1, -1], [3, 4, 9], [1, 1, -1], [2, 0, 1]],
    ):
        chosen = torch.tensor(ids)
        y, expected = run(mixture, prepared, chosen, weights), mixture.expected(chosen, weights)
        assert error(y, expected) < 2 * TOLERANCE[torch.float16]
        assert torch.equal(y[(chosen < 0).all(1)].count_nonzero(), torch.tensor(0))
    mixture.x[1, 3] = torch.nan
    y = run(mixture, prepared, torch.tensor([[0, 1, 2]] * 6), weights)
    assert y[1].isnan().all() and y[[0, 2, 3, 4, 5]].isfinite().all()
