"""anybit convert -o: from and to other tools' formats, with every code preserved."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.cases_folders import quantization_of
from tests.cases_models import logits_of, save_byte_tokenizer
from tests.checkpoints.test_formats import whole_model
from typer.testing import CliRunner

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.checkpoints.formats.write import convert_into
from anybit.cli import app
from anybit.errors import ConversionError, LayerError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder


def quantized(place: Path, scheme: str) -> Path:
    """A tiny Llama quantized by anybit."""
    config = transformers.LlamaConfig(
        vocab_size=save_byte_tokenizer(place / "plain"), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(place / "plain")
    quantize_folder(place / "plain", place / scheme, scheme)
    return place / scheme


def logits(folder: Path) -> torch.Tensor:
    return logits_of(load_model(folder).model)


@pytest.mark.parametrize("scheme", ["w4a16g32", "w3a16g64asym", "w8a16", "w2a16g32asym"])
def test_gptq_and_back(scheme: str, tmp_path: Path) -> None:
    ours = quantized(tmp_path, scheme)
    convert_into(ours, "gptq", tmp_path / "gptq")
    there = FolderTranslation.of(Folder(tmp_path / "gptq"))
    assert there is not None and there.name == "gptq" and str(there.scheme) == scheme
    assert torch.equal(logits(ours), logits(tmp_path / "gptq"))
    convert_into(tmp_path / "gptq", "anybit", tmp_path / "back")
    first, last = FolderTranslation.of_own(Folder(ours)), FolderTranslation.of_own(Folder(tmp_path / "back"))
    assert first.layers == last.layers
    for name in first.layers:
        assert torch.equal(first.read(name).words, last.read(name).words)
        assert torch.equal(first.read(name).dequantize(), last.read(name).dequantize())


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, "anybit") for name in ("awq-gemm-asym", "hqq-4", "ct-nvfp4", "auto-round-gptq")),
        ("awq-gemm-asym", "compressed-tensors"),
    ],
)
def test_theirs_become_ours(name: str, to: str, tmp_path: Path) -> None:
    theirs, ours = whole_model(name, tmp_path / "theirs"), tmp_path / "ours"
    assert convert_into(theirs, to, ours) == quantization_of(ours) and quantization_of(ours)["quant_method"] == to
    traps = [key for key in load_file(ours / "model.safetensors") if key.endswith("q_proj.weight")]
    assert bool(traps) == (to == "anybit"), "programs without anybit would take the layer for a new one"
    assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        (
            "hqq-3",
            "gptq",
            "gptq cannot express layer .*down_proj in w3a16g32min: min codes: it has integers",
        ),
        ("ct-nvfp4", "compressed-tensors", "cannot express layer .*down_proj in w4a16g16e2m1: e2m1 codes"),
        ("auto-round-gptq", "gptq", "one scheme for all layers, but layer .* is in w[48]a16g32"),
        ("bitnet", "gptq", "8-bit activations: it has 16 bits"),
        ("gptq-4-sym", "awq", "cannot convert to 'awq'; there are anybit, compressed-tensors, gptq, gguf"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, to: str, why: str, tmp_path: Path) -> None:
    theirs = whole_model(name, tmp_path / "theirs")
    with pytest.raises(ConversionError, match=why):
        convert_into(theirs, to, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_the_commands_take_them(tmp_path: Path) -> None:
    theirs = whole_model("awq-gemm-asym", tmp_path / "theirs")

    def run(*words: object) -> str:
        return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False).stdout

    told = json.loads(run("info", theirs, "--json"))
    assert (told["quantization"], told["scheme"], told["linear_layers"]) == ("awq", "w4a16g32asym", 2)
    assert told["bits_per_weight"] == 4 + (16 + 4) / 32
    assert "no code was changed" in run("convert", theirs, "--to", "gptq", "-o", tmp_path / "ours")
    again = json.loads(run("info", tmp_path / "ours", "--json"))
    assert (again["quantization"], again["scheme"]) == ("gptq", "w4a16g32asym")
    assert "w4a16g32asym" in run("explain", theirs, "--m", "1")
    with pytest.raises(ConversionError, match="writes new tensors: name a folder for them with --output"):
        run("convert", theirs, "--to", "gptq")


def test_codes_that_only_others_make_are_not_quantized_to(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match="w4a16g32min can only be loaded from models"):
        quantized(tmp_path, "w4a16g32min")
