"""Learning block by block: better than its start for every kind of layer, in its time, resumed, and only if it must."""

import time
from pathlib import Path

import pytest
import torch
from tests.cases_calibration import Interrupted, interrupt, sequences, tiny
from tests.quantization.test_lazy import model_of
from transformers import AutoModelForCausalLM

from anybit.device import memory_of
from anybit.errors import CalibrationError
from anybit.models.blocks import find_blocks, weight_of
from anybit.quantization.learn.loop import Course
from anybit.quantization.methods import distill
from anybit.quantization.methods.gptq import nearest
from anybit.quantization.methods.learn_block import learn_block, relative_error, shuffled
from anybit.quantization.methods.registry import quantize_folder
from anybit.quantization.pipeline import calibrated
from anybit.quantization.pipeline.blocks import Call, Examples, Store, run_block
from anybit.scheme import Scheme

TEXT = {"sequences": [(row % 96).tolist() for row in sequences(40)], "tokens": 1600, "device": "cpu"}
LEARN = TEXT | {"learn_tokens": 2560, "step_tokens": 256, "weight_rate": 0.02}
CHECK = torch.stack([row % 96 for row in sequences(60, seed=9)[::3]])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in which no model can learn as a whole."""
    monkeypatch.setattr(distill, "_SHARE", 1e-9)


def divergence(source: Path, quantized: Path) -> float:
    with torch.no_grad():
        found = [AutoModelForCausalLM.from_pretrained(folder).eval()(CHECK).logits for folder in (source, quantized)]
    p, q = (logits.float().log_softmax(-1) for logits in found)
    return float((p.exp() * (p - q)).sum(-1).mean())


def source_of(kind: str, folder: Path) -> Path:
    """A model whose blocks change what they get, unlike those of random models with small weights."""
    model = model_of(kind)
    for name, parameter in find_blocks(model)[1].named_parameters():
        if "norm" not in name and "router" not in name:
            parameter.data *= 6
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "scheme", "more"),
    [
        ("llama", "w2a16g32asym", {}),
        ("llama", "w3a16g32s24", {"choosing": 0.5}),
        ("llama", "w3a4g32asym-xasym", {}),
        ("mixtral", "w2a16g32asym", {}),
        ("gpt_oss", "w2a16g32asym", {}),
    ],
)
def test_blocks_that_learn_lose_less_than_their_start(
    kind: str, scheme: str, more: dict[str, object], tmp_path: Path
) -> None:
    source, said, options = source_of(kind, tmp_path / "source"), list[str](), LEARN | {"start": "nearest"} | more
    quantize_folder(source, tmp_path / "start", scheme, "distill", options=options | {"learn_tokens": 0})
    with pytest.warns(UserWarning, match=r"takes .* GiB, and cpu has .*: blocks learn one by one, and lose more"):
        saved = quantize_folder(
            source, tmp_path / "out", scheme, "distill", options=options, progress=lambda what, *_: said.append(what)
        )
    assert (
        saved.learned["tokens"] > 1000
        and saved.learned["seconds"] > 0
        and any("block 2 of" in what and "learning" in what for what in said)
    )
    assert divergence(source, tmp_path / "out") < 0.98 * divergence(source, tmp_path / "start")


@pytest.mark.parametrize("nested", [(), (2, 3)])
def test_a_block_learns_what_its_attention_will_read(nested: tuple[int, ...]) -> None:
    """Keys and values rounded, which changes no other block; widths in turn."""
    model = tiny()
    block, scheme = model.model.layers[1].requires_grad_(False), Scheme.parse("w4a16g32asym-kv2g32")
    x = torch.randn(4, 40, 64, generator=torch.Generator().manual_seed(2))
    rotary = model.model.rotary_emb(x, torch.arange(40)[None])
    call = Call((), {"position_embeddings": tuple(part.detach() for part in rotary), "attention_mask": None})
    stores = Store(), Store()
    stores[0][0], stores[1][0] = x, run_block(block, x, call).detach()
    start = {
        name: nearest(weight_of(module), scheme.weights, torch.float16)
        for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)
    }  # fmt: skip
    errors: list[float] = []
    settings = distill.Distillation(half=False, nested=nested)
    found = learn_block(
        block, start, Examples(*stores, [call]), lambda name: scheme, settings, Course(60),
        lambda done, total, loss: errors.append(loss),
    )  # fmt: skip
    turns = len(nested) + 1
    assert all(late < early for early, late in zip(errors[:turns], errors[-turns:], strict=True))
    assert found.keys() == start.keys() and all(found[name].format == scheme.weights for name in found)
    assert torch.equal(run_block(block, x, call), stores[1][0]) and model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("small")
def test_resumed_blocks_are_the_same(tmp_path: Path) -> None:
    source_of("llama", tmp_path / "source")
    options = LEARN | {"resume": tmp_path / "resume"}

    def run(name: str, **more: object) -> bytes:
        with pytest.warns(UserWarning, match="one by one"):
            quantize_folder(tmp_path / "source", tmp_path / name, "w3a16g32", "distill", options=options, **more)  # type: ignore[arg-type]
        return (tmp_path / name / "model.safetensors").read_bytes()

    with pytest.raises(Interrupted):
        run("out", progress=lambda what, *rest: None if "learning" in what else interrupt(what, *rest))
    assert any((tmp_path / "resume").iterdir())
    resumed = run("out")
    options = LEARN
    assert resumed == run("whole")


@pytest.mark.usefixtures("small")
def test_blocks_share_the_minutes(tmp_path: Path) -> None:
    source_of("llama", tmp_path / "source")
    options = TEXT | {"minutes": 0.1, "step_tokens": 256}
    began = time.monotonic()
    with pytest.warns(UserWarning, match="one by one"):
        saved = quantize_folder(tmp_path / "source", tmp_path / "out", "w3a16g32", "distill", options=options)
    assert 1 < saved.learned["seconds"] <= 6 and time.monotonic() - began < 30


@pytest.mark.usefixtures("small")
def test_without_a_text_nothing_learns_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, distill is refused; as the default it becomes rtn, and says so."""
    source_of("llama", tmp_path / "source")
    with pytest.raises(CalibrationError, match=r"GiB, and cpu has .*: give a text \(--text\)"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w2a16g32asym", "distill", options={"device": "cpu"})
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("anybit.quantization.methods.registry.default_method", lambda *_: "distill")
    with pytest.warns(UserWarning, match="this run takes rtn; with a text, blocks learn one by one"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w2a16g32asym", options={"device": "cpu", "minutes": 1})
    quantize_folder(tmp_path / "source", tmp_path / "rtn", "w2a16g32asym", "rtn")
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "rtn")}) == 1


def test_a_model_that_can_write_needs_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("llama", tmp_path / "source")
    size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(source).parameters())
    monkeypatch.setattr(distill, "_SHARE", 8 * size / memory_of(torch.device("cpu")))
    options = {"tokens": 512, "length": 64, "learn_tokens": 512, "step_tokens": 256, "device": "cpu"}
    said: list[str] = []
    with pytest.warns(UserWarning, match="one by one, and lose more"):
        quantize_folder(
            source, tmp_path / "out", "w3a16g32asym", "distill", options=options,
            progress=lambda what, *_: said.append(what),
        )  # fmt: skip
    assert any("generating" in what for what in said) and any("learning: error" in what for what in said)


@pytest.mark.usefixtures("small")
def test_blocks_learn_from_more_text_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []
    monkeypatch.setattr(calibrated, "calibrate", lambda model, text, *rest: seen.append(text) or {})
    options = LEARN | {"generated_tokens": 256, "length": 64}
    with pytest.warns(UserWarning, match="one by one"):
        quantize_folder(
            source_of("llama", tmp_path / "source"), tmp_path / "out", "w3a16g32", "distill", options=options
        )
    assert sum(row.numel() for row in seen[0]) == LEARN["tokens"] + 256


def test_errors_count_relative_to_each_token() -> None:
    wanted = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    loud = wanted * torch.logspace(-3, 3, 5)[:, None]
    assert float(relative_error(wanted * 1.1, wanted)) == pytest.approx(0.01, rel=1e-4)
    assert float(relative_error(loud * 1.1, loud)) == pytest.approx(0.01, rel=1e-4)
    assert float(relative_error(torch.zeros(2, 4), torch.zeros(2, 4))) == 0


def test_every_batch_comes_once_a_round() -> None:
    steps = shuffled(7, 3)
    rounds = [[next(steps) for _ in range(7)] for _ in range(3)]
    assert all(sorted(each) == list(range(7)) for each in rounds) and rounds[0] != rounds[1]
