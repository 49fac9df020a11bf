"""Learned scales between layers: the model computes the same, and loses less to quantized activations."""

import copy

import pytest
import torch

from anybit.codes import hadamard
from anybit.errors import CalibrationError
from anybit.models.llama_block import llama_blocks
from anybit.quantization.learn.scales import ScaleLearning, learn_scales
from anybit.quantization.methods.rotate import rotate_input
from anybit.quantization.methods.scaling_pairs import put_scales, scaling_pairs
from anybit.quantization.pipeline.calibrate import _round_inputs
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.scheme import Scheme
from cases_calibration import loud, models, sequences, tiny

FORMAT = Scheme.parse("w4a4").activations


@pytest.mark.parametrize("kind", range(3))
@torch.no_grad()
def test_scales_of_any_place_leave_the_model_as_it_was(kind):
    model = list(models())[kind].double()
    tokens = torch.stack(sequences(9)[::3])
    before = model(tokens).logits
    g = torch.Generator().manual_seed(1)
    for part in llama_blocks(model):
        for place in scaling_pairs(part):
            place.apply(torch.randn(place.channels, generator=g).exp())
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_learned_scales_lower_what_activations_cost(rotated):
    tokens = torch.stack(sequences(9)[::3])
    model = loud(tiny(layers=2))
    wanted = model(tokens).logits.log_softmax(-1).detach()
    lost = []
    for steps in (0, 24):
        changed = copy.deepcopy(model)
        if steps:
            settings = ScaleLearning(steps, step_tokens=256, rate=0.05, half=False)
            with torch.no_grad():  # as in code that edits models
                put_scales(LazyModel(changed), learn_scales(changed, sequences(), FORMAT, rotated, settings))
            found = changed(tokens).logits.log_softmax(-1)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        linears = {n: m for n, m in changed.named_modules() if n.endswith("_proj")}
        if rotated:
            for layer in linears.values():
                layer.weight.data = hadamard.transform(layer.weight.data)
                layer.register_forward_pre_hook(rotate_input)
        _round_inputs(linears, FORMAT)
        after = changed(tokens).logits.log_softmax(-1)
        lost.append(float((wanted.exp() * (wanted - after)).sum(-1).mean().detach()))
    assert lost[1] < 0.9 * lost[0]


def test_a_loss_that_is_not_finite_is_named():
    model = tiny(layers=1)
    model.model.embed_tokens.weight.data[:] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        learn_scales(model, sequences(), FORMAT, settings=ScaleLearning(1, 256, half=False))
