"""What a folder may not do, one at a time: code, links, patterns, numbers, headers, other methods."""

import json
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from tests.cases_damage import save_gguf
from tests.cases_folders import configure
from tests.cases_models import save_byte_tokenizer, save_tiny
from transformers import AutoModelForCausalLM
from transformers.quantizers.base import HfQuantizer

from anybit import AnyBitConfig
from anybit.checkpoints.companions import companions
from anybit.checkpoints.configuration import Quantization
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats import FORMATS
from anybit.checkpoints.gguf import read_gguf_header
from anybit.checkpoints.safetensors import read_header
from anybit.checkpoints.scratch import PREFIX
from anybit.checkpoints.source import from_hub, local_folder
from anybit.checkpoints.verify import check_config
from anybit.errors import AnyBitError, CheckpointError
from anybit.hf.loading import load_model
from anybit.models.patterns import check_pattern
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")
    save_byte_tokenizer(folder)
    return folder


def linked(source: Path, target: Path) -> Path:
    """A folder with the same files, hard-linked except JSON, which tests change."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
        else:
            os.link(file, target / file.name)
    return target


@pytest.mark.parametrize("door", ["load_model", "from_pretrained", "quantize"])
def test_nothing_in_a_folder_is_executed(llama, tmp_path, monkeypatch, door) -> None:
    """Neither by the configuration nor by the tokenizer, even where a terminal could be asked."""
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    folder = linked(llama, tmp_path / "model")
    code = f"open({str(tmp_path / 'pwned')!r}, 'w').close()\n"
    for name in ("evil.py", "__init__.py"):
        (folder / name).write_text(code)
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    configure(folder, auto_map=names)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "auto_map": names, "tokenizer_class": "E"}))
    try:
        if door == "load_model":
            load_model(folder, device="cpu")
        elif door == "from_pretrained":
            AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=AnyBitConfig("w4a16"), trust_remote_code=False
            )
        else:
            quantize_folder(folder, tmp_path / "out", "w4a16")
            assert not list((tmp_path / "out").glob("*.py"))
    except AnyBitError:
        pass
    assert not (tmp_path / "pwned").exists()


def test_files_beside_a_gguf_file_are_not_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = save_gguf(tmp_path / "model.gguf")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w').close()\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}')
    (tmp_path / "config.json").write_text("null")
    with local_folder(file) as folder:
        assert sorted(item.name for item in folder.glob("*.safetensors")) == ["model.safetensors"]
        assert not (folder / "source").exists()
    assert not (tmp_path / "pwned").exists()


def test_what_a_killed_reader_of_gguf_files_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    file = save_gguf(tmp_path / "model.gguf", hidden=256, kinds={"blk.0.ffn_up": "Q4_K"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}killed" / "source").mkdir(parents=True)
    assert load_model(file, device="cpu").scheme is not None
    assert [item.name for item in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_no_configuration(llama: Path, tmp_path: Path) -> None:
    folder = linked(llama, tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is not a regular file"):
        load_model(folder, device="cpu")


def test_gguf_counts_are_held_against_the_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = save_gguf(tmp_path / "model.gguf")
    data = file.read_bytes()
    header = read_gguf_header(file)
    assert header.metadata["llama.block_count"] == 1
    assert header.tensors["blk.0.ffn_up.weight"].shape == (32, 64)
    place = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    for count in (10**9, 13):
        file.write_bytes(data[:place] + struct.pack("<I", count) + data[place + 4 :])
        with pytest.raises(CheckpointError, match=rf"llama\.block_count is {count}, and its tensors allow 12 at most"):
            read_gguf_header(file)
    for counts, message in (((2**40, 17), "announces"), ((2**19, 17), "corrupt GGUF"), ((12, 2**19), "corrupt GGUF")):
        file.write_bytes(data[:8] + struct.pack("<QQ", *counts) + data[24:])
        with pytest.raises(CheckpointError, match=message):
            read_gguf_header(file)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/f00")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "tool.jinja").symlink_to("../../../blobs/f00")
    assert [file.name for file in companions(snapshot)[0]] == ["tool.jinja", "tokenizer.json"]
    (snapshot / "other.json").symlink_to("../../../other")
    (tmp_path / "other").write_text("")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        companions(snapshot)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", r"(.*)\1", ".*.*.*.*x", "(?=a)b", "a?a?a?a?a", "x" * 300, "(", "[a-z]+(?:x+){9}"]
)
def test_patterns_that_may_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="here has"):
        check_pattern(pattern, "here")


@pytest.mark.parametrize(
    "pattern", ["lm_head", r".*layers\.\d+\.mlp.*", "q_proj|k_proj", "model.layers.[0-3].self_attn"]
)
def test_ordinary_patterns_are_allowed_and_fast(pattern: str) -> None:
    check_pattern(pattern, "here")
    began = time.process_time()
    re.match(f"(?:{pattern})$", "model.layers.123.self_attn.q_proj" * 4)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 10_000}, r"num_hidden_layers is 10000, more than \d+ tensors allow"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e"),
        ({"num_labels": 10**9}, "num_labels is 1e"),
        ({"vocab_size": 10**12}, "vocab_size is 1e"),
        ({"text_config": {"num_experts": 10**9}}, r"text_config\.num_experts is 1e"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights names files that are not checked"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation names code on the hub"),
        ({"quantization_config": 3}, "quantization_config must be an object"),
        ({"model_type": None}, "model_type must be a name"),
    ],
)
def test_configurations_are_bounded_before_anything_is_built(llama, tmp_path, entries, message) -> None:
    began = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        Folder(configure(linked(llama, tmp_path / "model"), **entries))
    assert time.process_time() - began < 1


@pytest.mark.skipif(
    not hasattr(HfQuantizer, "update_attn_implementation"),
    reason="this transformers builds the model before it shows a quantizer the configuration",
)
def test_from_pretrained_is_bounded_too(llama: Path, tmp_path: Path) -> None:
    quantize_folder(llama, tmp_path / "out", "w4a16g32")
    began = time.process_time()
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        AutoModelForCausalLM.from_pretrained(configure(tmp_path / "out", num_hidden_layers=10_000))
    assert time.process_time() - began < 2


def test_many_names_are_read_in_linear_time(tmp_path: Path) -> None:
    names = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(50_000)}
    text = json.dumps(names)[:-1] + ', "t7": ' + json.dumps(names["t7"]) + "}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    began = time.process_time()
    with pytest.raises(CheckpointError, match="tensor t7 appears twice"):
        read_header(tmp_path / "model.safetensors")
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"scheme": None}, "names anybit, but no scheme"),
        ({"version": "9.9.0"}, r"written by anybit 9\.9\.0, .*upgrade"),
        ({"version": 3}, "version must be a version"),
        ({"shape": 3}, "has shape, which this version of anybit does not know"),
        ({"group_index": "yes"}, "group_index must be true or false"),
        ({"hadamard": {"a": 1}}, "hadamard must be a list of names"),
        ({"scheme": "w4a16g64"}, "contradicts itself: its scheme is w4a16g64, and group_size"),
    ],
)
def test_quantization_config_is_checked(words: dict[str, Any], message: str) -> None:
    entry = Quantization(Scheme.parse("w4a16g32"), ["lm_head"]).entry(["lm_head"])
    assert Quantization.of({"quantization_config": entry}) == Quantization(Scheme.parse("w4a16g32"), ["lm_head"])
    entry["anybit"].update(words)
    with pytest.raises(CheckpointError, match=message):
        check_config({"quantization_config": entry}, "config.json")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "hqq", "unheard-of", None])
def test_other_quant_methods_are_refused_by_name(llama: Path, tmp_path: Path, method: str | None) -> None:
    entry = {"quant_method": method, "bits": 4, "group_size": 128} if method else {"bits": 4}
    folder = configure(linked(llama, tmp_path / "model"), quantization_config=entry)
    named = method or "an unknown method"
    read = method in {format.name for format in FORMATS}
    why = r"and has no tensor \*\.\w+" if read else "which anybit does not read"
    with pytest.raises(CheckpointError, match=rf"quantized by {named}, {why}"):
        load_model(folder, device="cpu")
    with pytest.raises(CheckpointError, match=rf"quantized already \({named}\)"):
        quantize_folder(folder, tmp_path / "out", "w4a16")


def test_a_folder_of_gguf_files_and_a_missing_tokenizer_say_what_to_do(llama, tmp_path, monkeypatch) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"not a model folder: give one of its GGUF files instead, such as .*f$"):
        load_model(tmp_path / "files", device="cpu")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "files"))
    with pytest.raises(CheckpointError, match=r"^a/b has no config.json on the hub: .*hf download a/b FILE.gguf"):
        load_model("a/b", device="cpu")
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: asked.update(more) or str(llama))
    from_hub("a/b")
    names = ["config.json", "model-1.safetensors", "tokenizer.json", "original/model.safetensors", "model.bin"]
    kinds = {kind: asked[kind] for kind in ("allow_patterns", "ignore_patterns")}
    assert [*filter_repo_objects(names, **kinds)] == names[:3], "a copy of the weights for other programs is fetched"
    bare = linked(llama, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"save it there: AutoTokenizer.from_pretrained\(ORIGINAL\).save_pre"):
        load_model(bare, device="cpu")


@pytest.mark.parametrize("method", ["x", "", None, {"a": 1}, 3])
@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a8g32"])
def test_a_damaged_method_is_refused_and_not_made_up(llama: Path, tmp_path: Path, scheme: str, method: object) -> None:
    """transformers only warns about an unknown method, and initializes the model randomly."""
    quantize_folder(llama, tmp_path / "q", scheme)
    configure(tmp_path / "q", {"quant_method": method})
    with pytest.raises(CheckpointError, match="an unknown quant_method"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    with pytest.raises(AnyBitError):
        load_model(tmp_path / "q", device="cpu")
    configure(tmp_path / "q", quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="quantization_config cannot be used"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")
