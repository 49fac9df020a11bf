"""Vision-language models: their text part is quantized, and other tools' files are read by their own names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases_folders import configure
from tests.cases_matrix import MATRIX
from tests.cases_models import imitate, layers_of, save_byte_tokenizer, tokens_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import anybit
from anybit.checkpoints.formats import gptq_write
from anybit.checkpoints.formats.write import convert_into
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError
from anybit.hf.loading import load_model
from anybit.models.blocks import find_blocks
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme

SCHEME = Scheme.parse("w4a16g32")
PROMPTED: dict[str, Any] = {"sequences": [[i * k % 95 for i in range(64)] for k in range(1, 5)]}


def saved(name: str, folder: Path) -> Path:
    """A tiny float16 model saved by transformers, which gives some models' tensors older names."""
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(MATRIX[name](), dtype=torch.float16)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def as_gptq(folder: Path) -> dict[str, torch.Tensor]:
    """Store the text's projections as GPTQ's tensors, names unchanged; returns their weights."""
    tensors, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "language_model" in name and name.endswith("_proj.weight"):
            layer, quantized = name.removesuffix(".weight"), quantize_weight(weight, SCHEME.weights)
            expected[layer] = quantized.dequantize()
            tensors |= {
                f"{layer}.{part}": t.contiguous() for part, t in gptq_write.tensors_of(layer, quantized).items()
            }
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entry = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    configure(folder, quantization_config={**entry, "checkpoint_format": "gptq_v2"})
    return expected


def test_token_ids_from_a_file_are_those_of_the_text_part(tmp_path: Path) -> None:
    """Only its configuration has the vocabulary size."""
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([[i * k % 90 for i in range(64)] for k in range(1, 5)]))
    source = saved("Mistral Small 3.1 (images)", tmp_path / "in")
    done = quantize_folder(source, tmp_path / "w4", SCHEME, "gptq", options={"text": file})
    assert done.layers


def test_blocks_are_those_of_the_text_however_large_the_tower_is() -> None:
    config = MATRIX["Mistral Small 3.1 (images)"]()
    config.vision_config.num_hidden_layers = 40
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    name, blocks = find_blocks(model)
    assert name == "model.language_model.layers" and len(blocks) == config.text_config.num_hidden_layers


def test_what_images_enter_is_not_rotated(tmp_path: Path) -> None:
    source = saved("Mistral Small 3.1 (images)", tmp_path / "in")
    with pytest.raises(LayerError, match="would not be rotated: use smooth"):
        quantize_folder(source, tmp_path / "w4", SCHEME, "rotate", options=PROMPTED)


def test_quantize_says_what_it_leaves(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "quantize", saved("Mistral Small 3.1 (images)", tmp_path / "in"), "-s", SCHEME, "-o", tmp_path / "w4"
    )
    assert code == 0, err
    assert "only the language model is quantized, not model.vision_tower, model.multi_modal_projector" in out
    assert len(tokens_of(load_model(tmp_path / "w4", device="cpu").model, 3)) == 3


@pytest.mark.parametrize("name", ["Mistral Small 3.1 (images)", "Gemma 3 (images)"])
def test_images_say_the_same_as_with_dequantized_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config, mistral = MATRIX[name](), name.startswith("Mistral")
    config.image_token_id = config.image_token_index = 90
    config.vision_config.image_size = size = 32 if mistral else 16
    plain = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for part, parameter in plain.named_parameters():
        if part.endswith("mm_input_projection_weight"):  # zeros, as Gemma 3 initializes it
            torch.nn.init.normal_(parameter)
    plain.save_pretrained(tmp_path / "in")
    quantize_folder(tmp_path / "in", tmp_path / "out", SCHEME)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    imitate(plain, model)
    ids = torch.tensor([[5, 17, 90, 90, 90, 90, 3, 88]])
    more = {"image_sizes": torch.tensor([[32, 32]])} if mistral else {"token_type_ids": (ids == 90).long()}
    seen = [{"pixel_values": picture, **more} for picture in 4 * torch.randn(2, 1, 3, size, size)]
    with torch.no_grad():
        first, other = (model(ids, **picture).logits for picture in seen)
        torch.testing.assert_close(first, plain(ids, **seen[0]).logits)
        assert not torch.allclose(first, other, atol=1e-2)
        if mistral:
            torch.testing.assert_close(anybit.fuse(model)(ids, **seen[0]).logits, first)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_methods_that_look_at_a_text_take_them(method: str, run: Any, tmp_path: Path) -> None:
    bits = {} if method == "gptq" else {"bits": 4.5}
    done = quantize_folder(
        saved("Gemma 3 (images)", tmp_path / "in"), tmp_path / "out", "w4a16g32", method, options=PROMPTED, **bits
    )
    assert done.layers == 14 and done.beside == ["model.vision_tower"]
    assert len(tokens_of(AutoModelForImageTextToText.from_pretrained(tmp_path / "out"), 3)) == 3


@pytest.mark.parametrize("name", ["Gemma 3 (images)", "Qwen3-VL (images)"])
def test_files_of_other_tools_are_read_by_their_old_names(name: str, run: Any, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "theirs")
    expected = as_gptq(folder)
    model = load_model(folder, device="cpu").model
    layers = layers_of(model)
    assert len(layers) == len(expected) == 14
    for old, weight in expected.items():
        (new,) = (key for key in layers if key.split(".layers.")[1] == old.split(".layers.")[1])
        assert torch.equal(layers[new].dequantize(), weight)
    convert_into(folder, "compressed-tensors", tmp_path / "converted")
    assert tokens_of(load_model(tmp_path / "converted", device="cpu").model) == tokens_of(model)
    code, out, err = run("info", folder, "--json")
    assert code == 0, err
    assert json.loads(out)["linear_layers"] == 14


def test_info_counts_the_experts_of_gpt_oss(run: Any, tmp_path: Path) -> None:
    """In MXFP4: two codes per byte, and a scale per 32 of them."""
    AutoModelForCausalLM.from_config(MATRIX["gpt-oss"](), dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors, experts = {}, 0
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, k, n = weight.shape
            experts += weight.numel()
            tensors[f"{name}_blocks"] = torch.zeros(count, n, k // 32, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((count, n, k // 32), 127, dtype=torch.uint8)
        else:
            tensors[name] = weight
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    configure(tmp_path, quantization_config={"quant_method": "mxfp4"})
    told = json.loads(run("info", tmp_path, "--json")[1])
    assert told["quantization"] == "mxfp4" and told["expert_weights"] == experts
    assert told["bits_per_weight"] == 4.25 and told["linear_weights"] == 0, "only quantized layers count"
    assert "model.layers.*.self_attn.q_proj (2)" in run("info", tmp_path)[1]
