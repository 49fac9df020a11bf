"""Nested folders: slices load, convert and serve as models of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_folders import configure, quantization_of
from tests.cases_models import layers_of, save_byte_tokenizer, save_tiny, schemes_of, tokens_of
from tests.checkpoints.test_without_anybit import without_anybit
from tests.test_docs import save_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import anybit
from anybit.checkpoints.configuration import settings_of
from anybit.cli import app
from anybit.codes.nested import sliced
from anybit.errors import AnyBitError, CheckpointError, OptionError, SchemeError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder
from anybit.vllm.server import Server
from anybit.vllm.serving_source import vllm_folder


def nested(root: Path, scheme: str = "w8a16g32asym", **more: Any) -> Path:
    save_byte_tokenizer(save_tiny("llama", root / "source"))
    quantize_folder(root / "source", root / "nested", scheme, "rtn", nested=[4, 2, 3], **more)
    return root / "nested"


def run(*words: Any) -> str:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: Any) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(done.exception, AnyBitError), done.output
    return str(done.exception)


def test_a_width_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Layers of the scheme's format are sliced, overrides in it too; others stay. Conversions have the same codes."""
    pytest.importorskip("compressed_tensors")
    folder = nested(tmp_path)
    whole = load_model(folder)
    before = layers_of(whole.model)
    found = {width: load_model(folder, width=width) for width in (2, 3, 4, 8)}
    assert [str(one.scheme) for one in found.values()] == [f"w{width}a16g32asym" for width in found]
    for width, one in found.items():
        for name, layer in layers_of(one.model).items():
            whole_weight = before[name].quantized_weight()
            wanted = whole_weight if width == 8 else sliced(whole_weight, width)
            assert torch.equal(layer.dequantize(), wanted.dequantize()), (width, name)
    assert len({tuple(tokens_of(one.model)) for one in found.values()}) == 4
    for width, to in ((3, "compressed-tensors"), (4, "anybit"), (4, "compressed-tensors")):
        run("convert", folder, "--width", width, "--to", to, "-o", tmp_path / f"{to} {width}")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{to} {width}").eval()
        assert tokens_of(again) == tokens_of(found[width].model)
    alone = without_anybit(*(tmp_path / f"compressed-tensors {width}" for width in (3, 4)), folder)
    assert alone.pop("nested") == tokens_of(whole.model)
    assert [*alone.values()] == [tokens_of(found[width].model) for width in (3, 4)]
    dense = load_model(folder, width=2, dequantize=True).model
    assert tokens_of(dense) == tokens_of(found[2].model)


def test_overrides_in_another_format_stay(tmp_path: Path) -> None:
    overrides = {"lm_head": "w8a16", "*.down_proj": "w8a16g32asym", "model.embed_tokens": "w6a16"}
    folder = nested(tmp_path, overrides=overrides)
    schemes = schemes_of(load_model(folder, width=3).model)
    assert schemes.pop("lm_head") == "w8a16" and schemes.pop("model.embed_tokens") == "w6a16"
    assert set(schemes.values()) == {"w3a16g32asym"}


@pytest.mark.parametrize("scheme", ["w8a16", "w6a8g32", "w4a16g32bipolar-kv4"])
def test_other_schemes_nest_too(scheme: str, tmp_path: Path) -> None:
    folder = save_tiny("llama-wide", tmp_path / "source")
    save_byte_tokenizer(folder)
    quantize_folder(folder, tmp_path / "nested", scheme, "rtn", nested=[3])
    found = load_model(tmp_path / "nested", width=3)
    assert str(found.scheme) == "w3" + scheme[2:] and len(tokens_of(found.model)) == 12


def test_commands_take_a_width(tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    folder = tmp_path / "nested"
    run("quantize", tmp_path / "source", "-s", "w8a16g32asym", "--nested", "2,3,4", "--method", "rtn", "-o", folder)
    asked = ("-p", "Why?", "-n", 4, "--json")
    said = {width: json.loads(run("generate", folder, "--width", width, *asked)) for width in (2, 4, 8)}
    assert [one["scheme"] for one in said.values()] == [f"w{width}a16g32asym" for width in said]
    text = tmp_path / "text.txt"
    text.write_text("Some words to read, and others to say. " * 20)
    rows = [json.loads(run("eval", folder, "--width", width, "-t", text, "--context", 32, "--json")) for width in said]
    assert rows[0]["bits_per_weight"] < rows[1]["bits_per_weight"] < rows[2]["bits_per_weight"]
    assert len({row["perplexity"] for row in rows}) == 3
    assert json.loads(run("info", folder, "--json"))["nested"] == [2, 3, 4]
    with vllm_folder(Server(str(folder), width=3)) as (path, options):
        settings = settings_of(quantization_of(path))
        assert settings is not None and settings["scheme"] == "w3a16g32asym" and "nested" not in settings
        assert options == [] and (path / "tokenizer.json").is_file()
    assert not path.exists()


def test_saving_keeps_the_widths(tmp_path: Path) -> None:
    folder = nested(tmp_path)
    for saved, width in ((None, 2), (3, None)):
        place = tmp_path / f"saved as {saved}"
        anybit.load(folder, width=saved).save_pretrained(place)
        save_byte_tokenizer(place)
        assert str(load_model(place, width=width).scheme) == f"w{saved or width}a16g32asym"


def test_what_has_no_such_width_is_refused(tmp_path: Path) -> None:
    folder = nested(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"")
    for place, width, says in (
        (folder, 5, "nested has the widths 2, 3, 4, 8, not 5"),
        (tmp_path / "source", 3, r"source has no slice of 3 bits: .* --nested 2,3,4, which makes"),
        (tmp_path / "x.gguf", 3, "a GGUF file, which has one width"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load_model(place, width=width)
    written = ("--width", 3, "--to", "anybit", "-o", tmp_path / "out")
    assert "x.gguf is a GGUF file, which has one width" in refused("convert", tmp_path / "x.gguf", *written)
    assert "name a folder for them with --output" in refused("convert", folder, "--width", 3, "--to", "anybit")
    here = ("--to", "anybit", "-o", folder, "--overwrite")
    assert "holds the model that is read" in refused("convert", folder, "--width", 3, *here)
    for widths, says in (("2,x", "write widths, such as 2,3,4"), ("9", "no slice of 9")):
        words = ("-s", "w8a16", "--nested", widths, "-o", tmp_path / "out")
        assert says in refused("quantize", tmp_path / "source", *words)
    with pytest.raises(OptionError, match="leave bits and memory out"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w8a16", nested=[4], bits=4)
    with pytest.raises(SchemeError, match="2:4 sparse"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w8a16s24", nested=[4])
    own = quantization_of(folder)["anybit"]
    for value, says in (([9], "no slice of 9"), ("2", "must be a list of widths"), ([None], "no slice of None")):
        configure(folder, {"anybit": own | {"nested": value}})
        with pytest.raises(CheckpointError, match=says):
            load_model(folder)
