"""Experts as linear layers compute what transformers' own modules do, for every family that has them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anybit.layers.experts import Experts, Gate
from anybit.models.experts import left_fused, unfuse
from cases_mixtures import COMMON, MODELS


@pytest.mark.parametrize("kind", MODELS)
def test_unfuse_keeps_a_models_logits(kind: str) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**COMMON, **MODELS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    ids = torch.randint(1, 96, (2, 11))
    before = model(ids).logits
    unfuse(model)
    assert left_fused(model) == {}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts and all(len(module) == 8 for module in experts)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_experts_sums_what_ids_say() -> None:
    """Ids of no expert add nothing, one that occurs twice adds twice, and a NaN stays in its token."""
    torch.manual_seed(1)
    experts = Experts(4, 16, 8)
    x, weights = torch.randn(3, 16), torch.rand(3, 2)
    x[2, 5] = torch.nan
    ids = torch.tensor([[1, 1], [-1, 4], [0, 3]])
    y = experts(x, ids, weights)
    torch.testing.assert_close(y[0], experts.expert(1, x[:1])[0] * weights[0].sum())
    assert not y[1].any() and y[2].isnan().all()


def test_gate_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="silu, gelu, gelu_tanh or swigluoai, not 'relu'"):
        Gate("relu")
