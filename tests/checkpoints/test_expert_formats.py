"""Experts that other tools quantized: each runs from its own codes, and weighs what its tool makes of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases import generator
from tests.cases_folders import configure, quantization_of
from tests.cases_mixtures import COMMON, MODELS
from tests.cases_models import layers_of, save_byte_tokenizer, tokens_of
from tests.checkpoints.test_without_anybit import without_anybit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import anybit
from anybit.checkpoints.formats import gptq_write
from anybit.checkpoints.formats.write import convert, convert_into
from anybit.codes.packing import pack_words, unpack_words
from anybit.codes.rtn import quantize_weight
from anybit.errors import CheckpointError, ConversionError
from anybit.layers.experts import Experts
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme

WIDTHS = {"hidden_size": 64, "moe_intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models in 16 bits, by model_type."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            sizes = {**COMMON, **MODELS[kind], **WIDTHS, "intermediate_size": 32}
            sizes["vocab_size"] = save_byte_tokenizer(made[kind])
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
    return configure(place, **config)


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
    layers = layers_of(model)
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
    ours = anybit.load(tmp_path / "ours")
    assert tokens_of(ours) == tokens
    reasons = [one.why_not_together() for each in (model, ours) for one in each.modules() if isinstance(one, Experts)]
    assert reasons == [None] * 4, "transformers loads biases to be trained, and those would run one by one"
    model.save_pretrained(tmp_path / "saved")
    assert tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()) == tokens
    found = without_anybit(tmp_path / "ours", tmp_path / "saved")
    assert all("mismatched" in error for error in found.values()), "other programs would take experts at random"


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


Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer, and the weight that they stand for."""


def by_compressed_tensors(weight: Tensor, arguments: dict[str, Any], form: str) -> Packed:
    """A layer as compressed-tensors itself stores it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    state, largest = {"weight": weight.float()}, weight.float().abs()
    if form == "pack-quantized":
        groups = largest.unflatten(1, (-1, arguments["group_size"]))
        state["weight_scale"] = (groups.amax(-1) / 7).to(torch.float16)
    elif form == "float-quantized":
        rows, columns = arguments["block_structure"]
        state["weight_scale"] = largest.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3)) / 448
    else:
        whole = 448 * 6 / largest.amax()
        scales = (largest.unflatten(1, (-1, 16)).amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        state |= {"weight_scale": scales.float(), "weight_global_scale": whole.reshape(1)}
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    return dict(packed), compressor.decompress(dict(packed), scheme)["weight"]


def by_gptq(weight: Tensor) -> Packed:
    found = quantize_weight(weight, Scheme.parse("w4a16g32asym").weights)
    return gptq_write.tensors_of("layer", found), found.dequantize()


def by_awq(weight: Tensor) -> Packed:
    found = quantize_weight(weight, Scheme.parse("w4a16g32asym").weights)
    codes, zeros = unpack_words(found.words, 4, found.shape[1]), found.zeros().to(torch.uint8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    turned = [each.t().unflatten(1, (-1, 8))[..., order].flatten(1).contiguous() for each in (codes, zeros)]
    words = {name: pack_words(each, 4) for name, each in zip(("qweight", "qzeros"), turned, strict=True)}
    return {**words, "scales": found.scale.t()}, found.dequantize()


def by_deepseek(weight: Tensor) -> Packed:
    scale = weight.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def compressed(form: str, **arguments: Any) -> tuple[dict[str, Any], Callable[[Tensor], Packed]]:
    """A quantization_config of compressed-tensors, as Kimi K2 has it, and how layers are packed."""
    group = {"targets": ["Linear"], "weights": arguments, "format": form}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*self_attn.*"]}
    config = {"quant_method": "compressed-tensors", "format": form, "version": "0.18.0", **groups}
    return config, lambda weight: by_compressed_tensors(weight, arguments, form)


_INTS, _FLOATS = {"type": "int", "symmetric": True, "strategy": "group"}, {"type": "float", "symmetric": True}
_BITS = {"bits": 4, "group_size": 32}
STORED: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Packed]]] = {
    "compressed-tensors int4": ("w4a16g32", *compressed("pack-quantized", num_bits=4, group_size=32, **_INTS)),
    "compressed-tensors fp8": (
        "w8a16g32e4m3",
        *compressed("float-quantized", num_bits=8, strategy="block", block_structure=[32, 32], **_FLOATS),
    ),
    "compressed-tensors nvfp4": (
        "w4a16g16e2m1",
        *compressed("nvfp4-pack-quantized", num_bits=4, group_size=16, strategy="tensor_group", **_FLOATS),
    ),
    "gptq": ("w4a16g32asym", {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False, **_BITS}, by_gptq),
    "awq": ("w4a16g32asym", {"quant_method": "awq", "version": "gemm", **_BITS}, by_awq),
    "fp8": ("w8a16g32e4m3", {"quant_method": "fp8", "weight_block_size": [32, 32]}, by_deepseek),
}
"""Scheme, quantization_config and packing of each format."""


def stored(name: str, source: Path, place: Path) -> tuple[Path, dict[str, Tensor]]:
    """A mixture whose experts are stored in a format, and the weights of its layers."""
    _, config, pack = STORED[name]
    theirs, weights = load_file(source / "model.safetensors"), {}
    for key in [key for key in theirs if ".experts." in key]:
        packed, weights[key.removesuffix(".weight")] = pack(theirs.pop(key))
        theirs |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()}
    return rewritten(source, place, {"quantization_config": config}, theirs), weights


@pytest.mark.parametrize(
    ("kind", "name"), [*(("qwen3_moe", name) for name in STORED), ("deepseek_v3", "fp8"), ("mixtral", "awq")]
)
def test_experts_run_from_their_own_codes(kind: str, name: str, plain: Any, tmp_path: Path) -> None:
    folder, weights = stored(name, plain(kind), tmp_path / "theirs")
    model = anybit.load(folder, dtype=torch.float32)
    layers = layers_of(model)
    assert len(layers) == len(weights) and {str(layer.scheme) for layer in layers.values()} == {STORED[name][0]}
    for (key, layer), weight in zip(sorted(layers.items()), (weights[key] for key in sorted(weights)), strict=True):
        assert torch.equal(layer.dequantize().to(weight.dtype), weight), key
    tokens = tokens_of(model)
    convert_into(folder, "anybit", tmp_path / "ours")
    assert tokens_of(anybit.load(tmp_path / "ours", dtype=torch.float32)) == tokens


@pytest.mark.parametrize("block", [32, None])
def test_fp8_experts_of_a_layer_may_be_one_tensor(block: int | None, plain: Any, tmp_path: Path) -> None:
    """With scales of blocks, or of experts: of gate and up together."""
    source = plain("qwen3_moe")
    theirs, weights = load_file(source / "model.safetensors"), {}
    for layer in (0, 1):
        own = f"model.layers.{layer}.mlp.experts"
        parts = {
            n: [theirs.pop(f"{own}.{e}.{n}_proj.weight").float() for e in range(8)] for n in ("gate", "up", "down")
        }
        joined = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        for name, each in (("gate_up_proj", torch.stack(joined)), ("down_proj", torch.stack(parts["down"]))):
            rows, columns = (block or each.shape[1]), (block or each.shape[2])
            scale = each.unflatten(1, (-1, rows)).unflatten(3, (-1, columns)).abs().amax((2, 4)) / 448
            spread = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
            codes = (each / spread).to(torch.float8_e4m3fn)
            theirs |= {f"{own}.{name}": codes, f"{own}.{name}_scale_inv": scale}
            weights[f"{own}.{name}"] = codes.float() * spread
    config = {"quant_method": "fp8", "weight_block_size": block and [block, block]}
    folder = rewritten(source, tmp_path / "theirs", {"quantization_config": config}, theirs)
    layers = layers_of(anybit.load(folder, dtype=torch.float32))
    assert len(layers) == 2 * 8 * 3
    for name, layer in layers.items():
        place, number, projection = name.rsplit(".", 2)
        whole = weights[f"{place}.{'down' if projection == 'down_proj' else 'gate_up'}_proj"][int(number)]
        half = {"gate_proj": whole[:32], "up_proj": whole[32:]}.get(projection, whole)
        assert torch.equal(layer.dequantize(), half), name


def test_experts_convert_to_what_others_load(plain: Any, tmp_path: Path) -> None:
    """From compressed-tensors to GPTQ and back, by way of anybit's format in place."""
    folder, _ = stored("compressed-tensors int4", plain("qwen3_moe"), tmp_path / "theirs")
    tokens = tokens_of(anybit.load(folder, dtype=torch.float32))
    convert_into(folder, "gptq", tmp_path / "gptq")
    convert_into(tmp_path / "gptq", "compressed-tensors", tmp_path / "back")
    convert(folder, "anybit")
    for place in (tmp_path / "gptq", tmp_path / "back", folder):
        assert tokens_of(anybit.load(place, dtype=torch.float32)) == tokens
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert type(theirs.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer" and tokens_of(theirs.eval()) == tokens


def test_experts_that_compressed_tensors_does_not_load_stay_anybits(plain: Any, tmp_path: Path) -> None:
    """Its readers expect codes of all experts, without zero points."""
    keep = ["lm_head", r".*experts\.3\..*"]
    for name, kind, scheme, kept, why in (
        ("zeros", "qwen3_moe", "w4a16g32asym", None, r"experts with zero points \(model\S+experts\.0\.gate_proj\)"),
        ("kept", "qwen3_moe", "w4a16g32", keep, r"experts in 16 bits \(model\S+experts\.3\.gate_proj\)"),
        ("one", "granitemoe", "w4a16g32", None, r"experts as layers \(.*\), where .* expect one tensor"),
    ):
        quantize_folder(plain(kind), tmp_path / name, scheme, modules_to_not_convert=kept)
        assert quantization_of(tmp_path / name)["quant_method"] == "anybit"
        with pytest.raises(ConversionError, match=why):
            convert(tmp_path / name, "compressed-tensors")
