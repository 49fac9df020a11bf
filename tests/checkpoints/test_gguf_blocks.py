"""GGUF's blocks against the gguf package's own dequantization, bit for bit."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cases_damage import random_blocks, save_gguf
from tests.cases_models import layers_of, logits_of

from anybit.checkpoints.formats.gguf_blocks import BLOCKS, read_blocks
from anybit.checkpoints.formats.gguf_file import open_gguf
from anybit.checkpoints.gguf import read_gguf_header
from anybit.checkpoints.source import local_folder
from anybit.cli.checkpoints import _gguf
from anybit.errors import CheckpointError
from anybit.hf.loading import load_model

gguf = pytest.importorskip("gguf")
N, K = 3, 512


def test_read_blocks_refuses_other_sizes_and_values() -> None:
    halves, ternary = (torch.from_numpy(random_blocks(kind, N, K)) for kind in ("Q4_0", "TQ2_0"))
    infinite = halves.clone()
    infinite[0, :2], ternary[0, 0] = 0xFF, ternary[0, 0] | 3
    for data, kind, k, says in (
        (halves, "Q4_0", 480, r"864 bytes are no 3 x 480 matrix in Q4_0"),
        (infinite, "Q4_0", K, "not finite"),
        (ternary, "TQ2_0", K, "a pair of bits is 3"),
    ):
        with pytest.raises(CheckpointError, match=says):
            read_blocks(data, kind, (N, k))


def test_a_big_endian_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "model.gguf")
    data = bytearray(file.read_bytes())
    data[4:8] = data[4:8][::-1]
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"big-endian .* gguf-convert-endian FILE little"):
        read_gguf_header(file)


MIXED = {
    "blk.0.attn_q": "Q4_K", "blk.0.attn_k": "Q4_K", "blk.0.attn_v": "Q6_K", "blk.0.attn_output": "Q5_K",
    "blk.0.ffn_gate": "Q4_1", "blk.0.ffn_up": "IQ4_XS", "blk.0.ffn_down": "Q3_K", "output": "Q8_0",
    "token_embd": "Q4_0",
}  # fmt: skip


def test_a_file_runs_as_it_does_dequantized(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    ours = load_model(file)
    layers = layers_of(ours.model)
    assert str(layers["model.layers.0.self_attn.v_proj"].scheme) == "w6a16g16" and len(layers) == 8
    with local_folder(file) as folder:
        plain = load_model(folder)
    for name, layer in layers.items():  # the file permutes rows of queries and keys
        weight = plain.model.get_submodule(name).weight.data
        torch.testing.assert_close(layer.dequantize(), weight, rtol=2**-10, atol=2**-24)
    torch.testing.assert_close(logits_of(ours.model), logits_of(plain.model), rtol=1e-2, atol=1e-2)


def test_what_has_no_codes_becomes_floats_and_is_said(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "model.gguf", 256, 4, {"blk.0.ffn_up": "IQ3_S", "blk.0.ffn_gate": "Q4_0"})
    with pytest.warns(UserWarning, match="matrices in IQ3_S, which become 16-bit floats"):
        loaded = load_model(file)
    kinds = {n: type(m).__name__ for n, m in loaded.model.named_modules() if n.endswith(("up_proj", "gate_proj"))}
    assert kinds == {"model.layers.0.mlp.up_proj": "Linear", "model.layers.0.mlp.gate_proj": "QuantLinear"}


def test_info_reads_the_header_alone(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    found, ones = _gguf(file), {f"1 {kind}" for kind in MIXED.values() if kind != "Q4_K"}
    assert {*found["types"].split(", ")} == {"3 F32", "2 Q4_K", *ones}
    assert found["linear_layers"] == 8 and found["dequantized"] is None and found["scheme"].startswith("w4a16g32min, ")
    tensors = read_gguf_header(file).tensors
    counts = [(BLOCKS[kind], math.prod(tensors[f"{n}.weight"].shape)) for n, kind in MIXED.items() if n != "token_embd"]
    bits = sum(count * 8 * block.bytes / block.weights for block, count in counts) / sum(count for _, count in counts)
    assert found["bits_per_weight"] == pytest.approx(bits, abs=1e-4)
    told = "import sys; from anybit.cli import app; app(sys.argv[1:], standalone_mode=False); print({*sys.modules})"
    done = subprocess.run([sys.executable, "-c", told, "info", str(file)], capture_output=True, text=True, check=True)
    assert "Q4_K" in done.stdout and not {"'torch'", "'transformers'"} & {*re.findall(r"'\w+'", done.stdout)}


def test_texts_end_where_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = transformers.AutoTokenizer.from_pretrained

    def of_another_version(*given: Any, **options: Any) -> Any:
        tokenizer = true(*given, **options)
        tokenizer.eos_token = tokenizer.bos_token
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", of_another_version)
    _, tokenizer, _ = open_gguf(save_gguf(tmp_path / "model.gguf", 256, 2, MIXED))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_texts_of_llama_3_begin_with_a_token_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """As in llama.cpp: many files of 2024 name the pre-tokenizer, but have no add_bos_token."""
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    assert open_gguf(file)[1]("a").input_ids[0] != 1
    data = file.read_bytes()
    assert data.count(b"default") == 1
    file.write_bytes(data.replace(b"default", b"pixtral"))
    assert open_gguf(file)[1]("a").input_ids[0] == 1
