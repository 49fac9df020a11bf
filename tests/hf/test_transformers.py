"""anybit in transformers: quantize while loading, save, reload, generate, for every architecture."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_folders import Sources, configure, quantization_of, retensor
from tests.cases_models import ARCHITECTURES, alike, layers_of, tokens_of
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from anybit import AnyBitConfig, QuantLinear
from anybit.errors import CheckpointError, KernelError, LayerError, OptionError
from anybit.hf.loading import load_model


def load(source: Path, scheme: str | None = None, **options: Any) -> Any:
    if scheme is not None:
        options["quantization_config"] = AnyBitConfig(scheme, **options.pop("config", {}))
    return AutoModelForCausalLM.from_pretrained(source, **options).eval()


SCHEMES = ("w4a16g64", "w1a16", "w3a16g32asym", "w4a8", "w2a2-xasym", "w4a16g32s24", "w8a8fp")


@pytest.mark.parametrize(
    ("architecture", "scheme", "dtype"),
    [
        *((kind, one, None) for i, kind in enumerate(ARCHITECTURES) for one in SCHEMES[i % 3 :: 3 if i else 1]),
        *(("qwen2", "w4a16g32asym", dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_saved_and_reloaded_gives_the_same_tokens(sources, tmp_path, architecture, scheme, dtype) -> None:
    model = load(sources[architecture], scheme, dtype=dtype)
    assert {layer.quantized_weight().scale.dtype for layer in layers_of(model).values()} == {dtype or torch.float32}
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.quantization_config.scheme == scheme
    assert alike(again, model) and tokens_of(again) == tokens_of(model)


def test_modules_to_not_convert_stay_linear(sources: Sources, tmp_path: Path) -> None:
    model = load(sources["llama"], "w4a16g32", config={"modules_to_not_convert": ["lm_head", "o_proj"]})
    assert isinstance(model.model.layers[0].self_attn.o_proj, nn.Linear)
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again.model.layers[1].self_attn.o_proj, nn.Linear) and alike(again, model)
    with pytest.raises(LayerError, match="no linear layer to quantize"):
        load(sources["llama"], "w4a16g32", config={"modules_to_not_convert": ["model", "lm_head"]})


def test_compiled_models_have_one_node_a_layer(sources: Sources) -> None:
    torch._dynamo.reset()  # which compiles a function a few times in a process, and then no more
    model = load(sources["llama"], "w4a16g64")
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True)
    ids = torch.arange(3, 13)[None]
    with torch.inference_mode():
        ours = compiled(ids, use_cache=False).logits
        theirs = model(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs)
    calls = [node for graph in graphs for node in graph.graph.nodes if "anybit" in str(node.target)]
    assert len(graphs) == 1
    assert len(calls) == 14


def test_trainer_trains_what_stands_around_quantized_layers(sources: Sources, tmp_path: Path) -> None:
    """As PEFT's prompts and LoRA of a head do; a quantized model alone, which has nothing to train, is refused."""
    pytest.importorskip("accelerate")
    model = load(sources["llama"], "w4a16g32")
    row = torch.arange(8)
    settings = TrainingArguments(
        tmp_path, max_steps=8, learning_rate=0.05, report_to=[], use_cpu=True, logging_steps=1, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="attach trainable adapters"):
        Trainer(model, settings)
    codes = {key: tensor.clone() for key, tensor in model.state_dict().items() if "weight_packed" in key}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in key)
    model._hf_peft_config_loaded = True  # what PEFT says of a model with adapters
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in codes.items())


def test_not_finite_weights_name_the_layer(sources: Sources, tmp_path: Path) -> None:
    model = load(sources["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    for scheme in ("w4a16g32", None):
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has a value .* nan at \[3, 4\]"):
            load_model(tmp_path, scheme, device="cpu")


def test_groups_that_are_not_there_name_the_layer(sources: Sources, tmp_path: Path) -> None:
    model = load(sources["llama"], "w4a16g32")
    model.save_pretrained(tmp_path)
    groups = {
        f"{name}.weight_g_idx": (torch.arange(layer.in_features) // 32 + 9 * ("1.mlp.up" in name)).int()
        for name, layer in layers_of(model).items()
    }
    own = quantization_of(tmp_path)["anybit"]
    configure(retensor(tmp_path, **groups), {"anybit": own | {"group_index": True}})
    with pytest.raises(LayerError, match=r"layer model\.layers\.1\.mlp\.up_proj: group_index holds groups 9 to"):
        load_model(tmp_path, device="cpu")


def test_a_wrong_configuration_says_what_is_allowed() -> None:
    with pytest.raises(KernelError, match="backend 'fast' is unknown; there are bitwise, packed"):
        AnyBitConfig("w4a16", backend="fast")
    with pytest.raises(OptionError, match="AnyBitConfig takes no bits; it takes scheme, modules_to_not_convert"):
        AnyBitConfig("w4a16", bits=4)


FIRST_USES = {
    "a cache": "from anybit import AnyBitCache",
    # It imports the parent package, and must not trigger what waits for the module.
    "a search, and transformers": "import importlib.util; importlib.util.find_spec('transformers.modeling_utils'); "
    "from transformers import LlamaForCausalLM",
}


@pytest.mark.parametrize("first", FIRST_USES.values(), ids=FIRST_USES)
def test_importing_anybit_registers_it(first: str) -> None:
    """In a new process, whatever is loaded first; and nothing is loaded for anybit's sake."""
    script = f"""
import sys
import anybit
assert anybit.Scheme.parse("w4a16").weights.bits == 4
assert sorted(anybit.__all__) == sorted(anybit._HOMES)
assert not set(sys.modules) & set(["torch", "transformers"])
{first}
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZER_MAPPING["anybit"] is not None
assert AUTO_QUANTIZATION_CONFIG_MAPPING["anybit"] is anybit.AnyBitConfig
from transformers import AttentionInterface
assert "anybit" in AttentionInterface().valid_keys()
for name in anybit.__all__ if "AnyBitCache" in {first!r} else ():
    assert getattr(anybit, name).__name__ == name
assert anybit.ops.allow_fallback
try:
    anybit.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'anybit' has no attribute 'nothing'\n"


OFFLOADED = (
    ({"": "disk"}, None, "puts the model on disk, which would offload layer model.layers.0"),
    ({"": "cpu", "model.layers.1": "disk"}, None, "puts model.layers.1 on disk, which would offload layer model.l"),
    ({"": 0, "model.layers.1.mlp": "cpu"}, None, "puts model.layers.1.mlp on cpu, which would offload layer model.la"),
    ("auto", {"cpu": 20_000}, "puts the model on disk"),
)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("places", "memory", "reason"), OFFLOADED)
def test_offloaded_layers_are_refused_before_anything_is_loaded(sources, tmp_path, places, memory, reason, quantized):
    source = sources["llama"]
    if quantized:
        load(source, "w4a16g32").save_pretrained(tmp_path / "q")
        source = tmp_path / "q"
    with pytest.raises(OptionError, match=f"{reason}.*quantized layers cannot be offloaded"):
        load(
            source, None if quantized else "w4a16g32", device_map=places, max_memory=memory,
            offload_folder=str(tmp_path / "offload"),
        )  # fmt: skip


def test_auto_places_layers_by_the_size_of_their_codes(sources: Sources) -> None:
    """Not by the size of unquantized weights, which may not fit."""
    whole, quantized = load(sources["llama"]), load(sources["llama"], "w4a16g32")
    before, after = (sum(p.nbytes for p in m.parameters()) for m in (whole, quantized))
    auto = load(sources["llama"], "w4a16g32", device_map="auto", max_memory={"cpu": (before + after) // 2})
    assert tokens_of(auto) == tokens_of(quantized)
