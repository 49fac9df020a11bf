"""Other tools' files (tests/fixtures/make_formats.py) against those tools' own dequantized weights."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.cases_folders import config_of, configure, retensor
from tests.cases_models import layers_of, logits_of, save_byte_tokenizer, schemes_of

import anybit
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats import format_of
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.checkpoints.formats.write import convert_into
from anybit.checkpoints.source import local_folder
from anybit.errors import CheckpointError, KernelError
from anybit.hf.loading import load_model
from anybit.layers.linear import QuantLinear
from anybit.quantization.methods.registry import quantize_folder

FIXTURES = Path(__file__).parent.parent / "fixtures" / "formats"
STRIDE = 9
"""Every ninth output of the expected weights is stored."""


@dataclass(frozen=True)
class Case:
    """Expectations of a fixture: its format, the schemes of q_proj and down_proj, and the tolerance.

    steps: tolerance in float16 rounding steps of the layer's largest weight; 0 is bit-exact in the
    dtype that the tool dequantizes to.
    """

    format: str
    q_proj: str
    down_proj: str
    steps: float = 0


CASES = {
    "gptq-2-asym": Case("gptq", "w2a16g32asym", "w2a16g32asym"),
    "gptq-3-asym": Case("gptq", "w3a16g64asym", "w3a16g64asym"),
    "gptq-4-asym": Case("gptq", "w4a16g32asym", "w4a16g32asym"),
    "gptq-4-sym": Case("gptq", "w4a16g32", "w4a16g32"),
    "gptq-8-sym": Case("gptq", "w8a16", "w8a16"),
    "awq-gemm-asym": Case("awq", "w4a16g32asym", "w4a16g32asym"),
    "auto-round-asym": Case("auto-round", "w2a16g32asym", "w2a16g32asym"),
    "auto-round-gptq": Case("auto-round", "w4a16g32", "w8a16g32"),
    "llmc-mxfp4": Case("compressed-tensors", "w4a16g32e2m1", "w4a16g32e2m1"),
    "ct-w4g32": Case("compressed-tensors", "w4a16g32", "w4a16g32"),
    "ct-w4g32-asym": Case("compressed-tensors", "w4a16g32asym", "w4a16g32asym"),
    "ct-w8": Case("compressed-tensors", "w8a16", "w8a16"),
    "ct-fp8": Case("compressed-tensors", "w8a16e4m3", "w8a16e4m3"),
    "ct-fp8-24": Case("compressed-tensors", "w8a16e4m3", "w8a16e4m3", 1),
    "marlin-24": Case("marlin-24", "w8a16s24", "w4a16g128s24"),
    "ct-nvfp4": Case("compressed-tensors", "w4a16g16e2m1", "w4a16g16e2m1"),
    # HQQ computes (q - zero) * scale in float16, which rounds twice; anybit in float32.
    "hqq-4": Case("hqq", "w4a16g64min", "w4a16g64min", 1.5),
    "hqq-3": Case("hqq", "w3a16g32min", "w3a16g32min", 1.5),
    "hqq-2": Case("hqq", "w2a16g16min", "w2a16g16min", 1.5),
    "awq-gemv": Case("awq", "w4a16g32asym", "w4a16g32asym"),
    # bitsandbytes multiplies by the row's scale and then by 1/127, in float32.
    "bnb-int8": Case("bitsandbytes", "w8a16", "w8a16", 0.001),
    "bnb-nf4": Case("bitsandbytes", "w4a16g64nf4", "w4a16g64nf4"),
    "bnb-nf4-nested": Case("bitsandbytes", "w4a16g64nf4", "w4a16g64nf4"),
    "bitnet": Case("bitnet", "w2a8", "w2a8"),
    "autobitnet": Case("bitnet", "w2a8", "w2a8"),
    "fp8-blocks": Case("fp8", "w8a16g32e4m3", "w8a16g32e4m3"),
    "gptqmodel-2-act-v2": Case("gptq", "w2a16g32asym", "w2a16g32asym"),
    "gptqmodel-3-v2": Case("gptq", "w3a16g32asym", "w3a16g32asym"),
    "gptqmodel-4-act-v2": Case("gptq", "w4a16g32asym", "w4a16g32asym"),
    "gptqmodel-4-sym": Case("gptq", "w4a16g32", "w4a16g32"),
    "gptqmodel-8-act": Case("gptq", "w8a16g32", "w8a16g32"),
    "gptqmodel-mixed": Case("gptq", "w4a16g32", "w8a16g64"),
    "llmc-w4-act": Case("compressed-tensors", "w4a16g32asym", "w4a16g32asym"),
    "llmc-w8a8": Case("compressed-tensors", "w8a16", "w8a16"),
    "llmc-fp8": Case("compressed-tensors", "w8a16e4m3", "w8a16e4m3"),
    "llmc-nvfp4": Case("compressed-tensors", "w4a16g16e2m1", "w4a16g16e2m1"),
    "llmc-mixed": Case("compressed-tensors", "w8a16", "w4a16g32asym"),
}

MASKED = "ct-f16-24"
"""Not quantized: 16-bit weights compressed with bitmasks."""


def near(found: torch.Tensor, theirs: torch.Tensor, steps: float) -> bool:
    """Whether weights are a tool's own, bit for bit or within ``steps`` rounding steps."""
    if steps == 0:
        return torch.equal(found.to(theirs.dtype), theirs)
    return float((found - theirs).abs().max()) <= steps * 2**-11 * float(theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_the_default_type_of_floats_changes_nothing(name: str) -> None:
    """vLLM sets it to the model's 16-bit dtype while loading."""
    source = FolderTranslation.of(Folder(FIXTURES / name))
    assert source is not None
    expected = {layer: source.tensors(layer, torch.float32) for layer in source.layers}
    torch.set_default_dtype(torch.float16)
    try:
        found = {layer: source.tensors(layer, torch.float32) for layer in source.layers}
    finally:
        torch.set_default_dtype(torch.float32)
    for layer, tensors in expected.items():
        assert all(torch.equal(found[layer][part], tensor) for part, tensor in tensors.items())


def test_every_fixture_is_looked_at() -> None:
    assert {*CASES, MASKED} == {path.name for path in FIXTURES.iterdir()}
    for path in FIXTURES.iterdir():
        assert " " in config_of(path)["made_by"], "the tool and its version"


def whole_model(name: str, place: Path) -> Path:
    """A model folder with q_proj and down_proj of a fixture, all else unquantized."""
    config = transformers.AutoConfig.from_pretrained(FIXTURES / name)
    del config.quantization_config
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    theirs = load_file(FIXTURES / name / "model.safetensors")
    plain = {key: value for key, value in tensors.items() if "q_proj" not in key and "down_proj" not in key}
    save_file({**plain, **theirs}, place / "model.safetensors")
    shutil.copy(FIXTURES / name / "config.json", place / "config.json")
    save_byte_tokenizer(place)
    return place


def test_weights_behind_bitmasks_are_a_model_like_any_other(tmp_path: Path) -> None:
    expected = load_file(FIXTURES / MASKED / "expected.safetensors")
    place = whole_model(MASKED, tmp_path / "theirs")
    weights = load_model(place).model.state_dict()
    assert len(expected) == 2
    for name, weight in expected.items():
        assert torch.equal(weights[f"{name}.weight"][::STRIDE], weight)
        assert int((weight == 0).sum()) >= weight.numel() / 2
    with local_folder(place) as whole:
        quantize_folder(whole, tmp_path / "ours", "w4a16g32s24")
    layers = layers_of(load_model(tmp_path / "ours").model)
    for name, weight in expected.items():
        kept = layers[name].dequantize()[::STRIDE] != 0
        assert not bool((kept & (weight == 0)).any()), "other weights are kept than the file's"
    mask = f"{next(iter(expected))}.bitmask"
    wrong = load_file(place / "model.safetensors")[mask]
    wrong[0, 0] = 0x07
    retensor(place, **{mask: wrong})
    with pytest.raises(CheckpointError, match=r"_proj cannot be read: .*two of four"), local_folder(place):
        pass


@pytest.mark.parametrize("name", CASES)
def test_a_folder_loads_and_runs(name: str, tmp_path: Path) -> None:
    case, found = CASES[name], format_of(Folder(FIXTURES / name).config)
    assert found is not None and case.format == found.name
    model = anybit.load(whole_model(name, tmp_path))
    expected = load_file(FIXTURES / name / "expected.safetensors")
    modules = layers_of(model)
    assert set(modules) == set(expected)
    for key, module in modules.items():
        assert str(module.scheme) == getattr(case, key.rpartition(".")[2])
        assert near(module.dequantize()[::STRIDE], expected[key], case.steps)
    assert bool(logits_of(model).isfinite().all())


@pytest.mark.parametrize("name", ["gptq-4-sym", "ct-w4g32", "fp8-blocks"])
def test_a_scheme_for_a_quantized_model_is_answered_with_the_way_in(name: str, tmp_path: Path) -> None:
    folder = whole_model(name, tmp_path)
    with pytest.raises(CheckpointError, match=r"already quantized by .*: anybit\.load\(MODEL\)"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=anybit.AnyBitConfig("w4a16"))


@pytest.mark.parametrize("name", ["auto-round-gptq", "hqq-3"])
def test_it_saves_as_anybit_own_and_loads_again(name: str, tmp_path: Path) -> None:
    first = load_model(whole_model(name, tmp_path / "theirs"))
    first.model.save_pretrained(tmp_path / "ours")
    save_byte_tokenizer(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert torch.equal(logits_of(first.model), logits_of(again.model))
    assert schemes_of(first.model) == schemes_of(again.model)


def test_layers_become_floats_where_that_is_allowed(tmp_path: Path) -> None:
    folder = whole_model("hqq-3", tmp_path)
    loaded, plain = load_model(folder), load_model(folder, dequantize=True)
    assert plain.scheme is None and not layers_of(plain.model)
    torch.testing.assert_close(logits_of(plain.model), logits_of(loaded.model))
    with pytest.raises(KernelError, match=r"w3a16g32min .*; --dequantize \(dequantize=True\) runs this model's layers"):
        load_model(folder, backend="packed")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_that_the_model_lacks_are_left_out_if_they_are_zeros(value: float, tmp_path: Path) -> None:
    folder = whole_model("gptq-4-sym", tmp_path)
    retensor(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.full((64,), value, dtype=torch.float16)})
    if value:
        with pytest.raises(CheckpointError, match=r"has tensor .*q_proj\.bias, which LlamaForCausalLM has no place"):
            load_model(folder)
    else:
        assert load_model(folder).scheme is not None


def test_a_tied_head_with_codes_of_its_own_is_tied_no_longer(tmp_path: Path) -> None:
    """As GPTQ's tools write it with ``lm_head`` on, leaving ``tie_word_embeddings`` as it was."""
    folder = whole_model("gptq-4-sym", tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    assert config_of(folder)["tie_word_embeddings"]
    count = len(tensors["model.embed_tokens.weight"])  # q_proj has more outputs than the vocabulary
    sizes = {"qweight": count, "scales": count, "qzeros": count // 8}
    retensor(
        folder, **{f"lm_head.{p}": tensors[f"model.layers.0.self_attn.q_proj.{p}"][:, :n] for p, n in sizes.items()}
    )
    first = load_model(folder).model
    assert isinstance(first.lm_head, QuantLinear) and not first.config.tie_word_embeddings
    convert_into(folder, "anybit", tmp_path / "ours")
    assert torch.equal(logits_of(load_model(tmp_path / "ours").model), logits_of(first))


def test_groups_of_different_sizes_are_not_taken_for_equal_ones(tmp_path: Path) -> None:
    """The first 40 inputs of 64 in one group, the rest in another: in order, but not groups of 32."""
    folder, name = whole_model("gptq-4-sym", tmp_path), "model.layers.0.self_attn.q_proj.g_idx"
    retensor(folder, **{name: (torch.arange(64) >= 40).int()})
    with pytest.raises(CheckpointError, match=r"q_proj cannot be read: its groups of inputs \(g_idx\) are of differ"):
        load_model(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_is_gone_is_noticed(name: str) -> None:
    """Or it changes nothing; the model notices a missing whole layer (``Translation.check``)."""
    good = FolderTranslation.of(Folder(FIXTURES / name))
    assert good is not None
    for tensor in list(Folder(FIXTURES / name).entries):
        folder = Folder(FIXTURES / name)
        del folder.entries[tensor]
        layer = next(layer for layer in good.layers if tensor.startswith(f"{layer}."))
        try:
            found = FolderTranslation.of(folder)
            same = found is None or layer not in found.layers or found.read(layer).format == good.read(layer).format
            if found is not None and layer in found.layers:
                same = same and torch.equal(found.read(layer).dequantize(), good.read(layer).dequantize())
            assert same, tensor
        except CheckpointError as error:
            assert layer in str(error) or name in str(error)


@pytest.mark.parametrize(
    ("name", "entries", "why"),
    [
        ("autobitnet", {"linear_class": "x"}, "linear_class 'x' is neither"),
        ("auto-round-asym", {"packing_format": []}, "quantized by auto-round, which anybit does not read"),
        ("hqq-4", {"quant_method": None}, "quantized by an unknown method"),
    ],
)
def test_words_that_are_not_known_are_refused(name: str, entries: dict[str, object], why: str, tmp_path: Path) -> None:
    folder = configure(whole_model(name, tmp_path), entries)
    with pytest.raises(CheckpointError, match=why):
        load_model(folder)


@pytest.mark.parametrize("damage", ["dtype", "shape", "gone", "not finite"])
def test_what_is_not_quantized_is_checked_too(damage: str, tmp_path: Path) -> None:
    folder, name = whole_model("gptq-4-sym", tmp_path / "model"), "model.layers.0.self_attn.k_proj.weight"
    tensor = load_file(folder / "model.safetensors")[name]
    spoilt = {"dtype": tensor.to(torch.int16), "shape": tensor[1:], "not finite": tensor.clone().fill_(torch.nan)}
    retensor(folder, **{name: spoilt.get(damage)})
    for door in (load_model, lambda folder: convert_into(folder, "anybit", tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"k_proj\.weight"):
            door(folder)
    assert not (tmp_path / "out").exists()
