"""Decode attention on the GPU against exact attention over what the cache holds."""

import pytest
import torch

from anybit.attention import decode_kernel, decode_reference
from cases_decode import CASES, Case, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_dequantized_cache(case: Case):
    cache, sequences, q = case.build("cuda")
    masks = case.masks("cuda")
    out, lse = decode_kernel(q, cache, 1, sequences, masks)
    want, want_lse = decode_reference(q, cache, 1, sequences, masks, precision=torch.float64)
    assert out.isfinite().all()
    assert relative_error(out, want) < (1e-2 if case.bf16 else 2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-2 if case.bf16 else 4e-3)


@pytest.mark.parametrize("case", [c for c in CASES if c.data != "huge values" or not c.bf16], ids=str)
def test_pages_and_residual_are_the_same_as_on_a_cpu(case: Case):
    here, _, _ = case.build("cpu")
    there, _, _ = case.build("cuda")
    assert torch.equal(here.lengths, there.lengths.cpu()) and torch.equal(here.table, there.table.cpu())
    assert torch.equal(here.residual[1], there.residual[1].cpu())
    assert torch.equal(here.pages[1], there.pages[1].cpu())
