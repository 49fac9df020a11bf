"""Learning on a GPU: captured steps give the gradients of eager steps."""

import copy
from pathlib import Path

import pytest
import torch

from anybit.codes.rtn import quantize_weight
from anybit.quantization.learn import cuda_graphs as recordings
from anybit.quantization.learn.cuda_graphs import GraphRecorder
from anybit.quantization.learn.kl_gradient import KLGradient
from anybit.quantization.learn.scales import ScaleLearning, learn_scales, put_scales
from anybit.quantization.methods import gptq
from anybit.quantization.methods.blockwise import BlockLearning
from anybit.quantization.methods.distill import Distillation, distill
from anybit.quantization.methods.registry import quantize_folder
from anybit.quantization.pipeline.calibrate import Calibration, LayerQuantizer, calibrate
from anybit.scheme import Scheme
from cases_calibration import divergence, loud, names_of, tiny
from cases_models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


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
    run = KLGradient(teacher, student, False, torch.device("cuda"))
    plain, plain_losses = [], []
    for recorded in (False, True):
        run._records = recorded
        for i, batch in enumerate(batches(4)):
            for parameter in student.parameters():
                parameter.grad.zero_()
            loss = run([batch])
            gradients = [parameter.grad.clone() for parameter in student.parameters()]
            if not recorded:
                plain.append(gradients), plain_losses.append(loss)
                continue
            assert loss == pytest.approx(plain_losses[i], rel=1e-4)
            for found, expected in zip(gradients, plain[i], strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert len(run._graphs) == 1


@pytest.mark.parametrize("text", ["w2a16g32asym", "w3a4g32asym-xasym"])
def test_learning_on_a_gpu_improves(text):
    model, scheme = tiny().cuda(), Scheme.parse(text)
    weights = {
        n: quantize_weight(model.get_submodule(n).weight.data, scheme.weights).to("cpu") for n in names_of(model)
    }
    losses: list[float] = []
    settings = Distillation(passes=20, step_tokens=128, place_rate=0.02, gain_rate=0.002, device="cuda")
    tuned: dict[str, torch.Tensor] = {}
    rows = [row for batch in batches(4) for row in batch]
    distill(model, weights, rows, settings, scheme.activations, lambda done, total, loss: losses.append(loss), tuned)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert tuned


def test_resumed_on_a_gpu_equals_uninterrupted(tmp_path):
    """Captured and replayed layers equal those of a run that starts in the middle, bit for bit."""
    model, scheme = tiny(layers=4), Scheme.parse("w3a16g32asym")
    tokens = [row for batch in batches(8) for row in batch]

    class Interrupted(Exception):
        pass

    def interrupt(done, total, left):
        if done == 2:
            raise Interrupted

    settings = Calibration(device="cuda", resume=tmp_path)
    with pytest.raises(Interrupted):
        calibrate(model, tokens, scheme, names_of(model), by_gptq(scheme), settings, progress=interrupt)
    gptq._RECORDER = GraphRecorder()  # as in a new process
    resumed = calibrate(model, tokens, scheme, names_of(model), by_gptq(scheme), settings)
    gptq._RECORDER = GraphRecorder()
    whole = calibrate(model, tokens, scheme, names_of(model), by_gptq(scheme), Calibration(device="cuda"))
    for name, weight in whole.items():
        for part in ("words", "scale", "zero"):
            assert torch.equal(getattr(weight, part), getattr(resumed[name], part)), name


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
        put_scales(model, scales)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("text", ["w2a16g32asym", "w4a4g32asym-xasym"])
def test_learning_twice_is_the_same_bit_for_bit(text):
    """What an interrupted run learns after resuming is what it would have learned."""
    model, scheme = tiny(layers=2).cuda(), Scheme.parse(text)
    weights = {
        n: quantize_weight(model.get_submodule(n).weight.data, scheme.weights).to("cpu") for n in names_of(model)
    }
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 300, (256,), generator=g) for _ in range(32)]
    settings = Distillation(passes=4, step_tokens=2048, run_tokens=2048, gain_rate=0.002, device="cuda")
    found = []
    for _ in range(2):
        tuned: dict[str, torch.Tensor] = {}
        found.append((distill(model, weights, rows, settings, scheme.activations, None, tuned), tuned))
    (first, gains), (second, again) = found
    for name, weight in first.items():
        assert torch.equal(weight.words, second[name].words) and torch.equal(weight.scale, second[name].scale), name
    assert gains and all(torch.equal(gain, again[name]) for name, gain in gains.items())
    balance = ScaleLearning(6, 2048, device="cuda")
    scales = [learn_scales(model, rows, Scheme.parse("w4a4").activations, True, balance) for _ in range(2)]
    assert all(map(torch.equal, *scales))


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("w2a16g32asym", "distill"),
        ("w4a4g32asym-xasym", "smooth_rotate"),
        ("w6a6g32asym-xasym", "smooth"),
        ("w3a16g32asym", "blockwise"),
        ("w3a6g32", "blockwise"),
        ("w4a16g32s24", "distill"),
    ],
)
def test_an_interrupted_folder_is_the_same_bit_for_bit(scheme: str, method: str, tmp_path: Path) -> None:
    """Interrupted after a block, then resumed; again from the start; and without a folder to resume from."""

    class Interrupted(Exception):
        pass

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("block"):
            raise Interrupted

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


def test_learning_a_block_on_a_gpu_improves(monkeypatch):
    """In captured steps as well as in eager ones, which models with data-dependent control flow need."""
    model, scheme = tiny(layers=2), Scheme.parse("w2a16g32asym")
    rows = [row for batch in batches(16) for row in batch]

    def run(refine):
        settings = Calibration(device="cuda", batch_tokens=512)
        return calibrate(model, rows, scheme, names_of(model), by_gptq(scheme), settings, refine)

    plain, learned = run(None), run(BlockLearning(16))
    monkeypatch.setattr(recordings, "_MOST", 0)
    eager = run(BlockLearning(16))
    check = torch.randint(0, 300, (8, 32), generator=torch.Generator().manual_seed(7))
    assert divergence(model, learned, check) < divergence(model, plain, check)
    assert divergence(model, eager, check) < divergence(model, plain, check)
    for name, weight in learned.items():
        same = (weight.codes() == eager[name].codes()).float().mean()
        assert same > 0.95, name
