"""From folder to folder: every architecture, every refusal, and the reported figures."""

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.cases_folders import Sources, configure, copied, quantization_of
from tests.cases_models import ARCHITECTURES, alike, layers_of, tiny_model, tokens_of
from transformers import AutoModelForCausalLM, LlamaConfig

import anybit
from anybit.cache import kvcache
from anybit.checkpoints.folder import Folder
from anybit.codes.rtn import quantize_weight
from anybit.errors import CheckpointError, LayerError, OptionError, SchemeError
from anybit.hf import graph
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import KVFormat, Scheme


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streamed_is_quantized_while_loading(architecture: str, sources: Sources, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    saved = quantize_folder(sources[architecture], tmp_path / "out", "w4a16g64asym", progress=lambda *s: seen.append(s))
    streamed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    config = anybit.AnyBitConfig("w4a16g64asym")
    loaded = AutoModelForCausalLM.from_pretrained(sources[architecture], quantization_config=config).eval()
    assert saved.layers == len(layers_of(loaded)) == len(seen)
    assert seen[-1][1:] == (saved.weights, saved.weights)
    assert alike(streamed, loaded) and tokens_of(streamed) == tokens_of(loaded)


def test_saved_figures_are_true(llama: Path, tmp_path: Path) -> None:
    saved = quantize_folder(llama, tmp_path / "out", "w3a16g32")
    folder = Folder(tmp_path / "out")
    assert (saved.bytes_before, saved.bytes_after) == (Folder(llama).bytes, folder.bytes)
    parts = ("weight_packed", "weight_scale", "weight_shape")
    stored = sum(e.bytes for n, e in folder.entries.items() if n.endswith(parts))
    assert saved.bits_per_weight == pytest.approx(8 * stored / saved.weights)
    own = quantization_of(tmp_path / "out")["anybit"]
    assert (own["scheme"], own["modules_to_not_convert"]) == ("w3a16g32", ["lm_head"])


def test_the_search_can_be_left_out(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w3a16g32", options={"search": False})
    name = "model.layers.0.mlp.up_proj"
    plain = quantize_weight(Folder(llama).read(f"{name}.weight"), Scheme.parse("w3a16g32").weights, search=False)
    assert torch.equal(Folder(tmp_path / "out").read(f"{name}.weight_packed"), plain.words)


def test_a_tied_head_is_kept_whatever_is_named(sources: Sources, tmp_path: Path) -> None:
    kept = {"modules_to_not_convert": ["down_proj"]}
    assert quantize_folder(sources["llama-tied"], tmp_path / "out", "w4a16g32", **kept).layers == 2 * 6
    config = anybit.AnyBitConfig("w4a16g32", **kept)
    loaded = AutoModelForCausalLM.from_pretrained(sources["llama-tied"], quantization_config=config)
    assert alike(loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("dwon_proj", "'dwon_proj' matches no layer of LlamaForCausalLM; .* end in q_proj, k_proj"),
        ("*.mlp", r"'\*\.mlp' is neither a layer to keep in 16 bits nor a pattern: nothing to repeat"),
        ("*", r"; patterns are regular expressions, in which \.\* matches any text: '\.\*'\?"),
        ("(", r"unterminated subpattern at position \d+; patterns are regular expressions, .* any text$"),
    ],
)
def test_a_name_to_keep_that_no_layer_has(llama: Path, tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        quantize_folder(llama, tmp_path / "out", "w4a16g32", modules_to_not_convert=[pattern])
    assert not list(tmp_path.iterdir())
    with pytest.raises(LayerError, match="must be a list of names, not"):
        quantize_folder(llama, tmp_path / "out", "w4a16g32", modules_to_not_convert=pattern)  # type: ignore[arg-type]
    config = anybit.AnyBitConfig("w4a16g32", modules_to_not_convert=[pattern])
    with pytest.raises(LayerError, match=message):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)


def test_shards_are_a_whole(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w4a16g32", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    quantize_folder(llama, tmp_path / "whole", "w4a16g32")
    assert alike(*(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "whole")))


def test_a_base_model_without_its_prefix(llama: Path, tmp_path: Path) -> None:
    old = safetensors.torch.load_file(llama / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in old.items()}
    quantize_folder(llama, tmp_path / "a", "w4a16g32")
    quantize_folder(copied(llama, tmp_path / "bare", **(dict.fromkeys(old) | bare)), tmp_path / "b", "w4a16g32")
    assert Folder(tmp_path / "a").entries.keys() == Folder(tmp_path / "b").entries.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.up_proj.weight": None}, r"has no tensor model\.layers\.0\.mlp\.up_proj\.weight"),
        ({"model.norm.weight": None}, r"has no tensor model\.norm\.weight"),
        ({"lm_head.weight": None}, r"has no tensor lm_head\.weight"),
        ({"model.layers.1.mlp.up_proj.weight": torch.ones(3, 64)}, r"up_proj\.weight has shape \(3, 64\).*\(96, 64\)"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.full((96, 64), torch.nan)},
            r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has 6144 values that are not finite",
        ),
        ({"model.norm.weight": torch.full((64,), torch.inf)}, r"tensor model\.norm\.weight has 64 values"),
        (
            {"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.int8)},
            r"dtype torch\.int8, which is quantized already",
        ),
        ({"layers.0.mlp.up_proj.weight": torch.ones(96, 64)}, r"up_proj\.weight appears twice, also as"),
    ],
)
def test_bad_checkpoints_are_named(llama, tmp_path, change, message) -> None:
    source = copied(llama, tmp_path / "bad", **change)
    with pytest.raises(CheckpointError, match=message):
        quantize_folder(source, tmp_path / "out", "w4a16g32")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"model_type": "hal9000", "architectures": ["HAL9000ForCausalLM"]},
            r"config\.json: transformers cannot build HAL9000ForCausalLM",
        ),
        ({"num_attention_heads": 7}, "cannot build LlamaForCausalLM .*: The hidden size .* is not a multiple of the"),
    ],
)
def test_models_that_transformers_cannot_build_are_named(llama: Path, tmp_path: Path, entries, message) -> None:
    source = configure(shutil.copytree(llama, tmp_path / "source"), **entries)
    with pytest.raises(CheckpointError, match=message):
        quantize_folder(source, tmp_path / "out", "w4a16g32")
    with pytest.raises(CheckpointError, match=message):
        load_model(source)


def test_quantize_folder_refusals(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w4a16g32")
    with pytest.raises(CheckpointError, match=r"is quantized already \(anybit, w4a16g32\)"):
        quantize_folder(tmp_path / "out", tmp_path / "again", "w2a16g32")
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        quantize_folder(llama, tmp_path / "out", "w2a16g32")
    quantize_folder(llama, tmp_path / "out", "w2a16g32", overwrite=True)
    for words, error, message in (
        ({"method": "magic"}, SchemeError, "method 'magic' is unknown; there are rtn, gptq, distill, smooth"),
        ({"method": "blockwise"}, SchemeError, "method blockwise is gone: distill learns"),
        ({"options": {"speed": 3}}, OptionError, r"method rtn has no setting 'speed' \(3\); its settings: search$"),
        ({"options": {"text": "text.txt"}}, OptionError, "method rtn needs no text: leave out text, or choose one of "),
        ({"scheme": "w2"}, SchemeError, "a scheme is wBaB"),
        ({"modules_to_not_convert": ["model", "lm_head"]}, LayerError, "no linear layer to quantize"),
    ):
        with pytest.raises(error, match=message):
            quantize_folder(llama, tmp_path / "x", **{"scheme": "w2a16g32", **words})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]


def test_a_scheme_that_does_not_fit_a_layer(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(intermediate_size=98, **sizes)).save_pretrained(tmp_path / "source")
    with pytest.raises(LayerError, match=r"w4a16s24 does not fit layer model\.layers\.0\.mlp\.down_proj: .* not 98"):
        quantize_folder(tmp_path / "source", tmp_path / "out", "w4a16s24")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(0, 96), r"a weight of shape \(0, 96\) has no values to quantize"),
        (torch.zeros(64, 0), r"a weight of shape \(64, 0\) has no values to quantize"),
        (torch.zeros(8, 64, device="meta"), "is on the meta device: it has no values yet, load it first"),
        ([[1.0, 2.0]], "must be a floating-point matrix, a torch.Tensor, not list"),
    ],
)
def test_a_weight_without_values_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        quantize_weight(weight, Scheme.parse("w4a16g32").weights)


def test_arguments_of_another_type_are_named(llama: Path, tmp_path: Path) -> None:
    for call, error, message in (
        (lambda: quantize_folder(None, tmp_path / "out", "w4a16g32"), CheckpointError, "the folder of a model .* None"),
        (lambda: quantize_folder(llama, None, "w4a16g32"), CheckpointError, "the output must be a path, a str .* None"),
        (lambda: load_model(None), CheckpointError, r"a model's source must be a path, a str or .* not None"),
        (lambda: quantize_folder(llama, tmp_path, "w4a16", options=[1]), OptionError, r"a dict of .* not \[1\]"),
        (lambda: quantize_folder(llama, tmp_path, "w4a16", speed=3), TypeError, "keyword argument 'speed'"),
        (lambda: quantize_weight(torch.randn(8, 64), "w4a16g128"), TypeError, "must be a WeightFormat.*'w4a16g128'"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not list(tmp_path.iterdir())


def test_a_kv_format_that_cannot_run_is_not_saved(llama: Path, sources: Sources, tmp_path: Path) -> None:
    message = r"the KV format kv4 cannot serve this model: head_dim must be .* not 16; leave out -kv4 to keep"
    with pytest.raises(LayerError, match=message):
        quantize_folder(llama, tmp_path / "out", "w4a16g32-kv4")
    assert not list(tmp_path.iterdir())
    saved = quantize_folder(sources["llama-wide"], tmp_path / "out", "w4a16g32-kv4")
    assert tokens_of(AutoModelForCausalLM.from_pretrained(saved.folder).eval())


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama-wide"])
def test_what_is_refused_before_is_what_is_refused_later(architecture: str) -> None:
    model = tiny_model(architecture)
    for text in ("kv4", "kv2g128", "kv16", "kv4rot", "kvfp4"):
        format = KVFormat.parse(text)
        assert kvcache.why_not(model, format) == graph.why_not(model, format)


def test_rotated_heads_of_a_width_without_a_matrix_are_refused_before() -> None:
    model = tiny_model("llama-wide")
    model.config.head_dim = 96
    assert kvcache.why_not(model, KVFormat.parse("k4v4g32")) is None
    assert "head_dim must be a power of two" in str(kvcache.why_not(model, KVFormat.parse("k4v4g32rot")))
