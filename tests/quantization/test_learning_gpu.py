"""Learning on a GPU: captured steps give the gradients of eager steps."""

import copy
from pathlib import Path

import pytest
import torch

from anybit.codes.rtn import quantize_weight
from anybit.quantization.learn.generated import written
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.latent import Rates
from anybit.quantization.learn.scales import ScaleLearning, learn_scales
from anybit.quantization.methods import distill as distill_module
from anybit.quantization.methods import gptq
from anybit.quantization.methods.distill import Distillation, distill
from anybit.quantization.methods.registry import quantize_folder
from anybit.quantization.methods.scaling_pairs import put_scales
from anybit.quantization.methods.smooth_rotate import smooth_rotate
from anybit.quantization.pipeline.calibrate import LayerQuantizer
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.scheme import Scheme
from cases_calibration import Interrupted, interrupt, loud, names_of, rounded, tiny
from cases_models import save_tiny


def batches(count: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randint(0, 300, (4, 32), generator=g) for _ in range(count)]


def by_gptq(scheme: Scheme) -> LayerQuantizer:
    def quantizer(weight, statistics, name):
        return gptq.quantize(statistics.corrected(weight, 0.5), statistics.hessian, scheme.weights, None, name)

    return quantizer


def test_recorded_steps_give_the_same_gradients():
    teacher = tiny().cuda().requires_grad_(False)
    student = copy.deepcopy(teacher)
    for parameter in student.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
        parameter.requires_grad_().grad = torch.zeros_like(parameter)
    run = KLGradient(teacher, student, 1 << 20, False)
    plain, plain_losses = [], []
    for recorded in (False, True):
        run._records = recorded
        for i, batch in enumerate(batches(4)):
            for parameter in student.parameters():
                parameter.grad.zero_()
            loss, _ = run([batch])
            gradients = [parameter.grad.clone() for parameter in student.parameters()]
            if not recorded:
                plain.append(gradients), plain_losses.append(loss)
                continue
            assert loss == pytest.approx(plain_losses[i], rel=1e-4)
            for found, expected in zip(gradients, plain[i], strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert len(run._graphs) == 1


@pytest.mark.parametrize("text", ["w2a16g32asym", "w3a4g32asym-xasym", "w3a16g32-kv2g32rot", "w4a16g32s24"])
def test_learning_on_a_gpu_improves(text):
    weights, scheme_of = rounded(model := tiny(), text)
    losses: list[float] = []
    rates = Rates(0.02, 0.005, 0.002)
    settings = Distillation(80 * 128, step_tokens=128, rates=rates, choosing=0.5, device="cuda")
    rows = [row for batch in batches(4) for row in batch]
    found = distill(model, weights, rows, scheme_of, settings, lambda *told: losses.append(told[2]))
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert found.gains


@pytest.mark.parametrize("text", ["w2a16g32asym", "w4a4g32asym-xasym-kv4"])
def test_minutes_compile_and_capture(
    text: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word of torch.compile that something failed."""
    monkeypatch.setattr(distill_module, "_LONG_SECONDS", 0)
    model, scheme = tiny(layers=3), Scheme.parse(text)
    if scheme.activations.quantized:
        smooth_rotate(LazyModel(model), batches(4))
    weights, scheme_of = rounded(model, text)
    losses: list[float] = []
    settings = Distillation(0, 70.0, step_tokens=128, rates=Rates(0.02, 0.005, 0.002), device="cuda")
    rows = [row for batch in batches(4) for row in batch]
    found = distill(model, weights, rows, scheme_of, settings, lambda *told: losses.append(told[2]))
    assert found.course.step > 500 and sum(losses[-4:]) < (0.9 if "a4" in text else 0.5) * sum(losses[:4])
    assert "WON'T CONVERT" not in caplog.text
    assert not [str(one.message) for one in recwarn if "slower" in str(one.message) or "longer" in str(one.message)]


def test_text_is_written_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replayed steps write is what eager ones do."""
    model, device = tiny(layers=2), torch.device("cuda")
    found = torch.cat(list(written(model, [], 8 * 160, 160, device)))
    monkeypatch.setattr("anybit.quantization.learn.static_step.can_capture", lambda model: False)
    assert torch.equal(found, torch.cat(list(written(model, [], 8 * 160, 160, device))))
    assert len(found.unique()) > 20


@pytest.mark.parametrize("rotated", [False, True])
def test_scales_learn_on_a_gpu(rotated):
    model, losses = loud(tiny(layers=2)).cuda(), []
    settings = ScaleLearning(24, step_tokens=128, rate=0.05, device="cuda")
    rows = [row for batch in batches(4) for row in batch]
    with torch.no_grad():
        tokens = torch.stack(rows).cuda()
        before = model(tokens).logits
        scales = learn_scales(
            model, rows, Scheme.parse("w4a4").activations, rotated, settings, lambda *told: losses.append(told[2])
        )
        put_scales(LazyModel(model), scales)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("text", ["w2a16g32asym", "w4a4g32asym-xasym"])
def test_learning_twice_is_the_same_bit_for_bit(text):
    """What an interrupted run learns after resuming is what it would have learned."""
    model, scheme = tiny(layers=2), Scheme.parse(text)
    weights = {n: quantize_weight(model.get_submodule(n).weight.data, scheme.weights) for n in sorted(names_of(model))}
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 300, (256,), generator=g) for _ in range(32)]
    settings = Distillation(16 * 2048, step_tokens=2048, device="cuda")
    first, again = (distill(model, weights, rows, lambda name: scheme, settings) for _ in range(2))
    for name, weight in first.weights.items():
        other = again.weights[name]
        assert torch.equal(weight.words, other.words) and torch.equal(weight.scale, other.scale), name
    assert first.gains and all(torch.equal(gain, again.gains[name]) for name, gain in first.gains.items())
    balance = ScaleLearning(6, 2048, device="cuda")
    scales = [learn_scales(model, rows, Scheme.parse("w4a4").activations, True, balance) for _ in range(2)]
    assert all(map(torch.equal, *scales))


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("w2a16g32asym", "distill"),
        ("w4a4g32asym-xasym", "smooth_rotate"),
        ("w6a6g32asym-xasym", "smooth"),
        ("w4a16g32s24", "distill"),
    ],
)
def test_an_interrupted_folder_is_the_same_bit_for_bit(scheme: str, method: str, tmp_path: Path) -> None:
    """Interrupted after a block, then resumed; again from the start; and without a folder to resume from."""
    source = save_tiny("llama-tied", tmp_path / "source")
    g = torch.Generator().manual_seed(4)
    text = [torch.randint(0, 96, (64,), generator=g).tolist() for _ in range(96)]
    options = {"sequences": text, "tokens": 2048, "learn_tokens": 6144, "step_tokens": 1024, "scale_steps": 6}
    options["generated_tokens"] = 2048  # for 2:4 masks
    resumed = options | {"resume": tmp_path / "resume"}
    with pytest.raises(Interrupted):
        quantize_folder(source, tmp_path / "out", scheme, method, options=resumed, progress=interrupt)
    assert not (tmp_path / "out").exists()
    quantize_folder(source, tmp_path / "out", scheme, method, options=resumed)
    quantize_folder(source, tmp_path / "whole", scheme, method, options=options)
    found, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole"))
    assert found == expected
