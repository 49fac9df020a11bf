"""compressed-tensors loads what anybit saved, and anybit takes it back."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cases_calibration import sequences
from tests.cases_folders import Sources, configure, quantization_of, retensor
from tests.cases_models import layers_of, tokens_of
from tests.checkpoints.test_format_layouts import padded
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.write import convert, convert_into
from anybit.checkpoints.shared import shared_ignore
from anybit.codes.packing import unpack_words
from anybit.errors import CheckpointError, ConversionError
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        *[("llama", f"w{bits}a16{'g32' if bits % 2 == 0 else 'asym'}") for bits in range(2, 9)],
        ("llama", "w2a16asym"),
        ("llama", "w8a16asym"),
        ("llama", "w1a16asym"),
        ("llama", "w1a16g32sym"),
        ("qwen2", "w4a16g32asym"),
        ("bloom", "w4a16g64"),
    ],
)
def test_compressed_tensors_gives_the_same_tokens(sources, tmp_path, architecture, scheme) -> None:
    pytest.importorskip("compressed_tensors")
    quantize_folder(sources[architecture], tmp_path / "out", scheme)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    convert(tmp_path / "out", "compressed-tensors")
    after = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    assert {name for name in before if before[name] != after.get(name)} == {"config.json"}
    assert before.keys() == after.keys()
    # Compressed, transformers 5.23 makes room for unpacked zero points, and cannot load compressed-tensors' own files.
    asymmetric = scheme.endswith("asym")
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).eval()
    assert not layers_of(theirs)
    assert tokens_of(theirs) == tokens_of(ours)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
    convert(tmp_path / "out", "anybit")
    assert quantization_of(tmp_path / "out")["anybit"]["scheme"] == scheme
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert tokens_of(again) == tokens_of(ours)


@pytest.mark.parametrize(
    ("architecture", "scheme", "message"),
    [
        ("llama", "w1a16", r"cannot express layer model\S+ in w1a16: bipolar codes"),
        ("llama", "w4a8", r"cannot express layer model\S+ in w4a8: 8-bit activations"),
        ("llama", "w4a16s24", r"cannot express layer model\S+ in w4a16s24: 2:4 sparse"),
        ("llama-wide", "w4a16-kv4", "the KV format kv4"),
        ("llama", "w4a16g64", r"layer model\.layers\.0\.mlp\.down_proj has 96 inputs, .* quantize with g32, or"),
        ("gpt2", "w4a16", r"layer transformer\.h\.0\.attn\.c_attn was a Conv1D"),
    ],
)
def test_what_it_cannot_express_is_refused_by_name(sources, tmp_path, architecture, scheme, message) -> None:
    quantize_folder(sources[architecture], tmp_path / "out", scheme)
    before = (tmp_path / "out" / "config.json").read_text()
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "out", "compressed-tensors")
    assert (tmp_path / "out" / "config.json").read_text() == before


def test_activation_order_is_saved_and_refused_by_name(sources: Sources, tmp_path: Path) -> None:
    options = {"sequences": [s % 96 for s in sequences(30)], "tokens": 900, "order": "sorted"}
    quantize_folder(sources["llama"], tmp_path / "out", "w4a16g32", "gptq", options=options)
    assert any(name.endswith("weight_g_idx") for name in Folder(tmp_path / "out").entries)
    assert quantization_of(tmp_path / "out")["group_index"] is True
    assert tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    with pytest.raises(ConversionError, match=r"layer model\.layers\.0\.\S+ has an activation order"):
        convert(tmp_path / "out", "compressed-tensors")


def test_folders_that_would_not_run_as_they_did_are_not_taken_over(sources: Sources, tmp_path: Path) -> None:
    quantize_folder(sources["llama"], tmp_path / "out", "w4a16g32")
    convert(tmp_path / "out", "compressed-tensors")
    apply = [{"targets": ["re:.*down_proj"], "location": "input"}]
    rotated = {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    shape = {"model.layers.0.mlp.up_proj.weight_shape": torch.tensor([1, 96, 64])}
    group = quantization_of(tmp_path / "out")["config_groups"]["group_0"]
    odd = {"config_groups": {"g": {**group, "weights": {**group["weights"], "num_bits": "four"}}}}
    for i, (entry, tensors, message) in enumerate(
        [
            (rotated, {}, "rotates activations at run time"),
            ({"kv_cache_scheme": {"num_bits": 8}}, scales, r"for a KV cache .* rewrite the model with --output"),
            ({}, shape, "up_proj cannot be read: its tensors or settings contradict"),
            (odd, {}, "num_bits 'four' in its config_groups; for tensors in w4a16g32, anybit converts only 4"),
            ({"ignore": ["lm_head", "re:(a+)+$"]}, {}, "may backtrack forever"),
        ]
    ):
        folder = retensor(configure(shutil.copytree(tmp_path / "out", tmp_path / str(i)), entry), **tensors)
        before = (folder / "config.json").read_text()
        with pytest.raises((ConversionError, CheckpointError), match=message):
            convert(folder, "anybit")
        assert (folder / "config.json").read_text() == before


def test_convert_writes_settings_that_others_leave_out(sources: Sources, tmp_path: Path) -> None:
    """Defaults, group size -1 for whole rows, and a format only in the config group."""
    quantize_folder(sources["llama"], tmp_path / "out", "w4a16")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    convert(tmp_path / "out", "compressed-tensors")
    weights = {"num_bits": 4, "strategy": "channel", "group_size": -1}
    groups = {"config_groups": {"a": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}}
    configure(tmp_path / "out", {"format": "mixed-precision", **groups})
    convert(tmp_path / "out", "anybit")
    assert tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()) == tokens_of(ours)


def test_words_that_compressed_tensors_padded_are_written_anew(sources: Sources, tmp_path: Path) -> None:
    """As versions before 0.18 packed 3 bits; changing config.json alone cannot make them anybit's."""
    quantize_folder(sources["llama"], tmp_path / "old", "w3a16g32")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "old").eval()
    convert(tmp_path / "old", "compressed-tensors")
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        k = int(tensors[name.replace("packed", "shape")][1])
        tensors[name] = padded(unpack_words(tensors[name], 3, k), 3)
    retensor(tmp_path / "old", **tensors)
    with pytest.raises(ConversionError, match=r"holds 10 codes of 3 bits a word, .* rewrite the model with --output"):
        convert(tmp_path / "old", "anybit")
    convert_into(tmp_path / "old", "anybit", tmp_path / "new")
    assert tokens_of(AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()) == tokens_of(ours)


def test_layers_whose_words_older_versions_would_take_for_their_own_stay_anybits() -> None:
    """100 inputs of 3 bits are 10 words, dense and padded; 101 are 10 and 11."""
    for k, held in ((100, False), (101, True)):
        model = nn.ModuleDict({"layer": nn.Linear(k, 8, device="meta")})
        assert (shared_ignore(model, Scheme.parse("w3a16"), ["layer"]) == []) == held


def test_convert_refuses_what_it_cannot_express(sources: Sources, tmp_path: Path) -> None:
    for to, says in (
        ("gguf", "cannot convert to 'gguf' in place; there are compressed-tensors, anybit, and"),
        ("compressed-tensors", "not a model that anybit quantized"),
        ("anybit", "not a compressed-tensors model"),
    ):
        with pytest.raises(ConversionError, match=says):
            convert(sources["llama"], to)
    quantize_folder(sources["llama"], tmp_path / "out", "w4a16g32")
    good = convert(tmp_path / "out", "compressed-tensors")

    def group(**changes: object) -> dict[str, object]:
        return {"group_0": {**good["config_groups"]["group_0"], **changes}}

    weights = good["config_groups"]["group_0"]["weights"]
    for groups, says in (
        ({"a": {}, "b": {}}, "has 2 config_groups"),
        (group(format="int-quantized"), "format 'int-quantized'"),
        (group(targets=["re:.*"]), r"targets \['re:\.\*'\]"),
        (group(input_activations={"num_bits": 8}), "input_activations {'num_bits': 8}"),
        (group(weights={**weights, "type": "float"}), "type 'float'"),
        (group(weights={**weights, "actorder": "group"}), "actorder is group"),
        (group(weights={**weights, "group_size": 8}), "group_size 8 in its config_groups; for tensors in"),
        (group(weights={**weights, "num_bits": 8}), "num_bits 8 in"),
    ):
        configure(tmp_path / "out", {"config_groups": groups})
        with pytest.raises((ConversionError, CheckpointError), match=says):
            convert(tmp_path / "out", "anybit")
