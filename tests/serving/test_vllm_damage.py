"""Damaged folders with vLLM's loader and anybit's plug-in, in this process: refused, the same model, or a valid one.

`make vllm` runs it; vLLM's engine is not started. What vLLM or transformers refuse first is theirs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.llama import LlamaForCausalLM

from anybit.checkpoints.formats.write import convert_into
from anybit.checkpoints.safetensors import read_header
from anybit.errors import CheckpointError, LayerError, OptionError
from anybit.quantization.methods.registry import quantize_folder
from anybit.vllm.config import AnyBitConfig
from cases_damage import MUTATIONS, copy
from cases_models import save_byte_tokenizer
from checkpoints.test_damage import _compared, fuzzed

pytestmark = pytest.mark.usefixtures("loading")
COUNT, FOREIGN_COUNT = 240, 120
SCHEMES = {"packed": "w4a16g32", "sharded": "w3a16g32asym", "own": "w4a8g32"}
GROUPS = tuple(group for group in MUTATIONS if group != "tokenizer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In compressed-tensors' format, sharded, and in anybit's own."""
    root = tmp_path_factory.mktemp("good")
    (root / "plain").mkdir()
    words = save_byte_tokenizer(root / "plain")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=words, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "plain")
    for name, scheme in SCHEMES.items():
        quantize_folder(root / "plain", root / name, scheme, shard_bytes=60_000 if name == "sharded" else 1 << 30)
    return {name: root / name for name in SCHEMES}


def as_awq(plain: Path, place: Path) -> Path:
    """A model with AWQ layers of random codes: eight per word, in its order."""
    copy(plain, place)
    tensors, draw = load_file(place / "model.safetensors"), torch.Generator().manual_seed(3)

    def words(*shape: int) -> torch.Tensor:
        codes = torch.randint(16, shape, generator=draw).unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return (codes << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)

    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        (n, k), layer = tensors.pop(name).shape, name.removesuffix(".weight")
        tensors[f"{layer}.qweight"], tensors[f"{layer}.qzeros"] = words(k, n), words(k // 32, n)
        tensors[f"{layer}.scales"] = (0.01 * torch.rand(k // 32, n, generator=draw)).half()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return place


@pytest.fixture(scope="module")
def foreign(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved by other tools: GPTQ, AWQ, and compressed-tensors without anybit's entries."""
    root, plain = tmp_path_factory.mktemp("foreign"), folders["packed"].parent / "plain"
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16).save_pretrained(root / "half")
    quantize_folder(root / "half", root / "ours", "w4a16g32")
    convert_into(root / "ours", "gptq", root / "gptq")
    copy(root / "ours", root / "compressed")
    config = json.loads((root / "compressed" / "config.json").read_text())
    assert config["quantization_config"].pop("anybit")
    (root / "compressed" / "config.json").write_text(json.dumps(config))
    return {"gptq": root / "gptq", "awq": as_awq(root / "half", root / "awq"), "compressed": root / "compressed"}


def configured(folder: Path) -> Any:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True}
    if folder.name.startswith(("gptq", "awq", "compressed")):
        settings["quantization"] = "anybit"
    try:
        return EngineArgs(model=str(folder), **settings).create_engine_config()
    except ValidationError as error:  # pydantic wraps what the plug-in raised
        raise error.errors()[0].get("ctx", {}).get("error", error) from None


@pytest.fixture
def loader() -> Any:
    """Load a folder in vLLM: the outputs of its linear layers, and its other parameters."""

    def load(folder: Path) -> list[torch.Tensor]:
        config = configured(folder)
        with set_current_vllm_config(config), torch.inference_mode():
            model = get_model(vllm_config=config)
            inputs = {size: torch.randn(3, size, generator=torch.Generator().manual_seed(size)) for size in (128,)}
            layers = [module for module in model.modules() if isinstance(module, LinearBase)]
            found = [layer.quant_method.apply(layer, inputs[layer.input_size], None) for layer in layers]
        return [*found, *(parameter.detach() for parameter in model.parameters())]

    return load


@pytest.mark.parametrize(
    ("stored", "asked", "name"),
    [
        ({"scheme": "w4a16g32"}, {"scheme": "w4a16g32asym"}, "scheme w4a16g32, .* says w4a16g32asym"),
        ({"scheme": "w4a8", "hadamard": ["model.layers.0.mlp.down_proj"]}, {"scheme": "w4a8"}, "hadamard"),
        ({"scheme": "w4a8", "overrides": {"*.q_proj": "w8a8"}}, {"scheme": "w4a8"}, "overrides"),
        ({"scheme": "w4a16g32"}, {"scheme": "w4a8g32-kv4"}, None),
    ],
)
def test_an_option_says_nothing_else_of_stored_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any], asked: dict[str, Any], name: str | None
) -> None:
    """Zeros that are not loaded and rotations that are not applied would silently give wrong answers."""
    monkeypatch.setattr("anybit.vllm.config.check_folder", lambda *_: None)
    words = {"quant_method": "anybit", "version": "0.1.0"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**words, **stored}}))
    save_file({"q.weight_packed": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = AnyBitConfig.from_config({**words, **asked})
    if name is None:
        config.maybe_update_config(str(tmp_path))
        return
    with pytest.raises(OptionError, match=f"is quantized with {name}.*additional-config"):
        config.maybe_update_config(str(tmp_path))


def test_a_model_of_the_hub_is_checked_before_a_layer_is_made(
    folders: dict[str, Path], tmp_path: Path, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = copy(folders["packed"], tmp_path / "models--some--one" / "snapshots" / commit)
    config = configured(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = [entry.name for entry in read_header(snapshot / "model.safetensors")]
    monkeypatch.setattr("anybit.vllm.config._tensor_names", lambda *_: names)
    config.load_config.download_dir = str(tmp_path)

    def build() -> None:
        quantization = AnyBitConfig.from_config(config.model_config.hf_config.quantization_config)
        quantization.maybe_update_config("some/one", config.model_config.hf_config, commit)
        with set_current_vllm_config(config):
            quantization.get_quant_method(torch.nn.Identity(), "model")

    build()
    tensors = load_file(snapshot / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "norm" not in name}, snapshot / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.0\.\w+norm"):
        build()
    config.load_config.load_format = "dummy"
    build()


def test_codes_that_no_layer_takes_are_refused(
    folders: dict[str, Path], loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's Step3 says not that gate_up_proj is two layers, and its loader skips tensors that it does not know."""
    monkeypatch.setattr(LlamaForCausalLM, "packed_modules_mapping", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    told = (
        r"takes the codes of model\.layers\.0\.mlp\.gate_proj, beside which it has .*gate_up_proj in 16 bits: .*--keep"
    )
    with pytest.raises(LayerError, match=told):
        loader(folders["packed"])


def test_a_classifier_does_without_the_codes_of_a_head() -> None:
    config, model = AnyBitConfig("w4a16g32"), torch.nn.Module()
    config.stored, model.score = ["lm_head"], torch.nn.Module()
    model.score.quant_method = UnquantizedLinearMethod()
    config._check_taken(model)


def test_weights_that_vllm_makes_up_are_no_codes(folders: dict[str, Path]) -> None:
    """`--load-format dummy` fills only floats: the folder is not damaged."""
    config = configured(folders["packed"])
    config.load_config.load_format = "dummy"
    with set_current_vllm_config(config):
        quantization = AnyBitConfig("w4a16g32")
        quantization.stored = ["q"]
        layer = ReplicatedLinear(64, 64, bias=False, params_dtype=torch.float32, quant_config=quantization, prefix="q")
        with pytest.raises(OptionError, match="--load-format dummy fills weights at random, which cannot make"):
            layer.quant_method.process_weights_after_loading(layer)


def test_damaged_folders_are_refused_or_right(folders: dict[str, Path], tmp_path: Path, loader: Any) -> None:
    results = fuzzed(loader, folders, tmp_path, GROUPS, COUNT, None, _compared)
    assert results.count("refused") > COUNT // 3


def test_damaged_folders_of_other_tools_are_refused_or_right(foreign, tmp_path: Path, loader: Any) -> None:
    """By `--quantization anybit`."""
    results = fuzzed(loader, foreign, tmp_path, GROUPS, FOREIGN_COUNT, None, _compared)
    assert results.count("refused") > FOREIGN_COUNT // 4
