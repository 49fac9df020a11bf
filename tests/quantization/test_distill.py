"""Distillation: weights start at given codes, learn from the model's predictions, and pack to what they computed."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import quantize_activations
from anybit.codes.rtn import quantize_weight, two_of_four
from anybit.errors import CalibrationError, TextError
from anybit.kernels.attention import kv_page
from anybit.quantization.learn.adam import Adam
from anybit.quantization.learn.fuse import fused, unfused
from anybit.quantization.learn.generated import written
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.latent import Bank, Rates, banks
from anybit.quantization.learn.loop import Course, steps_of
from anybit.quantization.learn.norms import Gains, fuse_norms
from anybit.quantization.learn.rounding import keys_and_values_through, rounded_through
from anybit.quantization.learn.static_step import StaticStep
from anybit.quantization.learn.student import attend_by, gains_of, placed, student_of, without_rotations
from anybit.quantization.methods import distill as module
from anybit.quantization.methods.distill import Distillation, distill
from anybit.quantization.methods.smooth_rotate import smooth_rotate
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.quantization.pipeline.resume import SavedState
from anybit.scheme import ActivationFormat, KVFormat, Scheme, WeightFormat
from cases_calibration import Interrupted, divergence, rounded, sequences, tiny

FORMATS = [
    WeightFormat(2, "asym", 32),
    WeightFormat(3),
    WeightFormat(1, "bipolar", 64),
    WeightFormat(4, sparse=True),
    WeightFormat(3, "asym", 32, sparse=True),
]


def bank_of(weight: QuantizedWeight, original: torch.Tensor) -> Bank:
    bank = Bank({"layer": weight}, lambda name: original, torch.float32, torch.float32)
    bank.refresh()
    return bank


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [64, 72])
def test_latents_start_at_their_codes_and_pack_what_they_compute(format, k):
    g = torch.Generator().manual_seed(0)
    original = torch.randn(6, k, generator=g).half()
    weight = quantize_weight(original, format)
    bank = bank_of(weight, original)
    torch.testing.assert_close(bank.leaves["layer"].detach(), weight.dequantize())
    for count in range(1, 6):
        bank.leaves["layer"].grad.normal_(generator=g)
        bank.step(Rates(0.5, 0.2), count, choosing=count < 3)
        bank.refresh()
    hard = bank.harden()["layer"]
    assert not torch.equal(hard.words, weight.words) and not torch.equal(hard.scale, weight.scale)
    torch.testing.assert_close(bank.leaves["layer"].detach(), hard.dequantize())
    assert hard.format == format and (format.code != "asym" or not torch.equal(hard.zero, weight.zero))


@pytest.mark.parametrize(("format", "k"), [(WeightFormat(2, "asym", 32), 64), (WeightFormat(3, "sym", 32), 80)])
def test_gradients_are_those_of_rounding_straight_through(format, k):
    """By Adam's first moments, with whole groups and with a ragged last one."""
    g = torch.Generator().manual_seed(0)
    original = torch.randn(6, k, generator=g)
    weight = quantize_weight(original, format)
    bank = bank_of(weight, original)
    latent = bank.latent.value.flatten(1)[:, :k].clone().add_(torch.randn(6, k, generator=g))
    bank.latent.value.copy_(bank._grouped(latent))
    bank.refresh()
    groups = torch.arange(k) // 32
    latent, log = latent.requires_grad_(), torch.zeros_like(weight.scale.float(), requires_grad=True)
    zero = weight.zeros().requires_grad_()
    scale = weight.scale.float() * log.exp()
    top = 2**format.bits - 1
    places = latent / scale[:, groups] + zero[:, groups]
    inside = places.clamp(0, top)
    codes = inside + (inside.round() - inside).detach()
    found = (codes - zero[:, groups]) * scale[:, groups]
    torch.testing.assert_close(found.detach(), bank.leaves["layer"].detach())
    gradient = torch.randn(6, k, generator=g)
    (found * gradient).sum().backward()
    bank.leaves["layer"].grad.copy_(gradient)
    bank.step(Rates(), 1)
    torch.testing.assert_close(bank.log_scale.first, 0.1 * log.grad, rtol=1e-3, atol=1e-5)
    if format.code == "asym":
        torch.testing.assert_close(bank.zero.first, 0.1 * zero.grad, rtol=1e-3, atol=1e-5)
    learned = bank.latent.first.flatten(1)[:, :k]
    clipped = (places < 0) | (places > top)
    torch.testing.assert_close(learned[~clipped], 0.1 * latent.grad[~clipped], rtol=1e-4, atol=1e-6)
    # A clipped weight learns only where that leads back into the range.
    back = clipped & ((gradient * scale[:, groups] > 0) == (places > top))
    torch.testing.assert_close(learned[clipped], torch.where(back, 0.1 * gradient, 0.0)[clipped])
    assert 0 < int(back.sum()) < int(clipped.sum())


def test_banks_are_the_layers_that_they_hold():
    g = torch.Generator().manual_seed(0)
    originals = {f"layer{i}": torch.randn(8 + i, 64, generator=g) for i in range(4)}
    weights = {n: quantize_weight(w, WeightFormat(3, "asym", 32)) for n, w in originals.items()}
    weights["layer2"] = quantize_weight(originals["layer2"], WeightFormat(2, "asym", 32))
    index = torch.arange(64, dtype=torch.int32) % 2
    last = weights["layer3"]
    weights["layer3"] = QuantizedWeight(last.words, last.scale, last.zero, (11, 64), last.format, index)
    found = banks(weights, originals.__getitem__, torch.float32, torch.float32)
    assert [sorted(bank.leaves) for bank in found] == [["layer0", "layer1"], ["layer2"], ["layer3"]]
    for bank in found:
        bank.refresh()
        hard = bank.harden()
        for name, leaf in bank.leaves.items():
            alone = bank_of(weights[name], originals[name])
            leaf.grad.normal_(generator=g)
            alone.leaves["layer"].grad.copy_(leaf.grad)
            alone.step(Rates(0.1, 0.1), 1)
            torch.testing.assert_close(leaf.detach(), weights[name].dequantize())
            assert torch.equal(hard[name].words, weights[name].words)
            originals[name] = alone.harden()["layer"]
        bank.step(Rates(0.1, 0.1), 1)
        for name, weight in bank.harden().items():
            torch.testing.assert_close(weight.dequantize(), originals[name].dequantize())


@pytest.mark.parametrize("text", ["w2a16g32asym", "w4a4g32asym-xasym-kv4"])
def test_compiled_steps_and_gradients_are_the_same(text, monkeypatch):
    """By the tracing half of torch.compile, which needs no C compiler; blocks share graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, found = tiny(layers=2), []
    tokens = torch.stack(sequences(20)[::3])
    if "a4" in text:
        smooth_rotate(LazyModel(model), [tokens])
    weights, scheme_of = rounded(model, text)
    for fuse in (unfused, fused):
        own = banks(weights, lambda name: model.get_submodule(name).weight.data, torch.float32, torch.bfloat16, fuse)
        leaves = {name: leaf for bank in own for name, leaf in bank.leaves.items()}
        student = student_of(model, leaves, lambda name: scheme_of(name).activations, scheme_of("").kv)
        gains, teacher = Gains(student), placed(model, model.device)
        without_rotations(teacher, model)
        gradient = KLGradient(teacher, student, 1 << 20, False, fuse, repeatable=False)
        for bank in own:
            bank.refresh()
        losses = []
        for count in range(1, 3):
            losses.append(gradient([tokens])[0])
            for bank in own:
                bank.step(Rates(0.05, 0.01), count)
            gains.step(0.01, count, torch.tensor(1.0))
        found.append((losses, [bank.leaves[name].detach() for bank in own for name in bank.leaves]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4) and found[0][0][-1] < found[0][0][0]
    # Of teacher and student each, whatever their layers: up to attention, in it, and after it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * 4 + 1 + len(own)
    for one, other in zip(*(weights for _, weights in found), strict=True):
        assert float((one - other).norm()) < 0.02 * float(one.norm())


def test_steps_in_sixteen_bits_add_up():
    """Each is a hundredth of the spacing of bfloat16 there, and would be lost by rounding to nearest."""
    adam = Adam.of(torch.full((4000,), 100.0).bfloat16())
    for count in range(1, 201):
        adam.step(torch.ones(4000), 0.005, count)
    assert adam.first.dtype == torch.bfloat16
    assert float(adam.value.float().mean()) == pytest.approx(99.0, abs=0.1)


@pytest.mark.parametrize("text", ["w2a16g32asym", "w1a16g32", "w3a4g32asym-xasym", "w3a16g32-kv2g32rot"])
def test_distillation_improves_a_model_that_it_leaves_alone(text):
    model = tiny(layers=2)
    before = {n: p.clone() for n, p in model.named_parameters()}
    weights, scheme_of = rounded(model, text)
    losses = []
    settings = Distillation(20 * 512, step_tokens=512, rates=Rates(0.03, 0.005, 0.005), half=False)
    found = distill(model, weights, sequences(50), scheme_of, settings, lambda *told: losses.append(told[2]))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert losses[-1] < (0.95 if text == "w1a16g32" else 0.8) * losses[0]
    if "a16" in text and "kv" not in text:
        check = torch.stack(sequences(60, seed=9)[::3])
        assert divergence(model, found.weights, check) < 0.85 * divergence(model, weights, check)
    assert set(found.gains) == {n for n in before if "norm" in n} == set(gains_of(model))
    assert all(bool((gain != 1).any()) for gain in found.gains.values())


def test_two_runs_and_a_resumed_one_are_the_same(tmp_path, monkeypatch):
    model = tiny(layers=1)
    weights, scheme_of = rounded(model, "w2a16g32asym")
    settings = Distillation(10 * 256, step_tokens=256, half=False)

    def interrupt(done, total, loss):
        if done == 6:
            raise Interrupted

    monkeypatch.setattr(module, "_SAVE", 0)
    monkeypatch.setattr(module, "_TIMES", 0)
    saved = SavedState(tmp_path, "learning", "key")
    with pytest.raises(Interrupted):
        distill(model, weights, sequences(30), scheme_of, settings, interrupt, saved)
    steps = []
    found = distill(model, weights, sequences(30), scheme_of, settings, lambda done, *_: steps.append(done), saved)
    assert steps == [7, 8, 9, 10]
    whole = distill(model, weights, sequences(30), scheme_of, settings)
    assert all(torch.equal(found.weights[n].words, whole.weights[n].words) for n in weights)
    assert all(torch.equal(found.weights[n].scale, whole.weights[n].scale) for n in weights)
    assert all(torch.equal(gain, whole.gains[n]) for n, gain in found.gains.items())
    with pytest.raises(CalibrationError, match="another calibration"):
        distill(model, weights, sequences(30), scheme_of, settings, None, SavedState(tmp_path, "learning", "other"))


def test_a_budget_of_seconds_is_kept():
    model = tiny(layers=1)
    weights, scheme_of = rounded(model, "w2a16g32asym")
    told: list[tuple[int, int, float]] = []
    settings = Distillation(0, seconds=3.0, step_tokens=256, half=False)
    began = time.monotonic()
    distill(model, weights, sequences(30), scheme_of, settings, lambda *said: told.append(said))
    assert told[-1][0] <= 3 and told[-1][1] == 4
    assert time.monotonic() - began < 30


def test_rates_rise_and_fall():
    course = Course(steps=1000)
    rates = [course.rate for course.step in range(1000)]
    assert rates[0] == pytest.approx(0.02) and max(rates) > 0.98 and rates[-1] == 0.02
    assert rates.index(max(rates)) < 60 and rates[500] == pytest.approx(0.5)
    timed = Course(seconds=10.0, step=200, elapsed=5.0, fastest=0.05)
    assert timed.rate == pytest.approx(0.5) and not timed.over
    assert Course(seconds=10.0, step=200, elapsed=9.98, fastest=0.05).over
    assert not Course(seconds=10.0, step=1, elapsed=9.0).over  # the first step compiles


@pytest.mark.parametrize("choosing", [0.0, 0.6])
def test_masks_stay_two_of_four(choosing):
    model = tiny(layers=2)
    start, scheme_of = rounded(model, "w8a16s24")
    settings = Distillation(20 * 512, step_tokens=512, rates=Rates(0.03), half=False, choosing=choosing)
    learned = distill(model, start, sequences(50), scheme_of, settings).weights
    changed = False
    for name, weight in learned.items():
        kept = weight.mask()
        assert bool((kept.view(len(kept), -1, 4).sum(-1) == 2).all())
        changed = changed or not torch.equal(kept, start[name].mask())
    assert changed == (choosing > 0)
    check = torch.stack(sequences(60, seed=9)[::3])
    assert divergence(model, learned, check) < 0.7 * divergence(model, start, check)


def test_two_of_four_are_the_largest():
    sizes = torch.tensor([[1.0, 2, 3, 4], [7, 7, 7, 7], [5, 0, 0, 0]])
    kept = [[False, False, True, True], [True, True, False, False], [True, True, False, False]]
    assert two_of_four(sizes).tolist() == two_of_four(sizes.T, 0).T.tolist() == kept


def test_a_model_writes_on_from_pieces_of_a_text():
    model, text = tiny(layers=2), sequences(4)
    model.model.norm.weight.data *= 1000  # so confident that sampling takes the most likely token

    def rows(tokens, starts=text, seed=0):
        return torch.cat(list(written(model, starts, tokens, 48, torch.device("cpu"), seed)))

    found = rows(5 * 48)
    assert found.shape == (5, 48) and found.dtype == torch.int64
    assert torch.equal(found, rows(5 * 48)) and not torch.equal(found, rows(5 * 48, seed=1))
    pieces = {tuple(part.tolist()) for sequence in text for part in sequence.unfold(0, 3, 1)}
    assert all(tuple(row[:3].tolist()) in pieces for row in found)
    with torch.no_grad():
        likely = model(found).logits.argmax(-1)
    assert float((likely[:, 2:-1] == found[:, 3:]).float().mean()) > 0.9
    alone = rows(2 * 48, starts=[])
    assert alone[:, 0].tolist() == [model.config.bos_token_id] * 2
    model.config.bos_token_id = model.config.eos_token_id = None
    with pytest.raises(TextError, match="no BOS token"):
        rows(48, starts=[])


@pytest.mark.parametrize(
    ("kind", "others", "static"),
    [
        ("llama", {}, True),
        ("gemma3_text", {"sliding_window": 32, "head_dim": 8}, True),
        ("gpt2", {}, True),
        ("gemma2", {"head_dim": 8}, False),  # a softcap
        ("mamba", {"state_size": 8}, False),
    ],
)
def test_a_static_cache_writes_what_a_growing_one_does(kind, others, static, monkeypatch):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind != "gpt2":
        sizes |= {"intermediate_size": 48}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    config = AutoConfig.for_model(kind, vocab_size=64, hidden_size=32, **sizes, **special, **others)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.ndim > 1 else None
    with torch.no_grad():
        assert (StaticStep.of(placed(model, model.device), 2, 80) is not None) == static
    attention = model.config._attn_implementation
    found = torch.cat(list(written(model, [], 3 * 80, 80, model.device)))
    monkeypatch.setattr(StaticStep, "of", lambda *given: None)
    assert torch.equal(found, torch.cat(list(written(model, [], 3 * 80, 80, model.device))))
    assert model.config._attn_implementation == attention and len(found[:, -1].unique()) > 1


def test_steps_are_shuffled_and_as_long_as_asked():
    text = [torch.full((8,), i) for i in range(10)] + [torch.tensor([3])]
    steps = steps_of(text, 32)
    found = [next(steps) for _ in range(5)]
    assert all([batch.shape for batch in step] == [(4, 8)] for step in found)
    order = torch.cat([step[0][:, 0] for step in found]).tolist()
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    with pytest.raises(TextError, match="at least 2 tokens"):
        next(steps_of([torch.tensor([1])], 8))


def test_a_student_reads_learnable_embeddings_and_heads():
    """A head tied to a quantized embedding reads its codes, too."""
    model = tiny(layers=1)
    teacher = placed(model, torch.device("cpu"))
    assert teacher.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    leaf = (2 * model.model.embed_tokens.weight.detach()).requires_grad_()
    scheme = Scheme.parse("w4a16")
    student = student_of(teacher, {"model.embed_tokens": leaf}, lambda name: scheme.activations, None)
    tokens = torch.stack(sequences(3)[:1])
    student(input_ids=tokens).logits.sum().backward()
    assert bool((leaf.grad != 0).all())
    assert isinstance(teacher.model.embed_tokens, nn.Embedding) and teacher.lm_head.weight.grad is None
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
        torch.testing.assert_close(student(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("text", ["kv4", "kv2g32t", "k8v4", "k16v4", "kv4g32rot"])
def test_keys_and_values_are_rounded_as_pages_store_them(text):
    format = KVFormat.parse(text)
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 2, 70, 64, generator=g, requires_grad=True) for _ in range(2))
    keys, values = keys_and_values_through(key, value, format)
    (keys.sum() + 2 * values.sum()).backward()
    assert bool((key.grad == 1).all()) and bool((value.grad == 2).all())
    if format.rotate:
        assert 0 < float((keys - key).detach().norm() / key.detach().norm()) < 0.2
        return
    group = format.group
    codes, scale, zero = kv_page.quantize(value.detach().unflatten(-1, (-1, group)), format.value_bits, -1)
    torch.testing.assert_close(values.detach(), (codes * scale + zero).flatten(-2).float())
    if format.key_bits == 16:
        assert torch.equal(keys, key)
    elif format.key_axis == "channel":
        assert torch.equal(keys[..., 64:, :], key[..., 64:, :])  # less than a group of tokens
        codes, scale, zero = kv_page.quantize(key.detach()[..., :group, :], format.key_bits, -2)
        torch.testing.assert_close(keys.detach()[..., :group, :], (codes * scale + zero).float())


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


def test_failures_are_named():
    model = tiny(layers=1)
    weights, scheme_of = rounded(model, "w3a16")
    with pytest.raises(TextError):
        distill(model, weights, [torch.tensor([1])], scheme_of)
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        distill(model, weights, sequences(4), scheme_of)


def test_a_captured_step_has_no_mask_that_steps_before_it_lacked(monkeypatch):
    model, masks = tiny(layers=1), []

    def watched(attend):
        def attention(module, query, key, value, mask, **settings):
            masks.append(mask)
            return attend(module, query, key, value, mask, **settings)

        return attention

    attend_by(model, "watched", watched)
    tokens = torch.stack(sequences(4)[::3])
    before = model(tokens, use_cache=False).logits
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(model(tokens, use_cache=False).logits, before)
    model(tokens[:, :-1], use_cache=False)
    assert masks[:2] == [None, None] and masks[2] is not None, "only sizes that went without a mask before"


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
