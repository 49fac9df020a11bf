"""Calibrated methods from folder to folder: save, reload, convert and refuse like rounding, with less loss."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases_calibration import Interrupted, interrupt, sequences
from tests.cases_folders import Sources, config_of, configure, quantization_of
from tests.cases_models import alike, imitate, layers_of, logits_of, save_byte_tokenizer, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, RwkvConfig
from transformers.models.llama import modeling_llama

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.write import convert
from anybit.errors import (
    CalibrationError,
    CheckpointError,
    ConversionError,
    KernelError,
    LayerError,
    OptionError,
    TextError,
)
from anybit.quantization.methods.registry import METHODS, default_method, quantize_folder
from anybit.quantization.pipeline.options import Learning, Options
from anybit.scheme import Scheme

TOKENS = [(s % 96).tolist() for s in sequences(30)]
CHECK = torch.tensor([(s % 96).tolist() for s in sequences(60, seed=9)[::3]])
FAST = {"sequences": TOKENS, "tokens": 900, "learn_tokens": 0}


@pytest.fixture
def llama(sources: Sources) -> Path:
    return sources["llama-tied"]


def divergence(source: Path, quantized: Path) -> float:
    """KL divergence of a quantized folder from its source."""
    loaded = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, quantized))
    p, q = (logits_of(model, CHECK).log_softmax(-1) for model in loaded)
    return float((p.exp() * (p - q)).sum(-1).mean())


def check_saved_again(model: Any, folder: Path) -> None:
    """Saved and reloaded, a model is the same; dequantized, nearly the same."""
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert alike(again, model)
    torch.testing.assert_close(logits_of(again.dequantize(), CHECK), logits_of(model, CHECK), rtol=1e-3, atol=1e-3)


def rotated_of(model: Any) -> list[str]:
    return sorted(name for name, layer in layers_of(model).items() if layer.hadamard)


@pytest.mark.parametrize("method", sorted(m for m in METHODS if METHODS[m].calibrated))
@pytest.mark.parametrize("scheme", ["w3a16g32asym", "w4a6g64"])
def test_calibrated_methods_lose_less(method: str, scheme: str, llama: Path, tmp_path: Path) -> None:
    options = FAST | ({"learn_tokens": 1500, "step_tokens": 256} if method == "distill" else {})
    seen: list[tuple[str, int, int]] = []
    quantize_folder(llama, tmp_path / "rtn", scheme)
    quantize_folder(llama, tmp_path / "out", scheme, method, options=options, progress=lambda *s: seen.append(s))
    assert seen[-1][1] == seen[-1][2]
    assert divergence(llama, tmp_path / "out") < max(divergence(llama, tmp_path / "rtn"), 1e-3)


@pytest.mark.parametrize("method", ["rotate", "smooth_rotate"])
def test_rotated_models_save_reload_and_dequantize(method: str, llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w8a16g32", method, options=FAST)
    turned = quantization_of(tmp_path / "out")["hadamard"]
    downs = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert turned == downs if method == "rotate" else (len(turned) == 14 and set(downs) < set(turned))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert rotated_of(model) == sorted(turned)
    check_saved_again(model, tmp_path / "again")
    assert divergence(llama, tmp_path / "out") < 1e-3
    with pytest.raises(ConversionError, match="hadamard"):
        convert(tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize(
    ("method", "scheme", "count"),
    [("rotate", "w8a8", 0), ("smooth_rotate", "w8a8", 12), ("distill", "w8a4asym", 12), ("distill", "w8a8", 0)],
)
def test_only_quantized_layers_are_rotated(method: str, scheme: str, count: int, llama: Path, tmp_path: Path) -> None:
    """By ``distill`` for activations of 4 bits and fewer."""
    learn = {"learn_tokens": 2000, "step_tokens": 256} if method == "distill" else {}
    quantize_folder(llama, tmp_path / "out", scheme, method, ["down_proj"], options=FAST | learn)
    quantize_folder(llama, tmp_path / "rtn", scheme, "rtn", ["down_proj"])
    rotated = rotated_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert len(rotated) == count and not any("down_proj" in name for name in rotated)
    assert divergence(llama, tmp_path / "out") < max(divergence(llama, tmp_path / "rtn"), 1e-3)


def test_distill_says_that_it_cannot_rotate(tmp_path: Path) -> None:
    source = save_tiny("gpt2", tmp_path / "source")
    options = FAST | {"learn_tokens": 500, "step_tokens": 256}
    with pytest.warns(UserWarning, match=r"distill rotates nothing, .* 4-bit activations: .*h\.0 has no"):
        quantize_folder(source, tmp_path / "out", "w8a4", "distill", options=options)


def test_everything_that_can_be_changed_reloads(llama: Path, tmp_path: Path) -> None:
    learn = {"learn_tokens": 1500, "step_tokens": 256, "gain_rate": "0.01", "device": "cpu"}
    quantize_folder(llama, tmp_path / "rtn", "w3a6g32")
    quantize_folder(llama, tmp_path / "out", "w3a6g32", "rotate", options=FAST | learn)
    assert len(quantization_of(tmp_path / "out")["hadamard"]) == 2
    gain = Folder(tmp_path / "out").read("model.norm.weight")
    assert bool((gain != 1).any())  # rotation leaves ones
    assert divergence(llama, tmp_path / "out") < 0.8 * divergence(llama, tmp_path / "rtn")


def test_without_a_text_distill_writes_its_own(llama: Path, tmp_path: Path) -> None:
    options = {"tokens": 900, "length": 60, "learn_tokens": 3000, "step_tokens": 256, "generated_tokens": 600}
    said: list[str] = []
    for name in ("out", "again"):
        quantize_folder(
            llama, tmp_path / name, "w3a16g32asym", "distill", options=options, progress=lambda *s: said.append(s[0])
        )
    assert any("generating text" in what for what in said) and said[-1].startswith("learning, KL divergence")
    a, b = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again"))
    assert a == b
    quantize_folder(llama, tmp_path / "rtn", "w3a16g32asym", "rtn")
    assert divergence(llama, tmp_path / "out") < max(divergence(llama, tmp_path / "rtn"), 1e-3)


def test_the_default_method_follows_scheme_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(scheme: str, **rest: Any) -> str:
        return default_method(Scheme.parse(scheme), **rest)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [chosen(scheme) for scheme in ("w2a16g64asym", "w3a4", "w4a16g64")] == ["distill", "distill", "rtn"]
    assert chosen("w3a16", device="cpu") == chosen("w3a16", bits=4.5) == "rtn"
    assert chosen("w4a16", bits=3.5) == "distill"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen("w2a16g64asym") == "rtn" and chosen("w2a16", device="cuda:0") == "distill"


@pytest.mark.parametrize(("scheme", "first"), [("w2a16g32asym", "generating"), ("w2a16g32asyms24", "block 1 of 2")])
def test_a_budget_in_minutes_is_for_learning(scheme: str, first: str, llama: Path, tmp_path: Path) -> None:
    """The start is forgotten, so it is rounded to nearest; all but masks, which gptq chooses."""
    said: list[str] = []

    def told(what: str, done: int, total: int) -> None:
        said.append(what)
        if len(said) == 2:
            raise InterruptedError

    options = FAST | {"minutes": 10, "generated_tokens": 64, "device": "cpu"}
    with pytest.raises(InterruptedError):
        quantize_folder(llama, tmp_path / "out", scheme, "distill", options=options, progress=told)
    assert "within" in said[0] and said[1].startswith(first)


def test_weights_that_masks_keep_learn(llama: Path, tmp_path: Path) -> None:
    learn = {"learn_tokens": 6000, "step_tokens": 256, "weight_rate": 0.02, "choosing": 0.3}
    for name, options in (("rtn", {}), ("gptq", FAST), ("distill", FAST | learn)):
        quantize_folder(llama, tmp_path / name, "w4a16g32s24", name, options=options)
    rtn, gptq, distilled = (divergence(llama, tmp_path / name) for name in ("rtn", "gptq", "distill"))
    assert distilled < gptq < rtn
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "distill").eval()
    layers = layers_of(model)
    for layer in layers.values():
        weight = layer.quantized_weight()
        kept = weight.mask()
        assert kept is not None and bool((kept.view(len(kept), -1, 4).sum(-1) == 2).all())
        assert not bool(weight.dequantize()[~kept].any())
    assert layers
    check_saved_again(model, tmp_path / "again")


@pytest.mark.parametrize(
    ("scheme", "method", "more", "dtype"),
    [
        ("w4a16g32", "gptq", {}, torch.float16),
        ("w4a16g32asym", "gptq", {}, torch.bfloat16),
        ("w3a16g32asym", "distill", {"learn_tokens": 600, "step_tokens": 256}, torch.bfloat16),
        ("w4a4g32", "smooth_rotate", {"scale_steps": 2}, torch.float32),
        ("w6a6g32", "smooth", {"scale_steps": 2}, torch.bfloat16),
        ("w4a16g32s24", "distill", {"learn_tokens": 600, "step_tokens": 256, "generated_tokens": 80}, torch.float16),
    ],
)
def test_resumed_folder_is_the_same(scheme, method, more, dtype, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(llama, dtype=dtype).save_pretrained(source)
    options = FAST | more | {"resume": tmp_path / "resume"}
    with pytest.raises(Interrupted):
        quantize_folder(source, tmp_path / "out", scheme, method, options=options, progress=interrupt)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    quantize_folder(
        source, tmp_path / "out", scheme, method, options=options, progress=lambda what, *_: said.append(what)
    )
    assert not any("scales" in what for what in said)  # they come from the folder
    quantize_folder(source, tmp_path / "whole", scheme, method, options=FAST | more)
    a, b = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "whole"))
    assert a == b
    with pytest.raises(CalibrationError, match="another calibration"):
        quantize_folder(source, tmp_path / "other", scheme, method, options=options | {"drift": 0.25, "tokens": 300})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, TextError, "--text"),
        ({"text": "/nowhere.txt"}, TextError, "nowhere"),
        ({"sequences": [[1, 2, 3]]}, TextError, "at least"),
        ({"sequences": "text"}, OptionError, "lists of token ids from 0 to 95; sequence 0 is not one"),
        ({"sequences": [*TOKENS, [1, 96]]}, OptionError, "sequence 30 is not one"),
        ({"sequences": [[-1] * 300]}, OptionError, "sequence 0 is not one"),
        ({"sequences": [0.5]}, OptionError, "sequence 0 is not one"),
        ({"typo": 1}, OptionError, "typo"),
        ({"tokens": "many"}, OptionError, "tokens"),
        ({"drift": 2}, OptionError, "drift"),
        ({"passes": 2.9}, OptionError, r"option passes must be a whole number, not 2\.9"),
        ({"tokens": True}, OptionError, "option tokens must be a whole number, not True"),
        ({"drift": math.nan}, OptionError, "option drift must be a finite number, not nan"),
        ({"scale_rate": math.inf}, OptionError, "option scale_rate must be a finite number, not inf"),
        ({"gain_rate": "nan"}, OptionError, "option gain_rate must be a finite number, not 'nan'"),
        ({"learn_tokens": -5}, OptionError, "option learn_tokens must be at least 0, not -5"),
        ({"minutes": 1, "learn_tokens": 9}, OptionError, "minutes and learn_tokens both say how long to learn"),
        ({"step_tokens": 0}, OptionError, "option step_tokens must be at least 1, not 0"),
        ({"generated_tokens": -1}, OptionError, "option generated_tokens must be at least 0, not -1"),
        ({"choosing": 1.5}, OptionError, "option choosing must be at least 0 and at most 1, not 1.5"),
        ({"device": "tpu"}, KernelError, "device 'tpu' is unknown; write cpu"),
        ({"device": 7.5}, KernelError, "device 7.5 is unknown; write cpu"),
        ({"device": "meta"}, KernelError, "device 'meta' is unknown; write cpu"),
        ({"device": "cuda:99"}, KernelError, "device 'cuda:99' does not exist: torch sees"),
        (FAST | {"order": "random"}, OptionError, "order"),
        (FAST | {"start": "zero"}, OptionError, "start must be gptq or nearest"),
        (FAST | {"drift": None}, OptionError, r"option drift cannot be null: leave it out, and it is 0\.5"),
        ({"tokens": math.inf}, OptionError, "tokens"),
        (FAST | {"seed": 2**64}, OptionError, "seed must be at least 0 and at most 18446744073709551615"),
        (FAST | {"resume": "/proc/x"}, CalibrationError, "/proc/x cannot be one: No such file or directory"),
        (FAST | {"resume": __file__}, CalibrationError, r"test_methods\.py cannot be one: File exists"),
        (FAST | {"spill": "/proc/x"}, CalibrationError, r"spill .* activations, and /proc/x cannot be one: No"),
        (FAST | {"spill": __file__}, CalibrationError, r"test_methods\.py cannot be one: File exists"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(options, error, match, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        quantize_folder(llama, tmp_path / "out", "w4a16g32", "gptq", options=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_no_sequence_is_longer_than_a_table_of_positions(method: str, tmp_path: Path) -> None:
    """gpt2's has 64 positions; without length, text is cut into sequences that fit."""
    source, text = save_tiny("gpt2", tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(" ".join(map(chr, range(97, 123))) * 40)
    config = config_of(source) | {"vocab_size": save_byte_tokenizer(source)}
    GPT2LMHeadModel(GPT2Config(**config)).save_pretrained(source)
    more: dict[str, Any] = {"bits": 5.0} if method == "rtn" else {}
    long = tmp_path / "long.json"
    long.write_text(json.dumps([[1] * 300, []]))
    options = {"text": text, "tokens": 300}
    for wrong, error, match in (
        (options | {"length": 65}, OptionError, "option length must be at most 64, the positions of this model, not"),
        ({"text": long}, TextError, "sequence 0 has 300 tokens, but this model has only 64 positions"),
        ({"sequences": [[], [2] * 65]}, TextError, "sequence 1 has 65 tokens"),
    ):
        with pytest.raises(error, match=match):
            quantize_folder(source, tmp_path / "out", "w4a16g32", method, options=wrong, **more)
    quantize_folder(source, tmp_path / "out", "w4a16g32", method, options=options, **more)


def test_empty_sequences_are_left_out(llama: Path, tmp_path: Path) -> None:
    options = {"sequences": [[], *TOKENS[:8], []]}
    assert quantize_folder(llama, tmp_path / "out", "w4a16g32", bits=5.0, options=options).overrides
    with pytest.raises(TextError, match="has no tokens"):
        quantize_folder(llama, tmp_path / "none", "w4a16g32", bits=5.0, options={"sequences": [[], []]})


@pytest.mark.parametrize("method", ["gptq", "distill", "smooth"])
@pytest.mark.parametrize("fault", ["infinite", "unreached", "encoding"])
def test_failures_under_way_name_the_layer_and_leave_nothing(fault, method, llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    mlp = model.model.layers[1].mlp
    if fault == "infinite":
        mlp.up_proj.weight.data.fill_(1e38), mlp.gate_proj.weight.data.fill_(1e38)
    elif fault == "unreached":
        mlp.up_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 400)
    options = {"text": tmp_path / "latin.txt"} if fault == "encoding" else FAST
    error, name = (TextError, "latin.txt") if fault == "encoding" else (CalibrationError, r"layers\.1\.mlp\.down_proj")
    with pytest.raises(error, match=name):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w4a8g32", method, options=options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latin.txt", "source"]


def test_what_learns_by_itself() -> None:
    def learning(method: str, scheme: str, **given: object) -> Learning | None:
        return Options.of(given).learning(method, Scheme.parse(scheme))

    for device in ("cpu", "cuda"):
        assert learning("gptq", "w4a4g64", device=device) is None
        assert learning("rotate", "w4a16g64", device=device) is None
        given = learning("gptq", "w3a16", device=device, learn_tokens=700)
        assert given is not None and (given.minutes, given.settings.tokens) == (0, 700)
        assert learning("distill", "w3a16", device=device, learn_tokens=0) is None
    assert learning("rotate", "w4a4g64", device="cpu") is None
    rotated, ours = learning("rotate", "w4a4g64", device="cuda"), learning("distill", "w3a16g64", device="cuda")
    assert rotated is not None and (rotated.minutes, rotated.settings.tokens) == (0, 1 << 21)
    assert ours is not None and (ours.minutes, ours.settings.tokens, ours.generated) == (20, 0, None)
    small = learning("distill", "w3a16g64", device="cpu")
    assert small is not None and (small.minutes, small.generated) == (0, 0) and small.settings.tokens > 0
    chosen = learning("distill", "w2a16", minutes="2.5", step_tokens=64, device="cpu", weight_rate=0.5)
    assert chosen is not None and (chosen.minutes, chosen.settings.step_tokens) == (2.5, 64)
    assert chosen.settings.rates.weight == 0.5
    for device, scheme, steps in (("cuda", "w6a6", 64), ("cpu", "w6a6", 0), ("cuda", "w4a16g64", 0)):
        assert Options.of({"device": device}).scale_learning(Scheme.parse(scheme)).steps == steps
    assert Options.of({"device": "cpu", "scale_steps": 3}).scale_learning(Scheme.parse("w6a6")).steps == 3


def test_an_existing_folder_is_refused_before_the_work(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CheckpointError, match="exists"):
        quantize_folder(llama, tmp_path, "w4a16g32", "gptq", options=FAST, progress=lambda *s: pytest.fail("too late"))


def test_other_architectures_cannot_be_rotated(tmp_path: Path) -> None:
    source = save_tiny("opt", tmp_path / "source")
    quantize_folder(source, tmp_path / "gptq", "w4a16g32", "gptq", options=FAST | {"length": 40})
    with pytest.raises(LayerError, match=r"layers\.0"):
        quantize_folder(source, tmp_path / "out", "w4a16g32", "rotate", options=FAST)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rotate", "smooth", "smooth_rotate"])
def test_what_would_compute_otherwise_is_refused(method: str, llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Gains stored minus one, as in many families and custom models."""
    norm = modeling_llama.LlamaRMSNorm
    plain = norm.forward

    def centred(self: Any, x: Tensor) -> Tensor:
        return plain(self, x) / self.weight * (1 + self.weight)

    model = AutoModelForCausalLM.from_pretrained(llama)
    for part in model.modules():
        if isinstance(part, norm):
            torch.nn.init.normal_(part.weight, 0.5, 0.3)
    model.save_pretrained(tmp_path / "source")
    monkeypatch.setattr(norm, "forward", centred)
    with pytest.raises(LayerError, match=f"does not support method {method}: its logits changed by .*%"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w4a8g32", method, options=FAST)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rotate", "smooth"])
def test_tensors_keep_the_dtype_that_each_of_them_has(method: str, llama: Path, tmp_path: Path) -> None:
    """Weights in bfloat16, in the first file, and gains in float32."""
    source, saved = tmp_path / "source", load_file(llama / "model.safetensors")
    shutil.copytree(llama, source)
    (source / "model.safetensors").unlink()
    norms = {name: tensor + 1 / 300 for name, tensor in saved.items() if "norm" in name}
    rest = {name: tensor.bfloat16() for name, tensor in saved.items() if "norm" not in name}
    save_file(rest, source / "a.safetensors"), save_file(norms, source / "b.safetensors")
    places = dict.fromkeys(rest, "a.safetensors") | dict.fromkeys(norms, "b.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    quantize_folder(source, tmp_path / "out", "w8a16g32", method, options=FAST)
    found = load_file(tmp_path / "out" / "model.safetensors")
    last = norms["model.norm.weight"] if method == "smooth" else torch.ones(64)
    assert torch.equal(found["model.norm.weight"], last)
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert method == "smooth" or found["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_rwkv_computes_with_its_codes(method: str, tmp_path: Path) -> None:
    """Its blocks return a state, too; and unless told not to, it divides the weights of late blocks in place."""
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128}
    config = RwkvConfig(vocab_size=96, num_hidden_layers=4, context_length=64, rescale_every=2, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(source := tmp_path / "source")
    options = {} if method == "rtn" else {"sequences": TOKENS, "tokens": 900}
    quantize_folder(source, tmp_path / "out", "w4a16g32", method, options=options)
    quantized, plain = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (tmp_path / "out", source))
    imitate(plain, quantized)
    torch.testing.assert_close(logits_of(quantized, CHECK), logits_of(plain, CHECK), rtol=1e-3, atol=1e-4)


def test_what_to_keep_of_mamba_is_said(tmp_path: Path) -> None:
    """It multiplies by the weight of dt_proj itself: the layer is never called."""
    config = MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    options = {"sequences": TOKENS, "tokens": 900}
    with pytest.raises(CalibrationError, match=r"never reaches \S+\.dt_proj: .* --keep dt_proj \(modules_to_not_conv"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w4a16g32", "gptq", options=options)
    quantize_folder(tmp_path / "source", tmp_path / "out", "w4a16g32", "gptq", ["dt_proj"], options=options)


def test_a_model_that_cannot_be_walked_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, **rest: Any) -> Any:
        raise ValueError("not enough values to unpack (expected 3, got 1)")

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    says = r"LlamaForCausalLM cannot be calibrated block by block \(not enough .*\): use method rtn"
    with pytest.raises(CalibrationError, match=says):
        quantize_folder(llama, tmp_path / "out", "w4a16g32", "gptq", options=FAST)


def test_a_folder_of_method_onebit_is_refused(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, out := tmp_path / "out", "w1a16")
    configure(out, {"input_scale": True})
    for door in (Folder, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match="written by method onebit, which is gone: quantize the original mod"):
            door(out)
