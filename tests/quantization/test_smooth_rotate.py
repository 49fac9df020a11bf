"""Smoothing and rotation: the model computes the same, and its activations are easier to quantize."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from anybit.errors import CalibrationError, LayerError
from anybit.quantization.methods.rotate import rotate
from anybit.quantization.methods.smooth import channel_peaks, smooth
from anybit.quantization.methods.smooth_rotate import smooth_rotate
from anybit.quantization.pipeline.calibrate import batched
from anybit.quantization.pipeline.lazy import LazyModel
from cases_calibration import loud, models, sequences, tiny


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("change", ["rotate", "smooth", "spread"])
@torch.no_grad()
def test_a_changed_model_computes_the_same(kind, change):
    model = list(models())[kind]
    tokens = torch.stack(sequences(9)[::3])
    before = model(tokens).logits
    if change == "smooth":
        smooth(LazyModel(model), batched(sequences(), 256))
    elif change == "spread":
        assert len(smooth_rotate(LazyModel(model), batched(sequences(), 256))) == 14
    else:
        assert len(rotate(LazyModel(model))) == 2
    after = model(tokens).logits
    torch.testing.assert_close(after, before, rtol=2e-3, atol=2e-4 * float(before.abs().max()) + 1e-4)


def scattered(model):
    smooth_rotate(LazyModel(model), batched(sequences(), 256))


def turned(model):
    rotate(LazyModel(model))


def smoothed(model, *strength):
    smooth(LazyModel(model), batched(sequences(), 256), *strength)


def peakiness(model) -> float:
    parts = [n for n, m in model.named_modules() if n.endswith(("q_proj", "gate_proj"))]
    peaks = channel_peaks(LazyModel(model), parts, batched(sequences(), 256))
    return max(float(p.max() / p.mean()) for p in peaks.values())


@pytest.mark.parametrize("change", [turned, lambda model: smoothed(model, 0.8), scattered])
def test_outliers_are_gone(change):
    model = loud(tiny(layers=2))
    before = peakiness(model)
    change(model)
    assert peakiness(model) < 0.6 * before


def test_a_tied_head_is_untied():
    model = tiny(layers=1)
    turned(model)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_other_architectures_are_refused_untouched():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300))
    before = {n: p.clone() for n, p in model.named_parameters()}
    for change in (turned, smoothed, scattered):
        with pytest.raises(LayerError, match=r"transformer\.h\.0"):
            change(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_smoothing_refuses_nan_and_odd_strengths():
    model = tiny(layers=1)
    with pytest.raises(ValueError, match="strength"):
        smoothed(model, 1.5)
    model.model.embed_tokens.weight.data[:] = torch.nan
    for change in (smoothed, scattered):
        with pytest.raises(CalibrationError, match="q_proj"):
            change(model)


def test_four_bit_inputs_lose_less_than_by_rotation_alone():
    """Smoothing shrinks channels that matter little to the weights: rounding errors in them shrink, too."""
    from anybit.quantization.pipeline.calibrate import _round_inputs
    from anybit.scheme import Scheme

    tokens = torch.stack(sequences(9)[::3])
    lost = {}
    for change in (turned, scattered):
        model = loud(tiny(layers=2))
        before = model(tokens).logits.log_softmax(-1)
        change(model)
        linears = {n: m for n, m in model.named_modules() if n.endswith("_proj")}
        _round_inputs(linears, Scheme.parse("w4a4").activations)
        after = model(tokens).logits.log_softmax(-1)
        lost[change] = float((before.exp() * (before - after)).sum(-1).mean().detach())
    assert lost[scattered] < lost[turned]
