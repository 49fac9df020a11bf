"""Learned codes: they start at the given ones, learn from the output, and pack to what they computed."""

import pytest
import torch

from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import quantize_activations
from anybit.codes.rtn import quantize_weight
from anybit.codes.sparse import two_of_four
from anybit.errors import CalibrationError, TextError
from anybit.quantization.learn.fake_quant import FakeQuantWeight, banks
from anybit.quantization.learn.generated import continued
from anybit.quantization.learn.norms import fuse_norms
from anybit.quantization.learn.rounding import rounded_through
from anybit.quantization.methods import gptq
from anybit.quantization.methods.blockwise import BlockLearning
from anybit.quantization.methods.distill import Distillation, distill, gains_of, learn_masks
from anybit.quantization.pipeline.blocks import Call
from anybit.quantization.pipeline.calibrate import Calibration, calibrate
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases_calibration import divergence, names_of, sequences, tiny

FORMATS = [WeightFormat(2, "asym", 32), WeightFormat(3), WeightFormat(1, "bipolar", 64), WeightFormat(4, sparse=True)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [64, 72])
def test_soft_weight_starts_at_its_codes_and_packs_what_it_computes(format, k):
    original = torch.randn(6, k, generator=torch.Generator().manual_seed(0)).half()
    weight = quantize_weight(original, format)
    soft = FakeQuantWeight(weight, original)
    torch.testing.assert_close(soft(), weight.dequantize())
    with torch.no_grad():
        soft.place.add_(torch.randn(soft.place.shape, generator=torch.Generator().manual_seed(1)))
        soft.log_scale.sub_(0.2)
    torch.testing.assert_close(soft.harden().dequantize(), soft().detach(), rtol=2e-3, atol=1e-4)


def test_gradients_reach_codes_and_scales():
    original = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    soft = FakeQuantWeight(quantize_weight(original, WeightFormat(3, "asym", 32)), original)
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    direct = (x @ soft().T - x @ original.T).square().sum()
    direct.backward()
    expected = [p.grad.clone() for p in soft.parameters()]
    (bank,) = banks({"layer": soft.weight}, {"layer": original}, torch.float32, FakeQuantWeight)
    weight = bank.leaves["layer"]
    for half in x.split(5):
        (half @ weight.T - half @ original.T).square().sum().backward()
    bank.receive()
    for parameter, gradient in zip(bank.soft.parameters(), expected, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


def test_distillation_improves_a_model_that_it_leaves_alone():
    model = tiny()
    before = {n: p.clone() for n, p in model.named_parameters()}
    scheme = Scheme.parse("w2a16g32asym")
    weights = {n: quantize_weight(model.get_submodule(n).weight.data, scheme.weights) for n in names_of(model)}
    losses = []
    settings = Distillation(passes=4, step_tokens=512, run_tokens=128, place_rate=0.02, half=False)
    better = distill(model, weights, sequences(100), settings, progress=lambda done, total, loss: losses.append(loss))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    check = torch.stack(sequences(60, seed=9)[::3])
    assert divergence(model, better, check) < 0.8 * divergence(model, weights, check)
    assert losses[-1] < losses[0]
    again = distill(model, weights, sequences(100), settings)
    assert all(torch.equal(again[n].words, better[n].words) for n in better)


@pytest.mark.parametrize("choosing", [0.0, 0.6])
def test_masks_learn_and_stay_two_of_four(choosing):
    model = tiny(layers=2)
    start = {
        n: quantize_weight(model.get_submodule(n).weight.data, WeightFormat(8, sparse=True)) for n in names_of(model)
    }
    rates = {"weight_rate": 0.02, "gain_rate": 0.002, "choosing": choosing, "decay": 0.01}
    settings = Distillation(passes=4, step_tokens=512, half=False, **rates)
    gains: dict[str, torch.Tensor] = {}
    learned = learn_masks(model, start, sequences(60), settings, tuned=gains)
    changed = False
    for name, weight in learned.items():
        kept = weight.view(len(weight), -1, 4) != 0
        assert bool((kept.sum(-1) == 2).all())
        changed = changed or not torch.equal(kept.view(weight.shape), start[name].mask())
    assert changed == (choosing > 0)
    assert set(gains) == set(gains_of(model))
    check = torch.stack(sequences(60, seed=9)[::3])
    before = {n: w.dequantize() for n, w in start.items()}
    assert divergence(model, learned, check) < 0.7 * divergence(model, before, check)


def test_two_of_four_are_the_largest():
    sizes = torch.tensor([[1.0, 2, 3, 4], [7, 7, 7, 7], [5, 0, 0, 0]])
    kept = [[False, False, True, True], [True, True, False, False], [True, True, False, False]]
    assert two_of_four(sizes).tolist() == two_of_four(sizes.T, 0).T.tolist() == kept


def test_a_model_writes_on_from_pieces_of_a_text():
    model, text = tiny(layers=2), sequences(4)
    model.model.norm.weight.data *= 1000  # so confident that sampling takes the most likely token
    rows = continued(model, text, 5 * 48, 48, torch.device("cpu"))
    assert rows.shape == (5, 48) and rows.dtype == torch.int64
    assert torch.equal(rows, continued(model, text, 5 * 48, 48, torch.device("cpu")))
    pieces = {tuple(part.tolist()) for sequence in text for part in sequence.unfold(0, 6, 1)}
    assert all(tuple(row[:6].tolist()) in pieces for row in rows)
    with torch.no_grad():
        likely = model.bfloat16()(rows).logits.argmax(-1)
    assert float((likely[:, 5:-1] == rows[:, 6:]).float().mean()) > 0.9
    assert len(continued(model, text, 40, 48, torch.device("cpu"))) == 0


def test_gains_of_norms_learn_too_if_asked():
    model = tiny()
    weights = {
        n: quantize_weight(model.get_submodule(n).weight.data, WeightFormat(2, "asym", 32)) for n in names_of(model)
    }
    settings = Distillation(passes=2, step_tokens=256, gain_rate=0.01, half=False)
    tuned: dict[str, torch.Tensor] = {}
    distill(model, weights, sequences(20), settings, tuned=tuned)
    assert set(tuned) == {n for n, p in model.named_parameters() if "norm" in n}
    assert all(bool((gain != 1).any()) for gain in tuned.values())
    assert all(bool((p == 1).all()) for n, p in model.named_parameters() if "norm" in n)
    plain: dict[str, torch.Tensor] = {}
    distill(model, weights, sequences(20), Distillation(half=False), tuned=plain)
    assert not plain


@pytest.mark.parametrize("code", ["sym", "asym"])
def test_gradients_follow_a_tokens_range(code):
    format = ActivationFormat(3, code)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (coded,) = rounded_through(format)(None, (x,))
    torch.testing.assert_close(coded.detach(), quantize_activations(x.detach(), format).dequantize())
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    (coded * weight).sum().backward()
    found, x.grad = x.grad, None
    lost, inner = coded.detach() - x.detach(), x.detach().abs() < x.detach().abs().amax(1, keepdim=True)
    if code == "asym":
        inner = (x.detach() < x.detach().amax(1, keepdim=True)) & (x.detach() > x.detach().amin(1, keepdim=True))
    assert bool((found == weight)[inner].all())
    # All outer gradients of a row: those of its elements, and those of its range for clipped ones.
    reach = x.detach().abs().amax(1) if code == "sym" else x.detach().amax(1) - x.detach().amin(1)
    extra = ((found - weight) * x.detach().sign()).sum(1) / (1 if code == "sym" else 2)
    torch.testing.assert_close(extra, (weight * lost).sum(1) / reach, rtol=1e-3, atol=1e-4)


def test_banks_are_the_layers_that_they_hold():
    g = torch.Generator().manual_seed(0)
    originals = {f"layer{i}": torch.randn(8 + i, 64, generator=g) for i in range(4)}
    weights = {n: quantize_weight(w, WeightFormat(3, "asym", 32)) for n, w in originals.items()}
    scattered = weights["layer3"]
    index = torch.arange(64, dtype=torch.int32) % 2
    weights["layer3"] = QuantizedWeight(
        scattered.words, scattered.scale, scattered.zero, (11, 64), scattered.format, index
    )
    found = banks(weights, originals, torch.float32, FakeQuantWeight)
    assert len(found) == 2
    x = torch.randn(5, 64, generator=g)
    for bank in found:
        for name, leaf in bank.leaves.items():
            alone = FakeQuantWeight(weights[name], originals[name])
            (x @ leaf.T).square().sum().backward()
            (x @ alone().T).square().sum().backward()
            weights[name] = alone.place.grad
            torch.testing.assert_close(leaf, alone().detach())
        bank.receive()
        rows = torch.cat([weights[name] for name in bank.harden()])
        torch.testing.assert_close(bank.soft.place.grad, rows, rtol=1e-4, atol=1e-3)


def test_failures_are_named():
    model = tiny(layers=1)
    weights = {n: quantize_weight(model.get_submodule(n).weight.data, WeightFormat(3)) for n in names_of(model)}
    with pytest.raises(TextError):
        distill(model, weights, [torch.tensor([1])])
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        distill(model, weights, sequences(4))


@pytest.mark.parametrize("text", ["w2a16g32asym", "w3a4g32"])
def test_learning_a_block_never_makes_it_worse(text):
    model, scheme = tiny(), Scheme.parse(text)
    model.requires_grad_(False)

    def run(refine):
        def quantizer(weight, statistics, name):
            return gptq.quantize(statistics.corrected(weight), statistics.hessian, scheme.weights, name=name)

        return calibrate(
            model, sequences(40), scheme, names_of(model), quantizer, Calibration(batch_tokens=512), refine
        )

    plain, learned = run(None), run(BlockLearning(passes=6, place_rate=0.02))
    assert any(not torch.equal(plain[name].words, learned[name].words) for name in plain)
    check = torch.stack(sequences(60, seed=9)[::3])
    if not scheme.activations.quantized:
        assert divergence(model, learned, check) < divergence(model, plain, check)
    hopeless = run(BlockLearning(passes=1, place_rate=5.0))
    assert all(torch.equal(plain[name].words, hopeless[name].words) for name in plain)


def test_blocks_that_cannot_be_recorded_learn_all_the_same(monkeypatch):
    model, scheme = tiny(layers=1), Scheme.parse("w3a16g32asym")

    def run():
        def quantizer(weight, statistics, name):
            return gptq.quantize(statistics.corrected(weight), statistics.hessian, scheme.weights, name=name)

        settings = Calibration(batch_tokens=512)
        return calibrate(model, sequences(20), scheme, names_of(model), quantizer, settings, BlockLearning(2))

    class Refusing:
        def __call__(self, key, function, *tensors):
            raise RuntimeError("operation not permitted when stream is capturing")

    expected = run()
    monkeypatch.setattr("anybit.quantization.methods.blockwise.GraphRecorder", Refusing)
    with pytest.warns(UserWarning, match="without CUDA graphs, which is slower: operation not permitted"):
        found = run()
    assert all(torch.equal(found[name].words, expected[name].words) for name in expected)


def test_tensors_of_a_call_are_taken_and_put_back_in_one_order():
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    call = Call((a, [b, None]), {"positions": (c, 7), "cache": None})
    assert [t[0].item() for t in call.tensors()] == [0, 1, 2]
    other = call.with_tensors(t + 10 for t in call.tensors())
    assert [t[0].item() for t in other.tensors()] == [10, 11, 12]
    assert other.args[1][1] is None and other.kwargs["positions"][1] == 7 and other.kwargs["cache"] is None


def test_fused_norms_compute_the_same():
    model = tiny(layers=2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    tokens = torch.stack(sequences(9)[::3])
    before = model(tokens).logits
    assert fuse_norms(model) == 5
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-3, atol=1e-4)
    assert len(gains_of(model)) == 5


def test_other_norms_are_left():
    class Centered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    model = torch.nn.Sequential(Centered())
    assert fuse_norms(model) == 0 and isinstance(model[0], Centered)


@pytest.mark.parametrize(("format", "k"), [(WeightFormat(2, "asym", 32), 64), (WeightFormat(3, "asym", 32), 80)])
def test_a_step_forgets_the_gradients_of_the_last(format, k):
    """With whole groups and with a ragged last one."""
    original = torch.randn(6, k, generator=torch.Generator().manual_seed(0))
    weights = {"layer": quantize_weight(original, format)}
    (bank,) = banks(weights, {"layer": original}, torch.float32, FakeQuantWeight)
    seen = []
    for _ in range(2):
        bank.refresh()
        bank.leaves["layer"].grad.fill_(0.5)
        bank.receive()
        seen.append([bank.soft.place.grad.clone(), bank.soft.log_scale.grad.clone()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)
