"""Models whose blocks stay in their folder compute what those in memory do, with a block in memory at a time."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_calibration import sequences, tiny
from tests.cases_mixtures import COMMON, MODELS
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from anybit.errors import CheckpointError
from anybit.models.experts import unfuse
from anybit.quantization.methods.registry import quantize_folder
from anybit.quantization.pipeline.allocate import sample
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.quantization.pipeline.stream import Job

HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "intermediate_size": 48, "eos_token_id": 2,
}  # fmt: skip
"""Whose convolutions transformers merges while loading; it has no list of blocks of one kind, and is in memory."""


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "llama":
        return tiny()
    own = {**COMMON, **(HYBRID if kind == "olmo_hybrid" else MODELS[kind])}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own), dtype=torch.float32).eval()


def lazy_of(source: Path) -> LazyModel:
    return LazyModel.of(Job.of(source, source.with_name("out"), "w4a16", "gptq"))


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss", "olmo_hybrid"])
def test_it_computes_what_a_model_in_memory_does(kind: str, tmp_path: Path) -> None:
    """Forward and backward, to the bit; with tied heads, and experts as tensors of their own or as one."""
    model_of(kind).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    lazy = lazy_of(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    unfuse(model)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    ids = torch.stack([row[:40] % 96 for row in sequences(8)])
    one, other = (sample(each, [ids], names) for each in (lazy, LazyModel(model)))
    assert one.units == other.units and one.shares == other.shares
    assert all(map(torch.equal, one.inputs, other.inputs)) and one.gradients.keys() == other.gradients.keys()
    assert all(torch.equal(found, other.gradients[name]) for name, found in one.gradients.items())
    assert (kind == "olmo_hybrid") != any(parameter.is_meta for parameter in lazy.model.parameters())
    kept = dict(model.named_parameters())
    assert all(torch.equal(found, kept.pop(name)) for name, found in lazy.parameters()) and not kept
    with torch.no_grad():
        assert torch.equal(lazy.whole()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("how", ["gptq", "bits", "smooth", "rotate", "smooth_rotate"])
def test_one_block_is_in_memory_at_a_time(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(layers=6).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    alive: dict[int, weakref.WeakSet[nn.Parameter]] = {}
    most: list[int] = []
    read = LazyModel.block

    def block(lazy: LazyModel, index: int, device: Any) -> nn.Module:
        found = read(lazy, index, device)
        gc.collect()
        alive.setdefault(index, weakref.WeakSet()).update(found.parameters())
        most.append(sum(map(bool, alive.values())))
        return found

    monkeypatch.setattr(LazyModel, "block", block)
    gc.freeze()  # only what comes from here on is looked through at each block
    options = {"sequences": [row.tolist() for row in sequences(8)], "device": "cpu"}
    more: dict[str, Any] = {"method": "rtn", "bits": 5.0} if how == "bits" else {"method": how}
    quantize_folder(tmp_path / "source", tmp_path / "out", "w4a8g32", options=options, **more)
    gc.collect()
    gc.unfreeze()
    assert len(alive) == 6 and max(most) <= 2 and not any(alive.values())


def test_what_has_no_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a parameter that a model may lack, by what it says itself."""
    tiny().save_pretrained(tmp_path / "source")
    job = Job.of(tmp_path / "source", tmp_path / "out", "w4a16", "gptq")
    del job.names["model.layers.1.input_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor for model\.layers\.1\.input_layernorm\.weight of Llama"):
        LazyModel.of(job)
