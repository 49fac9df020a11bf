"""Folders as found on the hub, with metadata of old and new tools: read right, or refused clearly."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases_damage import finish_gguf
from tests.cases_folders import config_of, quantization_of
from tests.cases_models import layers_of, logits_of
from tests.checkpoints.test_formats import FIXTURES, STRIDE, whole_model

from anybit.checkpoints.formats.write import convert_into
from anybit.checkpoints.gguf import read_gguf_header
from anybit.errors import CheckpointError
from anybit.hf.loading import load_model, stored_scheme

BLOKE = {
    "bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": False,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclass(frozen=True)
class Strange:
    """A fixture with different metadata.

    entry: config.json's quantization_config, None for none; a function edits the fixture's own.  files: additional
    ones.  rename: new name of the safetensors.  more: entries of config.json.  tensors: additional ones.
    """

    fixture: str
    entry: Any = None
    files: dict[str, Any] = field(default_factory=dict)
    rename: str = "model.safetensors"
    more: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()

    def at(self, place: Path) -> Path:
        folder = whole_model(self.fixture, place)
        config = config_of(folder)
        own = config.pop("quantization_config")
        entry = self.entry(own) if isinstance(self.entry, Callable) else self.entry
        config |= ({} if entry is None else {"quantization_config": entry}) | self.more
        (folder / "config.json").write_text(json.dumps(config))
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        tensors = load_file(folder / "model.safetensors") | {name: torch.ones(1) for name in self.tensors}
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / self.rename)
        return folder


def own(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda entry: {**entry, **changes}


CT_OLD = {name: value for name, value in quantization_of(FIXTURES / "llmc-fp8").items() if name != "quant_method"}

READ = {
    "AutoGPTQ, quantize_config.json alone": Strange("gptq-4-asym", files={"quantize_config.json": BLOKE}),
    "AutoGPTQ, weights by another name": Strange(
        "gptq-4-asym", files={"quantize_config.json": BLOKE}, rename="gptq_model-4bit-128g.safetensors"
    ),
    "AutoGPTQ, no word of the version": Strange("gptq-4-asym", {**BLOKE, "quant_method": "gptq"}),
    "AutoAWQ, layers left as they are": Strange("awq-gemm-asym", own(modules_to_not_convert=["k_proj"])),
    "AutoAWQ, quant_config.json alone": Strange(
        "awq-gemm-asym",
        files={"quant_config.json": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}},
    ),
    "auto-round, mixed, early": Strange(
        "auto-round-gptq", own(quant_method="intel/auto-round", packing_format=None, backend="autoround:exllamav2")
    ),
    "bitsandbytes, as transformers saves it": Strange(
        "bnb-nf4-nested",
        own(
            _load_in_4bit=True,
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=["lm_head"],
            llm_int8_threshold=6.0,
        ),
    ),
    "FP8 in blocks, as DeepSeek says it": Strange(
        "fp8-blocks", own(fmt="e4m3", scale_fmt="ue8m0", modules_to_not_convert=["lm_head"])
    ),
    "compressed-tensors, several groups, patterns": Strange(
        "llmc-mixed", own(format="mixed-precision", ignore=["re:.*lm_head", "re:.*gate_proj"])
    ),
    "compressed-tensors, rotations inside the weights": Strange(
        "llmc-mixed",
        own(transform_config={"config_groups": {"R1": {"apply": [{"targets": ["x"], "location": "weight_input"}]}}}),
    ),
    "compressed-tensors, in compression_config": Strange("llmc-fp8", more={"compression_config": CT_OLD}),
    "ModelOpt, scales of an 8-bit cache": Strange(
        "llmc-nvfp4",
        own(kv_cache_scheme=KV),
        tensors=("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_proj.v_scale"),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_folder_is_read_whatever_describes_it(name: str, tmp_path: Path) -> None:
    strange = READ[name]
    folder = strange.at(tmp_path / "in")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load_model(folder, device="cpu").model
    assert any("scales for an 8-bit KV cache" in str(w.message) for w in said) == bool(strange.tensors)
    expected = load_file(FIXTURES / strange.fixture / "expected.safetensors")
    layers = layers_of(model)
    assert set(layers) == set(expected)
    for key, module in layers.items():
        assert torch.equal(module.dequantize()[::STRIDE].to(expected[key].dtype), expected[key])
    assert stored_scheme(folder) in {module.scheme for module in layers.values()}


@pytest.mark.parametrize("name", ["AutoGPTQ, weights by another name", "compressed-tensors, in compression_config"])
def test_a_copy_has_one_description(name: str, tmp_path: Path) -> None:
    folder = READ[name].at(tmp_path / "in")
    convert_into(folder, "anybit", tmp_path / "out")
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    assert "compression_config" not in config_of(tmp_path / "out")
    assert torch.equal(*(logits_of(load_model(place).model) for place in (folder, tmp_path / "out")))


REFUSED = {
    "rotates activations at run time": Strange(
        "llmc-mixed",
        own(transform_config={"config_groups": {"R4": {"apply": [{"targets": ["x"], "location": "input"}]}}}),
    ),
    r"gptq \(checkpoint_format marlin\), which anybit does not read": Strange(
        "gptq-4-asym", own(checkpoint_format="marlin")
    ),
    r"awq \(version gemv_fast\), which anybit does not read": Strange("awq-gemm-asym", own(version="gemv_fast")),
    "does not say how its zeros are stored": Strange(
        "gptq-4-asym", own(quant_method="intel/auto-round", backend="autoround:exllamav2", sym=False)
    ),
    "quantized by exl3, which anybit does not read": Strange("gptq-4-asym", {"quant_method": "exl3"}),
    r"modelopt \(quant_algo W4A16_AWQ\), which anybit does not read": Strange(
        "gptq-4-asym", files={"hf_quant_config.json": {"quantization": {"quant_algo": "W4A16_AWQ"}}}
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_read_is_refused_in_one_sentence(why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why) as refused:
        load_model(REFUSED[why].at(tmp_path / "in"), device="cpu")
    assert "\n" not in str(refused.value)


def test_parts_of_a_gguf_file_are_to_be_joined(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    finish_gguf(writer)
    with pytest.raises(CheckpointError, match=r"one of 2 parts of a GGUF file: join them first, with .* --merge"):
        read_gguf_header(tmp_path / "m-00001-of-00002.gguf")
