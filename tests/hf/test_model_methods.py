"""Methods of transformers models and other libraries that look at parameters, embeddings and heads."""

import copy
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import anybit
from anybit import QuantLinear
from anybit.errors import LayerError

IDS = torch.arange(9)[None]
HEADS: dict[str, tuple[bool, dict[str, str]]] = {
    "tied": (True, {}), "shared": (True, {"model.embed_tokens": "w8a16g32"}), "own": (True, {"lm_head": "w8a16g32"}),
    "head": (False, {"lm_head": "w8a16g32"}), "embedding": (False, {"model.embed_tokens": "w8a16g32"}),
}  # fmt: skip
"""Whether the model's head is tied, and overrides."""


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(head: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The unquantized model, and the quantized one."""
    plain, quantized = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("quantized")
    tied, overrides = HEADS[head]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96,
        tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    load(plain, overrides).save_pretrained(quantized)
    return plain, quantized


def load(folder: Path, overrides: dict[str, str] | None = None) -> Any:
    config = {} if overrides is None else {"quantization_config": anybit.AnyBitConfig("w4a16g32", overrides=overrides)}
    return AutoModelForCausalLM.from_pretrained(folder, **config).eval()


@pytest.fixture
def models(folders: tuple[Path, Path], head: str) -> Iterator[Any]:
    """A model as users get it: quantized while loading, loaded, copied, unpickled."""
    model = load(folders[0], HEADS[head][1])
    return iter((model, load(folders[1]), copy.deepcopy(model), pickle.loads(pickle.dumps(model))))


def test_weights_are_tied_again_without_change(models: Iterator[Any]) -> None:
    for model in models:
        logits = model(IDS).logits
        model.tie_weights()
        assert torch.equal(model(IDS).logits, logits)


def test_resizing_works_or_is_refused_before_anything_changes(models: Iterator[Any], head: str) -> None:
    for model in models:
        logits, embedding = model(IDS).logits, model.get_input_embeddings()
        for same in ((), (96,), (None, 32), (90, 32)):
            assert model.resize_token_embeddings(*same) is embedding
        assert torch.equal(model(IDS).logits, logits) and model.get_output_embeddings() is model.lm_head
        if head == "tied":
            model.resize_token_embeddings(100)
        else:
            for other in ((100,), (90,), (96, 64)):
                with pytest.raises(LayerError, match=r"quantized, and cannot be resized from 96 to .*dequantize\(\)"):
                    model.resize_token_embeddings(*other)
            assert torch.equal(model(IDS).logits, logits) and model.get_input_embeddings() is embedding
            model.dequantize().resize_token_embeddings(100)
        resized = model(IDS).logits
        assert resized.shape[-1] == 100 and torch.allclose(resized[..., :96], logits, atol=1e-5)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (head in ("tied", "shared"))


def test_another_embedding_is_used_or_refused(models: Iterator[Any], head: str) -> None:
    for model in models:
        other = nn.Embedding(96, 64)
        if head == "shared":
            with pytest.raises(LayerError, match=r"multiplies by the codes of the quantized embedding.*dequantize\(\)"):
                model.set_input_embeddings(other)
            with pytest.raises(LayerError, match="weight is a copy to read"):
                model.lm_head.weight = other.weight
            model.set_output_embeddings(nn.Linear(64, 96))
        else:
            model.set_input_embeddings(other)
        model.tie_weights()
        assert torch.isfinite(model(IDS).logits).all()


def test_memory_counts_what_the_kernels_read(models: Iterator[Any]) -> None:
    for model in models:
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        prepared = sum(tensor.nbytes for layer in layers for tensor in layer._prepared.tensors)  # type: ignore[union-attr]
        rest = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        assert model.get_memory_footprint() == prepared + rest > prepared > 0
        assert model.device.type == "cpu" and model.dtype == torch.float32
    reference = weakref.ref(model)
    del model, layers, models
    assert reference() is None  # its memory is free at once, without the garbage collector


def test_no_parameter_is_a_placeholder(models: Iterator[Any]) -> None:
    for model in models:
        for each in (model, anybit.fuse(model)):
            assert not any(tensor.is_meta for tensor in (*each.parameters(), *each.buffers()))


def test_distributed_data_parallel_trains(models: Iterator[Any], tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for model in models:
            with torch.inference_mode():
                logits = model(IDS).logits
            parallel = nn.parallel.DistributedDataParallel(model)
            found = parallel(IDS).logits
            assert torch.equal(found, logits)
            found.logsumexp(-1).mean().backward()
            assert all(p.grad is not None for n, p in model.named_parameters() if "norm" in n)
            del parallel, found  # while they hold the group, its end waits for a thread that waits for this one
    finally:
        torch.distributed.destroy_process_group()


def test_accelerate_saves_loads_and_dispatches(models: Iterator[Any], tmp_path: Path) -> None:
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    accelerator = accelerate.Accelerator(cpu=True)
    for index, model in enumerate(models):
        logits, folder, state = model(IDS).logits, tmp_path / str(index), model.state_dict()
        model = accelerator.prepare(model)
        accelerator.save_model(model, str(folder))
        saved = safetensors.load_file(folder / "model.safetensors")
        assert saved.keys() >= {name for name in state if "weight_packed" in name}
        assert all(torch.equal(saved[name], state[name]) for name in saved)
        accelerator.save_state(str(folder / "state"))
        accelerator.load_state(str(folder / "state"))
        assert torch.equal(model(IDS).logits, logits)
        dispatched = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        assert torch.equal(dispatched(IDS).logits, logits)


def test_layers_are_moved_and_cast_with_their_model(models: Iterator[Any]) -> None:
    for model in models:
        logits = model(IDS).logits
        model.to(torch.bfloat16)
        assert torch.allclose(model(IDS).logits.float(), logits, atol=0.05)
        layer = model.model.layers[0].mlp.up_proj
        assert layer.weight.dtype == layer.weight_scale.dtype == torch.bfloat16
        assert layer.half().weight.dtype == torch.float16


def test_peft_trains_beside_quantized_layers(folders: tuple[Path, Path], head: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.prepare_model_for_kbit_training(load(folders[1]))  # casts 16-bit parameters, and freezes all
    logits = model(IDS).logits
    if isinstance(model.lm_head, nn.Linear):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=4))
        assert torch.equal(adapted(IDS).logits, logits)
        adapted(IDS).logits.logsumexp(-1).mean().backward()
        assert model.lm_head.lora_B.default.weight.grad.count_nonzero()
        adapted.unload()
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
    config._register_custom_module({QuantLinear: peft.tuners.lora.Linear})
    adapted = peft.get_peft_model(load(folders[1]), config)
    assert not torch.equal(adapted(IDS).logits, logits)
    with pytest.raises(LayerError, match="the layer's codes would not change"):
        adapted.merge_adapter()
    with pytest.raises(LayerError, match="would not use another o_proj"):
        accelerated = load(folders[1])
        anybit.accelerate(accelerated)
        accelerated.model.layers[0].self_attn.o_proj = nn.Identity()
