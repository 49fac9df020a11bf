"""Nested widths are learned together: every slice is what its turn computed, and improves."""

import json

import pytest
import torch

from anybit.codes.nested import sliced
from anybit.codes.rtn import quantize_weight
from anybit.hf.loading import load_model
from anybit.quantization.learn.latent import Bank, Rates
from anybit.quantization.methods.distill import Distillation, distill
from anybit.quantization.methods.gptq import nearest
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme, WeightFormat
from cases_calibration import divergence, names_of, sequences, tiny
from cases_models import save_byte_tokenizer

FORMATS = [WeightFormat(8, "asym", 32), WeightFormat(6, "sym", 32), WeightFormat(8, "bipolar")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [64, 72])
def test_every_turn_computes_its_slice(format, k):
    g = torch.Generator().manual_seed(0)
    original = torch.randn(6, k, generator=g).half()
    weight = quantize_weight(original, format)
    bank = Bank({"layer": weight}, lambda name: original, torch.float32, torch.float32, nested=(2, 3))
    widths, before = (2, 3, format.bits), weight
    bank.refresh()
    for count in range(6):
        width, hard = widths[count % 3], bank.harden()["layer"]
        found = hard if width == format.bits else sliced(hard, width)
        torch.testing.assert_close(bank.leaves["layer"].detach(), found.dequantize())
        bank.leaves["layer"].grad.normal_(generator=g)
        bank.step(Rates(0.1, 0.1), count + 1)
        assert not torch.equal(before.words, bank.harden()["layer"].words) or not count
        before = hard
    resumed = bank.leaves["layer"].detach().clone()
    bank.refresh(6)
    assert torch.equal(resumed, bank.leaves["layer"].detach())


def test_gradients_are_those_of_the_slice():
    """Straight through rounding to the slice's codes, by Adam's first moments; for latents less far from an edge."""
    g = torch.Generator().manual_seed(0)
    original = torch.randn(6, 64, generator=g)
    weight = quantize_weight(original, WeightFormat(8, "asym", 32))
    bank = Bank({"layer": weight}, lambda name: original, torch.float32, torch.float32, nested=(3,))
    bank.latent.value.add_(torch.randn(bank.latent.value.shape, generator=g) / 2)
    bank.refresh()
    hard = sliced(bank.harden()["layer"], 3)
    latent = bank.latent.value.flatten(1).clone().requires_grad_()
    log = torch.zeros_like(hard.scale, requires_grad=True)
    groups = torch.arange(64) // 32
    scale, zero = (hard.scale * log.exp())[:, groups], hard.zeros()[:, groups]
    inside = (latent / scale + zero).clamp(0, 7)
    codes = inside + (hard.codes() - inside).detach()
    found = (codes - zero) * scale
    torch.testing.assert_close(found.detach(), bank.leaves["layer"].detach())
    gradient = torch.randn(6, 64, generator=g)
    (found * gradient).sum().backward()
    bank.leaves["layer"].grad.copy_(gradient)
    bank.step(Rates(), 1)
    torch.testing.assert_close(bank.log_scale.first, 0.1 * log.grad, rtol=1e-3, atol=1e-4)
    learned, places = bank.latent.first.flatten(1), (latent / scale + zero).detach()
    clipped = (places < 0) | (places > 7)
    assert 0 < int(clipped.sum()) < clipped.numel() / 2
    wanted = 0.1 * latent.grad * (2 * (places - hard.codes()).abs()).clamp(max=1) ** 4
    torch.testing.assert_close(learned[~clipped], wanted[~clipped], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("code", ["asym", "sym"])
def test_one_start_suits_all_widths(code):
    """Within a fifth of the error of the best start for each width, and nearer than slices of the parent's own best."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 2, 256)

    def error(found):
        return float((found.dequantize() - weight).square().mean())

    whole = nearest(weight, WeightFormat(8, code, 64), torch.float16, nested=(2, 3, 4))
    alone = nearest(weight, WeightFormat(8, code, 64), torch.float16)
    for width in (2, 3, 4):
        best = error(nearest(weight, WeightFormat(width, code, 64), torch.float16))
        assert error(sliced(whole, width)) < 1.2 * best
        assert error(sliced(whole, width)) < error(sliced(alone, width))
    assert error(whole) < error(sliced(whole, 4)) / 4


@pytest.mark.parametrize("text", ["w8a16g32asym", "w6a8g32"])
def test_all_widths_improve_together(text):
    model, scheme, widths = tiny(layers=2), Scheme.parse(text), (2, 3, 4)
    names, kind = sorted(names_of(model)), torch.float16
    start = {n: nearest(model.get_submodule(n).weight.data, scheme.weights, kind, n, widths) for n in names}
    rates = Rates(0.01, 0.003, 0.005)
    settings = Distillation(80 * 512, step_tokens=512, rates=rates, half=False, nested=widths)
    losses = []
    found = distill(model, start, sequences(50), lambda name: scheme, settings, lambda *told: losses.append(told[2]))
    assert losses[-1] < 0.8 * losses[3]  # means over the widths
    if scheme.activations.quantized:
        return
    check = torch.stack(sequences(60, seed=9)[::3])

    def at(weights, width):
        return divergence(model, {n: sliced(w, width) for n, w in weights.items()}, check)

    assert all(at(found.weights, width) < 0.85 * at(start, width) for width in widths)
    assert at(found.weights, 4) < at(found.weights, 3) < at(found.weights, 2)
    assert divergence(model, found.weights, check) < at(found.weights, 4)


def test_a_folder_is_learned_at_every_width(tmp_path):
    model = tiny(layers=1)
    model.save_pretrained(tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    text = tmp_path / "ids.json"
    text.write_text(json.dumps([row.tolist() for row in sequences(40)]))
    options = {"text": text, "device": "cpu", "learn_tokens": 20000, "step_tokens": 512, "weight_rate": 0.01}
    start = options | {"learn_tokens": 1}
    for name, given in (("out", options), ("start", start)):
        quantize_folder(
            tmp_path / "model", tmp_path / name, "w8a16g32asym", "distill", nested=[2, 4], options=given,
            overrides={"lm_head": "w8a16"},
        )  # fmt: skip
    tokens = torch.stack(sequences(60, seed=9)[::3])
    with torch.no_grad():
        wanted = model(tokens).logits.log_softmax(-1)

        def loss(name, width):
            logits = load_model(tmp_path / name, width=width).model(tokens).logits.log_softmax(-1)
            return float((wanted.exp() * (wanted - logits)).sum(-1).mean())

        assert all(loss("out", width) < 0.95 * loss("start", width) for width in (2, 4))
        assert loss("out", 8) < loss("out", 4) < loss("out", 2)
