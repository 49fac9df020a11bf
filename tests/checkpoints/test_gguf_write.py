"""anybit convert --to gguf: codes unchanged, read back by gguf, by transformers and by anybit; all else refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.cases import random_weight
from tests.cases_damage import random_blocks, save_gguf
from tests.cases_models import logits_of, save_byte_tokenizer
from tests.checkpoints.test_gguf_blocks import MIXED

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.gguf_blocks import BLOCKS, read_blocks, weights_in
from anybit.checkpoints.formats.gguf_encode import encode
from anybit.checkpoints.formats.gguf_write import _rule
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.checkpoints.formats.write import convert_into
from anybit.checkpoints.gguf import read_gguf_header
from anybit.errors import ConversionError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_come_back(kind: str) -> None:
    """Bit for bit what gguf makes of them; every type can be written, but TQ1_0, whose codes go to TQ2_0."""
    blocks = random_blocks(kind, 3, 512)
    weight = read_blocks(torch.from_numpy(blocks), kind, (3, 512))
    assert weight.format == weights_in(kind)
    assert torch.equal(weight.dequantize(), by_gguf(blocks, kind))
    written, data = encode(weight)
    assert written == ("TQ2_0" if kind == "TQ1_0" else kind)
    back = read_blocks(data, written, (3, 512))
    assert torch.equal(back.words, weight.words) and torch.equal(back.dequantize(), weight.dequantize())
    assert torch.equal(weight.dequantize(), by_gguf(data.numpy(), written))


def by_gguf(blocks: np.ndarray, kind: str) -> torch.Tensor:
    """The values of blocks by the gguf package, which has sizes of its own, too."""
    form = gguf.GGMLQuantizationType[kind]
    assert (BLOCKS[kind].weights, BLOCKS[kind].bytes) == gguf.GGML_QUANT_SIZES[form]
    return torch.from_numpy(gguf.dequantize(blocks, form)).float()


@pytest.mark.parametrize(
    ("scheme", "kind"), [("w4a16g128", "Q4_0"), ("w8a16", "Q8_0"), ("w5a16g64", "Q5_0"), ("w4a16g64asym", "Q4_1")]
)
def test_larger_groups_repeat_their_scales(scheme: str, kind: str) -> None:
    weight = random_weight(3, 256, Scheme.parse(scheme).weights).with_scales(torch.float16)
    if weight.zero is not None:
        weight.scale.fill_(0.0625)  # whose products with zeros float16 holds
    written, data = encode(weight)
    assert written == kind and torch.equal(read_blocks(data, kind, (3, 256)).dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("scheme", "inputs", "why"),
    [
        ("w4a16g32", 256, "Q4_0 does not hold its scales exactly"),  # float32
        ("w4a16g16", 256, "Q4_0 has groups of 32, which do not divide groups of 16"),
        ("w4a16g32min", 256, "Q4_1 does not hold .* exactly; Q4_K does not hold .* exactly"),
        ("w6a16g64", 96, "Q6_K has blocks of 256, which do not divide 96 inputs"),
        ("w2a16g256", 256, "TQ2_0 does not hold its codes"),  # three values of four
        ("w7a16g32", 256, "no type of blocks has 7-bit sym codes"),
        ("w4a16g64nf4", 256, "no type of blocks has 4-bit nf4 codes"),
    ],
)
def test_what_no_block_holds_is_refused(scheme: str, inputs: int, why: str) -> None:
    with pytest.raises(ConversionError, match=why):
        encode(random_weight(3, inputs, Scheme.parse(scheme).weights))


def model(place: Path, kind: str = "llama", **sizes: Any) -> Path:
    """A tiny model with a tokenizer that merges the first two bytes."""
    folder, size = place / "plain", save_byte_tokenizer(place / "plain")
    text = json.loads((folder / "tokenizer.json").read_text())
    words = text["model"]["vocab"]
    first = [word for word in words if not word.startswith("<")][:2]
    words["".join(first)], text["model"]["merges"] = size, [first]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128 if kind == "qwen3" else 16, "pad_token_id": 0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "qwen3", **sizes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, vocab_size=size + 1, **sizes)
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    for name, parameter in built.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.data.uniform_(0.5, 1.5)
    built.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "scheme"), [("llama", "w4a16g32"), ("qwen2", "w8a16"), ("qwen3", "w5a16g64")])
def test_a_model_comes_back(kind: str, scheme: str, tmp_path: Path) -> None:
    """Layers, rows of queries and keys, biases, norms, a tied head, and the tokenizer."""
    quantize_folder(model(tmp_path, kind), tmp_path / "ours", scheme)
    kinds = convert_into(tmp_path / "ours", "gguf", tmp_path / "model.gguf")
    assert set(kinds.values()) == {"F32", "F16", {"w4a16g32": "Q4_0", "w8a16": "Q8_0", "w5a16g64": "Q5_0"}[scheme]}
    ours, back = (load_model(source) for source in (tmp_path / "ours", tmp_path / "model.gguf"))
    assert torch.equal(*(logits_of(one.model).half() for one in (ours, back)))
    for text in ("<s>user: 12 é!</s>", '!"!"'):
        assert ours.tokenizer.encode(text) == back.tokenizer.encode(text)
    said = read_gguf_header(tmp_path / "model.gguf").metadata["tokenizer.ggml.add_bos_token"]
    assert bool(said) == (ours.tokenizer("a").input_ids[0] == ours.tokenizer.bos_token_id)
    assert ours.tokenizer.chat_template == back.tokenizer.chat_template
    assert (ours.tokenizer.bos_token, ours.tokenizer.eos_token) == (back.tokenizer.bos_token, back.tokenizer.eos_token)


def test_a_mixed_file_comes_back(tmp_path: Path) -> None:
    """Scales that a file stores as products of two numbers are recovered, and every layer has its own type."""
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    convert_into(file, "anybit", tmp_path / "ours")
    kinds = convert_into(tmp_path / "ours", "gguf", tmp_path / "back.gguf")
    assert all(kinds[f"{name}.weight"] == kind for name, kind in MIXED.items() if name != "token_embd")
    convert_into(tmp_path / "back.gguf", "anybit", tmp_path / "again")
    first, last = (
        FolderTranslation.of_own(Folder(tmp_path / "ours")),
        FolderTranslation.of_own(Folder(tmp_path / "again")),
    )
    for name in first.layers:
        assert torch.equal(first.read(name).dequantize(), last.read(name).dequantize())


def test_refusals_name_what_does_not_fit(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    for folder, kind, scheme, sizes, why in (
        ("gelu", "llama", "w8a16", {"hidden_act": "gelu"}, "MLPs use gelu"),
        ("scaled", "llama", "w8a16", {"rope_parameters": linear}, "RoPE has scaling of type linear"),
        ("three", "llama", "w3a16g32", {}, "layer .*0.self_attn.q_proj in w3a16g32: Q3_K has blocks of 256"),
        ("other", "gemma", "w8a16", {}, "written for llama, mistral, qwen2, qwen3, qwen3_moe models, not for gemma"),
    ):
        quantize_folder(model(tmp_path / f"{folder}.plain", kind, **sizes), tmp_path / folder, scheme)
        with pytest.raises(ConversionError, match=why):
            convert_into(tmp_path / folder, "gguf", tmp_path / "out.gguf")
    with pytest.raises(ConversionError, match=r"must end in \.gguf"):
        convert_into(tmp_path / "three", "gguf", tmp_path / "out")
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(ConversionError, match="exists already"):
        convert_into(tmp_path / "three", "gguf", tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.gguf"]
    assert not list(tmp_path.glob(".anybit-*"))


def test_rules_that_split_text() -> None:
    last = {"type": "ByteLevel", "use_regex": False}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    three = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    for pattern, name in ((three, "llama-bpe"), (three.replace("{1,3}", ""), "qwen2")):
        assert _rule({"type": "Sequence", "pretokenizers": [{**split, "pattern": {"Regex": pattern}}, last]}) == name
    digits = {"type": "Digits", "individual_digits": True}
    assert _rule({"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel"}]}) == "smollm"
    with pytest.raises(ConversionError, match=r"splits text by a rule \(Split, ByteLevel\)"):
        _rule({"type": "Sequence", "pretokenizers": [{**split, "pattern": {"Regex": "x"}}, last]})
