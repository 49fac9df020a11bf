"""Experts in GGUF files: one tensor holds those of a block, and each runs from its own blocks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases_damage import describe_gguf, finish_gguf, random_blocks
from tests.cases_models import layers_of, logits_of, schemes_of, tokens_of
from tests.checkpoints.test_gguf_write import model as written
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.checkpoints.formats.write import convert_into
from anybit.checkpoints.gguf import SCHEMES
from anybit.cli.checkpoints import _gguf
from anybit.errors import CheckpointError, ConversionError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder

gguf = pytest.importorskip("gguf")

WIDTH, EXPERTS = 256, 4
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "pad_token_id": 0, "vocab_size": 261,
    "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, str, str]]] = {
    "qwen3_moe": ("qwen3moe", {**_QWEN, "norm_topk_prob": True}, ("Q2_K", "Q3_K", "Q8_0")),
    "qwen2_moe": ("qwen2moe", {**_QWEN, "shared_expert_intermediate_size": 512}, ("Q4_K", "Q4_K", "Q6_K")),
    "mixtral": ("llama", {"num_local_experts": EXPERTS}, ("Q5_K", "Q4_0", "Q5_0")),
    "minimax_m2": ("minimax-m2", {"num_local_experts": EXPERTS, "rotary_dim": 32}, ("IQ4_XS", "Q4_1", "Q5_1")),
}
"""llama.cpp's name, settings, and types of gate, up and down, by model_type."""


def described(file: Path, name: str, config: Any) -> Any:
    """A writer with a model's settings and a byte tokenizer. name: llama.cpp's."""
    writer = gguf.GGUFWriter(file, name)
    describe_gguf(writer, 128, WIDTH, WIDTH, 2, config.rms_norm_eps, float(config.rope_parameters["rope_theta"]))
    writer.add_key_length(64)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    if name == "minimax-m2":
        writer.add_rope_dimension_count(32)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    return writer


def tensors_of(kind: str, model: PreTrainedModel) -> Iterator[tuple[str, Any, Tensor | None]]:
    """(name, values or a type, the tensor of the model that takes the values of that type), as llama.cpp writes."""
    types = dict(zip(("gate", "up", "down"), MODELS[kind][2], strict=True))
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == MODELS[kind][0])
    table = gguf.get_tensor_name_map(arch, 1)
    for name, tensor in model.state_dict().items():
        stem, _, part = name.rpartition(".")
        if part in ("gate_up_proj", "down_proj"):
            halves = {"gate": tensor[:, :WIDTH], "up": tensor[:, WIDTH:]} if "up" in part else {"down": tensor}
            yield from ((f"blk.0.ffn_{own}_exps.weight", types[own], half) for own, half in halves.items())
        elif part == "e_score_correction_bias":
            yield "blk.0.exp_probs_b.bias", tensor, None
        elif part == "weight" and "shared" in name and tensor.shape[0] > 1:
            yield f"{table.get_name(stem)}.weight", "Q5_K", tensor
        elif kind == "mixtral" and stem.endswith(("q_proj", "k_proj")):  # whose heads' rows alternate
            turned = tensor.reshape(-1, 2, 32, WIDTH).swapaxes(1, 2).reshape(tensor.shape)
            yield f"{table.get_name(stem)}.weight", turned, None
        else:
            yield f"{table.get_name(stem)}.{part}", tensor.squeeze(), None


def save(file: Path, kind: str, change: Callable[[str, Any], Any] = lambda name, data: data) -> PreTrainedModel:
    """Write a mixture with random blocks; returns the model with their values. change: None drops a tensor."""
    config = AutoConfig.for_model(kind, **SIZES, **MODELS[kind][1])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.1)
    writer = described(file, MODELS[kind][0], config)
    for name, data, own in tensors_of(kind, model):
        form = None if own is None else gguf.GGMLQuantizationType[data]
        values = data.contiguous().float().numpy() if own is None else None
        if own is not None:
            values = random_blocks(data, own.numel() // WIDTH, WIDTH)
            own.copy_(torch.from_numpy(gguf.dequantize(values, form).astype(np.float32)).view(own.shape))
            values = values.reshape(*own.shape[:-1], -1)
        if (values := change(name, values)) is not None:
            writer.add_tensor(name, values, raw_dtype=form)
    finish_gguf(writer)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_experts_of_a_file_run_from_their_own_blocks(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    expected = save(file, kind)
    found = anybit.load(file)
    schemes = [scheme for name, scheme in schemes_of(found).items() if ".experts.3." in name]
    assert sorted(schemes) == sorted(SCHEMES[kind] for kind in MODELS[kind][2])
    assert torch.equal(logits_of(found), logits_of(expected))
    told = _gguf(file)
    assert told["experts"] == f"{EXPERTS}, of which a token uses 2" and told["linear_weights"] > 0
    assert told["expert_weights"] == 3 * EXPERTS * WIDTH**2


def test_experts_of_a_file_convert(tmp_path: Path) -> None:
    """Blocks become layers of anybit's, and layers become blocks; other formats have no minima."""
    file = tmp_path / "model.gguf"
    save(file, "qwen3_moe")
    convert_into(file, "anybit", tmp_path / "ours")
    theirs, ours = (layers_of(load_model(place).model) for place in (file, tmp_path / "ours"))
    assert theirs.keys() == ours.keys() and len(ours) == 3 * EXPERTS
    assert all(torch.equal(ours[name].dequantize(), layer.dequantize()) for name, layer in theirs.items())
    with pytest.raises(ConversionError, match=r"compressed-tensors cannot express layer \S+ in w2a16g16min"):
        convert_into(file, "compressed-tensors", tmp_path / "theirs")
    quantize_folder(_mixture(tmp_path), tmp_path / "w5", "w5a16g64")
    kinds = convert_into(tmp_path / "w5", "gguf", tmp_path / "back.gguf")
    assert {kinds[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")} == {"Q5_0"}
    ours, back = (load_model(place).model for place in (tmp_path / "w5", tmp_path / "back.gguf"))
    assert tokens_of(ours) == tokens_of(back)
    for overrides, keep in (({"*.experts.3.*": "w4a16g64"}, None), ({}, [r".*experts\.3\..*"])):
        place = tmp_path / f"mixed{len(overrides)}"
        quantize_folder(tmp_path / "plain", place, "w5a16g64", modules_to_not_convert=keep, overrides=overrides)
        with pytest.raises(ConversionError, match=r"blk.0.ffn_gate_exps.weight holds all experts in one type"):
            convert_into(place, "gguf", tmp_path / "mixed.gguf")


def _mixture(place: Path) -> Path:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return written(place, "qwen3_moe", **sizes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda name, data: None if "down_exps" in name else data, r"has no tensor \S+experts\.0\.down_proj\.weight"),
        (lambda name, data: data[:3] if "down_exps" in name else data, r"down_exps.* does not hold the 4 experts"),
        (lambda name, data: data[:, 1:] if "gate_exps" in name else data, r"down_proj has shape .* takes \(256, 255\)"),
    ],
)
def test_damaged_experts_of_a_file_are_named(change: Any, why: str, tmp_path: Path) -> None:
    save(tmp_path / "model.gguf", "qwen3_moe", change)
    with pytest.raises(CheckpointError, match=why):
        anybit.load(tmp_path / "model.gguf")


def test_gpt_oss_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """transformers takes the length of a name for the factor of its rotary embedding."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES, **MODELS["qwen3_moe"][1])
    writer = described(tmp_path / "model.gguf", "gpt-oss", config)
    writer.add_tensor("token_embd.weight", random_blocks("Q4_0", 261, WIDTH), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    finish_gguf(writer)
    with pytest.raises(CheckpointError, match="use the model's own folder, in MXFP4"):
        anybit.load(tmp_path / "model.gguf")
