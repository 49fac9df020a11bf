"""Folders have the hub's names of experts, which transformers renames: Mixtral's and PhiMoE's block_sparse_moe."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from anybit import AnyBitConfig
from anybit.checkpoints.formats.write import convert, convert_into
from anybit.cli.checkpoints import _model
from anybit.errors import LayerError
from anybit.quantization.methods.registry import quantize_folder
from cases_folders import quantization_of as words
from cases_mixtures import COMMON, MODELS
from cases_models import logits_of, schemes_of

ONE = "model.layers.1.block_sparse_moe.experts.3"


def stored(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def schemes(folder: Path) -> dict[str, str]:
    return schemes_of(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture(params=["mixtral", "phimoe"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**COMMON, **MODELS[request.param]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "source")
    assert f"{ONE}.w1.weight" in stored(tmp_path / "source")
    return tmp_path / "source"


def test_one_scheme(source: Path, tmp_path: Path) -> None:
    quantize_folder(source, tmp_path / "q", "w4a16")
    plain = {name for name in stored(source) if ".experts." not in name and "_proj." not in name}
    assert plain <= stored(tmp_path / "q") and f"{ONE}.w1.weight_packed" in stored(tmp_path / "q")
    assert _model(str(tmp_path / "q"), False)["experts"] == "8, of which a token uses 2"
    found = words(tmp_path / "q")
    assert found["quant_method"] == "compressed-tensors"
    routers = {f"model.layers.{place}.block_sparse_moe.gate" for place in range(2)}
    assert routers | {"lm_head"} <= set(found["ignore"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    again.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "q") and words(tmp_path / "again") == found
    convert_into(tmp_path / "q", "anybit", tmp_path / "anybit")
    convert(tmp_path / "anybit", "compressed-tensors")
    assert words(tmp_path / "anybit")["ignore"] == found["ignore"]
    for folder in ("again", "anybit"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(logits_of(model), logits_of(again))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float16)
    assert {each.dtype for each in other.parameters() if each.is_floating_point()} == {torch.float16}


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_schemes_of_single_layers(source: Path, tmp_path: Path, block: str) -> None:
    """By transformers' names, or by those of the folder."""
    others = {f"*.{block}.experts.*.w2": "w8a16", f"model.layers.1.{block}.experts.3.w1": "w2a16g32"}
    kept = ["lm_head", f".*{block}\\.experts\\.5"]
    quantize_folder(source, tmp_path / "q", "w4a16g32", overrides=others, modules_to_not_convert=kept)
    found = schemes(tmp_path / "q")
    loading = AnyBitConfig("w4a16g32", kept, overrides=others)
    loaded = AutoModelForCausalLM.from_pretrained(source, quantization_config=loading)
    assert schemes_of(loaded) == found
    assert {scheme for name, scheme in found.items() if name.endswith("w2")} == {"w8a16"}
    assert [name for name, scheme in found.items() if scheme == "w2a16g32"] == ["model.layers.1.mlp.experts.3.w1"]
    assert not [name for name in found if ".experts.5." in name]
    assert f"{ONE}.w2" in words(tmp_path / "q")["overrides"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "q").save_pretrained(tmp_path / "again")
    assert words(tmp_path / "again") == words(tmp_path / "q") and schemes(tmp_path / "again") == found
    told = _model(str(tmp_path / "q"), False)
    assert told["linear_layers"] == len(found)
    one = "model.layers.0.mlp.experts and of 1 more layer one by one: not all of their layers are quantized"
    counts = "27 in w4a16g32, 14 in w8a16, 1 in w2a16g32"
    assert told["experts"] == f"8, of which a token uses 2; projections: {counts}; a GPU runs those of {one}"


@pytest.mark.parametrize("pattern", ["*.block_sparse_moe.experts.*.w4", "*sparse_moe.experts.*.w1"])
def test_overrides_of_no_expert_are_refused(source: Path, tmp_path: Path, pattern: str) -> None:
    config = AnyBitConfig("w4a16", overrides={pattern: "w8a16"})
    for load in (
        lambda: quantize_folder(source, tmp_path / "q", "w4a16", overrides={pattern: "w8a16"}),
        lambda: AutoModelForCausalLM.from_pretrained(source, quantization_config=config),
    ):
        with pytest.raises(LayerError, match="matches no layer"):
            load()
