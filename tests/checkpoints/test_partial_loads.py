"""Parts of a quantized model, as transformers loads them: no head, fewer layers, or a classifier on top."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_calibration import sequences
from tests.cases_folders import Sources, configure, retensor
from tests.cases_models import layers_of
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from anybit import AnyBitConfig
from anybit.errors import CheckpointError
from anybit.quantization.methods.registry import quantize_folder

TOKENS = torch.arange(3, 20)[None]
MIXED = {"model.layers.0.*": "w8a16g32", "*.up_proj": "w3a8g32", "model.embed_tokens": "w4a16g32", "lm_head": "w8a16"}
ROTATED = {"method": "smooth_rotate", "options": {"sequences": [s % 96 for s in sequences(8)], "tokens": 300}}
FOLDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "untied": ("llama", "w4a16g32", {}),
    "tied, w4a8": ("llama-tied", "w4a8g32", {}),
    "rotated": ("llama", "w4a16g32", ROTATED),
    "mixed": ("llama-tied", "w4a16g32", {"overrides": MIXED}),
    "with a KV format": ("llama-wide", "w4a16g32-kv8", {}),
    "another prefix": ("gpt2", "w4a8g32", {}),
}


def states(model: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = model.eval()(TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    return found


@pytest.mark.parametrize("name", [*FOLDERS, "quantized while loading"])
def test_a_part_computes_what_the_whole_does(name: str, sources: Sources, tmp_path: Path) -> None:
    architecture, scheme, how = FOLDERS.get(name, ("llama", "w4a8g32", {}))
    folder = sources[architecture]
    if name in FOLDERS:
        quantize_folder(folder, folder := tmp_path / "out", scheme, **how)

    def load(kind: Any, **more: Any) -> Any:
        more |= {} if name in FOLDERS else {"quantization_config": AnyBitConfig(scheme)}
        return kind.from_pretrained(folder, **more)

    whole = states(load(AutoModelForCausalLM))
    for kind in (AutoModel, AutoModelForSequenceClassification):
        part = load(kind)
        assert all(map(torch.equal, states(part), whole))
        part.save_pretrained(tmp_path / kind.__name__)
        assert all(map(torch.equal, states(kind.from_pretrained(tmp_path / kind.__name__)), whole))
    assert type(part.score) is torch.nn.Linear  # a new head: to be trained, not quantized
    for kind in (AutoModel, AutoModelForCausalLM):
        part = load(kind, num_hidden_layers=1)
        assert torch.equal(states(part)[0], whole[0])
        block = next(module for name, module in part.named_modules() if name.endswith(("layers.0", "h.0")))
        assert layers_of(block)
        with torch.no_grad():
            assert torch.isfinite(part(TOKENS)[0]).all()


def test_what_no_folder_holds_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w4a16g32")
    for more, message in (
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\.\S+ and 22 more, which LlamaForCausalLM needs"),
        ({"intermediate_size": 128}, r"tensor model\.layers\.0\.mlp\.down_proj\.weight_packed has shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out", **more)
    AutoModel.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "base")
    says = "no tensor lm_head.weight, which LlamaForCausalLM needs: its config.json says LlamaModel, so load it as that"
    with pytest.raises(CheckpointError, match=says):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base")


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_damage_is_refused_whatever_part_is_asked_for(kind: Any, llama: Path, tmp_path: Path) -> None:
    """Tensors that the part leaves out must fit the model that config.json names, too."""
    norm = "model.layers.1.input_layernorm.weight"
    for number, (changed, entries, message) in enumerate(
        (
            ({norm: None}, {}, rf"no tensor {norm}"),
            ({"model.stranger": torch.ones(1)}, {}, r"has tensor model\.stranger.*its config\.json is another model's"),
            ({}, {"num_hidden_layers": 1}, r"has tensor model\.layers\.1\..*its config\.json is another model's"),
        )
    ):
        quantize_folder(llama, out := tmp_path / str(number), "w4a16g32")
        configure(retensor(out, **changed), **entries)
        for more in ({}, {"num_hidden_layers": 1}):
            with pytest.raises(CheckpointError, match=message):
                kind.from_pretrained(out, **more)
