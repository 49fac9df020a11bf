"""Per-layer schemes: streamed or quantized while loading, saved, fused, refused; tied heads, too."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_folders import Sources
from tests.cases_models import alike, layers_of, logits_of, save_byte_tokenizer, save_tiny, schemes_of, tokens_of
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import anybit
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.write import convert, convert_into
from anybit.cli import app
from anybit.errors import ConversionError, LayerError, OptionError, SchemeError
from anybit.hf.evaluate import bits_per_weight
from anybit.hf.fuse import SideBySide
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder

MIXED = {"lm_head": "w8a16", "*.down_proj": "w6a16g32", "model.layers.0.self_attn.v_proj": "w5a8"}


TEXT = {"sequences": [[i * k % 95 for i in range(64)] for k in range(1, 9)]}


def stored_bytes(folder: Path, model: Any) -> int:
    """The bytes of a model's quantized layers in its folder."""
    layers = layers_of(model)
    return sum(e.bytes for name, e in Folder(folder).entries.items() if name.rpartition(".")[0] in layers)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        *((name, MIXED) for name in ("llama", "llama-tied", "gemma3")),
        ("gpt2", {"lm_head": "w8a16", "*.c_proj": "w6a16g32"}),
    ],
)
def test_streamed_is_quantized_while_loading_is_reloaded(architecture, overrides, sources, tmp_path) -> None:
    source = sources[architecture]
    saved = quantize_folder(source, tmp_path / "out", "w4a16g64asym", overrides=overrides)
    streamed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    config = anybit.AnyBitConfig("w4a16g64asym", overrides=overrides)
    loaded = AutoModelForCausalLM.from_pretrained(source, quantization_config=config).eval()
    schemes = schemes_of(streamed)
    assert alike(streamed, loaded)
    assert len(schemes) == saved.layers and schemes["lm_head"] == "w8a16"
    assert set(schemes.values()) == {"w4a16g64asym", *overrides.values()}
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert alike(streamed, again)
    assert tokens_of(again.dequantize(dtype=torch.float32)) == tokens_of(streamed)


@pytest.mark.parametrize(
    ("architecture", "overrides", "shared"),
    [
        ("llama", {"model.embed_tokens": "w8a16"}, False),
        ("llama-tied", {"model.embed_tokens": "w8a16"}, True),
        ("llama-tied", {"model.embed_tokens": "w6a16g64asym", "lm_head": "w6a16g64asym"}, True),
        ("llama-tied", {"model.embed_tokens": "w4a16g32", "lm_head": "w8a16"}, False),
    ],
)
def test_an_embedding_by_name(architecture, overrides, shared, sources: Sources, tmp_path: Path) -> None:
    """Streamed, quantized while loading, saved and dequantized; a tied head has the embedding's codes or its own."""
    source = sources[architecture]
    saved = quantize_folder(source, tmp_path / "out", "w4a16g64", overrides=overrides)
    config = anybit.AnyBitConfig("w4a16g64", overrides=overrides)
    loaded = AutoModelForCausalLM.from_pretrained(source, quantization_config=config).eval()
    streamed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert alike(streamed, loaded)
    weight = Folder(source).read("model.embed_tokens.weight")
    wanted = anybit.quantize_weight(weight, anybit.Scheme.parse(overrides["model.embed_tokens"]).weights)
    ids = torch.tensor([[3, 0, 94], [7, 7, 1]])
    assert torch.equal(streamed.model.embed_tokens(ids), wanted.dequantize(weight.dtype)[ids])
    own = [name for name in Folder(tmp_path / "out").entries if name.startswith("lm_head.weight")]
    assert bool(own) != shared
    if shared:
        x = torch.randn(2, weight.shape[1])
        assert torch.allclose(streamed.lm_head(x), x @ wanted.dequantize().T, atol=1e-4)
        assert torch.equal(streamed.lm_head.weight, wanted.dequantize(weight.dtype))
    assert saved.bits_per_weight == pytest.approx(8 * stored_bytes(tmp_path / "out", streamed) / saved.weights)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    tokens = tokens_of(streamed)
    assert alike(loaded, again) and tokens == tokens_of(again) == tokens_of(copy.deepcopy(again))
    anybit.fuse(streamed)
    assert tokens_of(streamed, cache_implementation="static") == tokens
    plain = again.dequantize(dtype=torch.float32)
    assert tokens_of(plain) == tokens
    assert shared == (plain.lm_head.weight is plain.model.embed_tokens.weight)
    shown = CliRunner().invoke(app, ["info", str(tmp_path / "out"), "--json"])
    facts = json.loads(shown.stdout)
    assert facts["embedding_weights"] == weight.numel() and "model.embed_tokens" not in facts["kept"]
    assert facts["bits_per_weight"] == pytest.approx(saved.bits_per_weight, abs=1e-4)


def test_gptq_rounds_the_embedding_and_a_budget_counts_it(sources: Sources, tmp_path: Path) -> None:
    source, overrides = sources["llama-tied"], {"model.embed_tokens": "w8a16g32"}
    ordered = {**TEXT, "order": "sorted"}
    quantize_folder(source, tmp_path / "gptq", "w3a16g32", "gptq", overrides=overrides, options=ordered)
    weight = Folder(source).read("model.embed_tokens.weight")
    codes = anybit.quantize_weight(weight, anybit.Scheme.parse("w8a16g32").weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq")
    assert torch.equal(model.model.embed_tokens.dequantize(), codes.dequantize())
    with pytest.raises(ConversionError, match=r"model\.embed_tokens is a quantized embedding"):
        convert_into(tmp_path / "gptq", "gguf", tmp_path / "m.gguf")
    found = quantize_folder(source, tmp_path / "bits", "w4a16g32", overrides=overrides, bits=6.0, options=TEXT)
    assert 5.5 < found.bits_per_weight <= 6.0


def test_gptq_takes_overrides_and_says_true_bits(sources: Sources, tmp_path: Path) -> None:
    more = {"overrides": MIXED, "options": {**TEXT, "passes": 1}}
    saved = quantize_folder(sources["llama-tied"], tmp_path / "out", "w3a16g32", "gptq", **more)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    values = [schemes_of(model)[f"model.layers.{i}.self_attn.v_proj"] for i in (0, 1)]
    assert values == ["w5a8", "w3a16g32"]
    assert saved.bits_per_weight == pytest.approx(8 * stored_bytes(tmp_path / "out", model) / saved.weights)
    with pytest.raises(OptionError, match=r"smooth has one scheme for all layers; overrides work with rtn, gptq, dis"):
        quantize_folder(sources["llama-tied"], tmp_path / "no", "w3a16g32", "smooth", **more)


def test_widths_embeddings_and_heads_learn_together(sources: Sources, tmp_path: Path) -> None:
    source, schemes = sources["llama-tied"], {"model.embed_tokens": "w4a16g32", "lm_head": "w6a16g32"}
    options = {**TEXT, "passes": 1, "learn_tokens": 2048, "step_tokens": 256, "weight_rate": 0.03, "device": "cpu"}
    overrides = {"*.down_proj": "w4a8g32", **schemes}
    saved = quantize_folder(source, tmp_path / "out", "w3a16g32", "distill", overrides=overrides, options=options)
    assert saved.schemes == {"w3a16g32": 12, "w4a8g32": 2, "w4a16g32": 1, "w6a16g32": 1}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = Folder(source).read("model.embed_tokens.weight")
    for name, scheme in schemes.items():
        nearest = anybit.quantize_weight(weight, anybit.Scheme.parse(scheme).weights).dequantize()
        learned = model.get_submodule(name).dequantize()
        assert 0 < float((learned - nearest).norm() / nearest.norm()) < 0.2


@pytest.mark.parametrize(
    ("overrides", "kept", "error", "message"),
    [
        ({"*.dwon_proj": "w6a16"}, None, LayerError, r"'\*.dwon_proj' matches no layer .* end in q_proj, k_proj"),
        ({"lm_hea*": "w6a16"}, None, LayerError, "lm_head stays in 16 bits: name it in full"),
        ({"*.embed_tokens": "w6a16"}, None, LayerError, "model.embed_tokens stays in 16 bits: name it in full"),
        ({"embed_tokens": "w8a16"}, None, LayerError, "'embed_tokens' is not a full name: write model.embed_tokens"),
        ({"model.embed_tokens": "w8a8"}, None, LayerError, "an embedding multiplies no activations that w8a8"),
        ({"model.embed_tokens": "w4a16s24"}, None, LayerError, "an embedding is not pruned"),
        ({"lm_head": "w6a16"}, ["lm_head"], LayerError, "lm_head stays in 16 bits: remove it from modules_to"),
        ({"*.down_proj": "w9a16"}, None, SchemeError, r"\*.down_proj: .*w9a16"),
        ({"*.down_proj": "w4a16-kv4"}, None, SchemeError, "a layer has no KV cache"),
    ],
)
def test_overrides_without_effect_are_refused(overrides, kept, error, message, llama, tmp_path) -> None:
    with pytest.raises(error, match=message):
        quantize_folder(llama, tmp_path / "out", "w4a16", "rtn", kept, overrides=overrides)
    with pytest.raises(error, match=message):
        config = anybit.AnyBitConfig("w4a16", modules_to_not_convert=kept, overrides=overrides)
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    assert not (tmp_path / "out").exists()


def test_projections_of_one_input_in_different_schemes_are_fused(sources: Sources, tmp_path: Path) -> None:
    overrides = {"*.layers.0.*.v_proj": "w6a16g32", "*.layers.1.*.up_proj": "w8a16", "lm_head": "w8a16"}
    quantize_folder(sources["llama-wide"], tmp_path / "out", "w4a16g32", overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    state, logits, tokens = model.state_dict(), logits_of(model), tokens_of(model)
    anybit.fuse(model)
    apart = [(isinstance(layer.qkv, SideBySide), isinstance(layer.gate_up, SideBySide)) for layer in model.model.layers]
    assert apart == [(True, False), (False, True)]
    assert torch.allclose(logits_of(model), logits, atol=1e-4)
    assert tokens_of(model) == tokens_of(model, cache_implementation="static") == tokens
    anybit.unfuse(model)
    again = model.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)


def test_the_command_line_takes_and_shows_overrides(tmp_path: Path) -> None:
    source, out = save_tiny("llama-tied", tmp_path / "source"), str(tmp_path / "out")
    save_byte_tokenizer(source)
    words = ["--override", "lm_head=w8a16", "--override", "*.down_proj=w6a16g32"]
    run = CliRunner().invoke
    result = run(app, ["quantize", str(source), "-s", "w4a16g32", *words, "-o", out])
    assert result.exit_code == 0, result.output
    assert "12 layers in w4a16g32, 2 in w6a16g32, 1 in w8a16," in result.stdout
    shown = json.loads(run(app, ["info", out, "--json"]).stdout)
    assert shown["overrides"] == ["lm_head=w8a16", "*.down_proj=w6a16g32"] and shown["linear_layers"] == 15
    assert shown["scheme"] == "w4a16g32, 2 layers w6a16g32, 1 layer w8a16"
    loaded = load_model(source, "w4a16g32", overrides=dict(word.split("=") for word in words[1::2]), device="cpu")
    reloaded = load_model(out, device="cpu").model
    assert tokens_of(loaded.model) == tokens_of(reloaded)
    assert shown["bits_per_weight"] == pytest.approx(8 * sum(
        entry.bytes for name, entry in Folder(out).entries.items() if ".weight_" in name
    ) / shown["linear_weights"], abs=1e-4)  # fmt: skip
    assert bits_per_weight(reloaded) < shown["bits_per_weight"]  # scales are float32 in this folder
    wrong = run(app, ["quantize", str(source), "--override", "lm_head", "-o", str(tmp_path / "no")])
    assert isinstance(wrong.exception, SchemeError) and "write LAYER=SCHEME" in str(wrong.exception)
    with pytest.raises(SchemeError, match="pass the scheme to quantize to"):
        load_model(source, overrides={"lm_head": "w8a16"})
    with pytest.raises(ConversionError, match="one scheme for all layers"):
        convert(out, "compressed-tensors")
