"""Experts that other tools quantized: each runs from its own codes, and weighs what its tool makes of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases import generator
from tests.cases_mixtures import COMMON, MODELS
from tests.cases_models import save_byte_tokenizer, tokens_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import anybit
from anybit.checkpoints.formats.write import convert_into
from anybit.errors import CheckpointError
from anybit.layers.linear import QuantLinear

SIZES = {**COMMON, "hidden_size": 64, "moe_intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models in 16 bits, by model_type."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            sizes = {**MODELS[kind], **SIZES, "vocab_size": save_byte_tokenizer(made[kind])}
            if kind == "gpt_oss":
                sizes["intermediate_size"] = 32
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float16)
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.2)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


def rewritten(source: Path, place: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A copy of a folder with other tensors, and entries of config.json."""
    shutil.copytree(source, place)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, place / "model.safetensors", {"format": "pt"})
    entries = json.loads((source / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**entries, **config}))
    return place


def quantized(model: PreTrainedModel) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def mxfp4(source: Path, place: Path) -> tuple[Path, Path]:
    """gpt-oss with random codes as OpenAI ships it, and the model that transformers makes of these."""
    theirs, expected = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        expected[name] = weight.float()
        if not name.endswith(("gate_up_proj", "down_proj")):
            theirs[name] = weight
            continue
        experts, k, n = weight.shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator(n + len(name)))
        scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator(k))
        theirs |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    folder = rewritten(source, place / "mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}, theirs)
    return folder, rewritten(source, place / "expected", {"dtype": "float32"}, expected)


def test_gpt_oss_runs_from_its_own_codes(plain: Any, tmp_path: Path) -> None:
    folder, expected = mxfp4(plain("gpt_oss"), tmp_path)
    model = anybit.load(folder)
    layers = quantized(model)
    assert len(layers) == 2 * 8 * 3 and {str(layer.scheme) for layer in layers.values()} == {"w4a16g32e2m1"}
    tensors = load_file(expected / "model.safetensors")
    for number in (0, 7):
        own = {name: layers[f"model.layers.1.mlp.experts.{number}.{name}_proj"] for name in ("gate", "up", "down")}
        joined, down = (tensors[f"model.layers.1.mlp.experts.{name}_proj"][number] for name in ("gate_up", "down"))
        assert torch.equal(own["gate"].dequantize(), joined[:, ::2].T)
        assert torch.equal(own["up"].dequantize(), joined[:, 1::2].T)
        assert torch.equal(own["down"].dequantize(), down.T)
    tokens = tokens_of(AutoModelForCausalLM.from_pretrained(expected).eval())
    assert tokens_of(model) == tokens
    convert_into(folder, "anybit", tmp_path / "ours")
    assert tokens_of(anybit.load(tmp_path / "ours")) == tokens
    model.save_pretrained(tmp_path / "saved")
    assert tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()) == tokens


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("down_proj_scales", lambda scales: None, r"experts\.0\.down_proj has no tensor scales"),
        ("down_proj_blocks", lambda blocks: None, r"no tensor model\S+experts.0.down_proj.weight and 7 more"),
        ("down_proj_scales", lambda scales: scales[:, 1:], r"down_proj cannot be read: blocks of shape \(64, 1, 16\)"),
        ("down_proj_scales", lambda scales: scales.fill_(255), "scales hold values that are not finite"),
        ("gate_up_proj_blocks", lambda blocks: blocks.int(), "gate_proj.blocks is int32, and holds bytes"),
        ("gate_up_proj_blocks", lambda blocks: blocks[:7], r"no tensor model\S+experts.7.gate_proj.weight and 1 more"),
    ],
)
def test_damaged_experts_of_gpt_oss_are_named(name: str, change: Any, why: str, plain: Any, tmp_path: Path) -> None:
    folder, _ = mxfp4(plain("gpt_oss"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    full = f"model.layers.0.mlp.experts.{name}"
    changed = change(tensors.pop(full))
    if changed is not None:
        tensors[full] = changed.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        anybit.load(folder)
