"""Block by block calibration of a tiny random model: the right inputs, any lengths, resuming, and clear errors."""

import resource

import pytest
import torch

from anybit.codes.rtn import quantize_weight
from anybit.errors import CalibrationError, TextError
from anybit.quantization.methods import gptq
from anybit.quantization.pipeline import resume
from anybit.quantization.pipeline.blocks import Store
from anybit.quantization.pipeline.calibrate import Calibration, batched, calibrate
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.quantization.pipeline.text import read_sequences, read_text
from anybit.scheme import Scheme
from cases_calibration import Interrupted, divergence, names_of, sequences, tiny

SCHEME = Scheme.parse("w3a16g32asym")


def quantizer(weight, statistics, name):
    return gptq.quantize(statistics.corrected(weight), statistics.hessian, SCHEME.weights, name=name)


def watching(seen):
    """A quantizer that keeps each layer's statistics."""

    def watch(weight, statistics, name):
        seen[name] = statistics
        return quantizer(weight, statistics, name)

    return watch


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].words, b[n].words) and torch.equal(a[n].scale, b[n].scale) for n in a
    )


def test_statistics_are_those_of_the_quantized_model():
    model = tiny(layers=2)
    seen = {}
    tokens = sequences()
    weights = calibrate(LazyModel(model), tokens, SCHEME, names_of(model), watching(seen))
    last = "model.layers.1.mlp.down_proj"
    for n, w in weights.items():
        if n != last:
            model.get_submodule(n).weight.data = w.dequantize()
    inputs = []
    model.get_submodule(last).register_forward_pre_hook(lambda m, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for t in tokens:
            model(t[None])
    x = torch.cat(inputs)
    assert seen[last].tokens == len(x) == sum(map(len, tokens))
    torch.testing.assert_close(seen[last].hessian, x.T @ x / len(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stop_after", [1, 2])
def test_resumed_equals_uninterrupted(tmp_path, stop_after):
    model, tokens = tiny(), sequences()
    settings = Calibration(resume=tmp_path / "resume", spill=tmp_path / "spill", budget=20_000)

    def interrupt(done, total):
        if done == stop_after:
            raise Interrupted

    with pytest.raises(Interrupted):
        calibrate(LazyModel(model), tokens, SCHEME, names_of(model), quantizer, settings, progress=interrupt)
    calls = []

    def counting(weight, statistics, name):
        calls.append(name)
        return quantizer(weight, statistics, name)

    resumed = calibrate(LazyModel(model), tokens, SCHEME, names_of(model), counting, settings)
    assert len(calls) == 4 * (3 - stop_after)
    assert same(resumed, calibrate(LazyModel(model), tokens, SCHEME, names_of(model), quantizer))


def test_blocks_that_cannot_be_kept_are_named_and_leave_nothing(tmp_path, monkeypatch):
    def full(path, content):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    folder = resume.Folder(tmp_path, "key")
    monkeypatch.setattr(resume.Path, "write_bytes", full)
    with pytest.raises(CalibrationError, match="block-0000 cannot be written: No space left on device"):
        folder.write(0, {})
    assert [file.name for file in tmp_path.iterdir()] == ["calibration"]


def test_what_is_not_as_it_was_written_is_not_resumed_from(tmp_path):
    """Not a bit may differ; nor may a block replace another, of this calibration or of another one."""
    weight = quantize_weight(torch.randn(8, 64), SCHEME.weights)
    folder = resume.Folder(tmp_path, "key")
    folder.write(0, {"layer": weight})
    torch.testing.assert_close(folder.read(0, {"layer": SCHEME.weights})["layer"].dequantize(), weight.dequantize())
    file = tmp_path / "block-0000"
    whole = file.read_bytes()
    for bit in torch.randperm(8 * len(whole), generator=torch.Generator().manual_seed(0))[:400].tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert folder.read(0, {"layer": SCHEME.weights}) is None, f"bit {bit}"
    for cut in (b"", whole[:20], whole[:-1], whole + b"\0"):
        file.write_bytes(cut)
        assert folder.read(0, {"layer": SCHEME.weights}) is None
    (tmp_path / "block-0001").write_bytes(whole)
    assert folder.read(1, {"layer": SCHEME.weights}) is None
    other = resume.Folder(tmp_path / "other", "another key")
    (tmp_path / "other" / "block-0000").write_bytes(whole)
    assert other.read(0, {"layer": SCHEME.weights}) is None


def test_found_once_and_remembered(tmp_path):
    made = []

    def make():
        made.append(1)
        return [torch.arange(3), torch.ones(2, 2)]

    for times in (1, 1):
        found = resume.remembered(resume.SavedState(tmp_path / "new", "before", "key"), make)
        assert [x.tolist() for x in found] == [[0, 1, 2], [[1, 1], [1, 1]]]
        assert len(made) == times
    with pytest.raises(CalibrationError, match="another calibration"):
        resume.remembered(resume.SavedState(tmp_path / "new", "before", "other"), make)
    (tmp_path / "new" / "before").write_bytes(b"torn")
    resume.remembered(resume.SavedState(tmp_path / "new", "before", "key"), make)
    assert len(made) == 2
    none = resume.SavedState(tmp_path / "none", "before", "key")
    assert resume.remembered(none, list) == []
    assert resume.remembered(none, make) == []


def test_drift_correction_helps():
    model, tokens = tiny(layers=3), sequences(40)
    check = torch.stack(sequences(60, seed=9)[::3])
    scheme = Scheme.parse("w2a16g32asym")

    def with_strength(strength):
        def run(weight, statistics, name):
            target = statistics.corrected(weight, strength)
            return gptq.quantize(target, statistics.hessian, scheme.weights, name=name)

        return divergence(model, calibrate(LazyModel(model), tokens, scheme, names_of(model), run), check)

    assert with_strength(1.0) < with_strength(0.0)


def test_activations_are_rounded_during_calibration():
    model = tiny(layers=1)
    seen = {}
    calibrate(LazyModel(model), sequences(), Scheme.parse("w3a2g32asym"), names_of(model), watching(seen))
    first = ", ".join(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    coarse = seen[first].hessian
    calibrate(LazyModel(model), sequences(), SCHEME, names_of(model), watching(seen))
    assert not torch.allclose(coarse, seen[first].hessian, rtol=1e-2)


def test_batches_hold_every_token_once():
    tokens = sequences(20)
    batches = batched(tokens, 128)
    assert sorted(torch.cat([b.flatten() for b in batches]).tolist()) == sorted(torch.cat(tokens).tolist())
    assert all(b.numel() <= 128 or len(b) == 1 for b in batches)


@pytest.mark.parametrize("bad", [[], [[1, 2, 3]], [[[1, 2], [3, 4]] * 200]])
def test_too_little_text_is_refused(bad):
    with pytest.raises(TextError):
        batched(bad, 1024)


def test_unreadable_texts_are_named(tmp_path):
    (tmp_path / "latin").write_bytes("caf\xe9 ".encode("latin-1") * 100)
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "wide").write_bytes("text".encode("utf-16-le"))
    says = {"empty": "is empty", "latin": "is not UTF-8", "wide": "save it in UTF-8", "absent": "cannot be read"}
    for name, message in says.items():
        with pytest.raises(TextError, match=f"{name}.*{message}"):
            read_text(tmp_path / name)


def test_a_store_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CalibrationError, match=r"option spill: 80 bytes .* cannot be written into .*File exists"):
        Store(tmp_path / "file", budget=0)[0] = torch.zeros(20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # like a full disk
    try:
        with pytest.raises(CalibrationError, match=r"option spill: 80000 bytes .* name a folder with more space"):
            Store(tmp_path, budget=0)[0] = torch.zeros(20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("fails", [False, True])
def test_spilled_activations_change_nothing_and_go(tmp_path, fails):
    """With a budget of zero, all activations are spilled to files, which are always deleted afterwards."""
    model, held = tiny(), []

    def watched(weight, statistics, name):
        held.append(len(list(tmp_path.glob("*/*.pt"))))
        if fails and "layers.1" in name:
            raise KeyboardInterrupt
        return quantizer(weight, statistics, name)

    spilling = Calibration(spill=tmp_path, budget=0)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            calibrate(LazyModel(model), sequences(), SCHEME, names_of(model), watched, spilling)
    else:
        spilled = calibrate(LazyModel(model), sequences(), SCHEME, names_of(model), watched, spilling)
        whole = calibrate(LazyModel(model), sequences(), SCHEME, names_of(model), quantizer)
        assert all(torch.equal(spilled[name].words, whole[name].words) for name in whole)
    assert min(held) > 0
    assert not list(tmp_path.iterdir())


def test_token_ids_come_from_a_json_file(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text("[[1, 2, 3], [4], []]")
    assert [sequence.tolist() for sequence in read_sequences(file, 10)] == [[1, 2, 3], [4], []]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[1, 2], [3, 10]]", "sequence 1 .* 0 to 9, and holds 10"),
        ("[[1, true]]", "sequence 0 .*true"),
        ("[[1], 5]", "sequence 1 .*5"),
        ("[[1], [null]]", "sequence 1"),
        ("{}", "list of lists"),
        ("[1", "not JSON"),
    ],
)
def test_other_json_is_refused(tmp_path, text, match):
    file = tmp_path / "ids.json"
    file.write_text(text)
    with pytest.raises(TextError, match=match):
        read_sequences(file, 10)
