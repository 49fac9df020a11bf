"""Rotary embeddings follow the GGUF file: kept or dequantized, by factors or by metadata."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases_damage import finish_gguf, save_gguf
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anybit.checkpoints.formats.gguf_file import open_gguf
from anybit.checkpoints.gguf import read_gguf_header
from anybit.checkpoints.gguf_config import scale_rotary
from anybit.checkpoints.source import dequantize_gguf
from anybit.errors import CheckpointError

pytest.importorskip("gguf")
SIZE, HEAD = 256, 64
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
PLAIN = 10000.0 ** -(np.arange(0, HEAD, 2) / HEAD)


def frequencies(parameters: dict[str, Any]) -> np.ndarray:
    config = LlamaConfig(hidden_size=SIZE, num_attention_heads=4, head_dim=HEAD, max_position_embeddings=64)
    config.rope_parameters = parameters
    found, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    assert scaling == 1.0 or parameters["rope_type"] == "yarn"
    return found.double().numpy()


def read(file: Path) -> dict[str, Any]:
    return dict(open_gguf(file)[2].config.rope_parameters)


def test_llama3_is_recognized(tmp_path: Path) -> None:
    factors = (PLAIN / frequencies(LLAMA3)).astype(np.float32)
    file = save_gguf(tmp_path / "model.gguf", SIZE, 2, rope={"rope_freqs.weight": factors})
    assert read(file) == LLAMA3
    folder = tmp_path / "folder"
    folder.mkdir()
    dequantize_gguf(file, folder)
    assert AutoConfig.from_pretrained(folder).rope_parameters == LLAMA3


def test_other_factors_divide_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, HEAD // 2, dtype=np.float32) ** 2
    found = read(save_gguf(tmp_path / "model.gguf", SIZE, 2, rope={"rope_freqs.weight": factors}))
    np.testing.assert_allclose(frequencies(found), PLAIN / factors, rtol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_metadata_are_read(tmp_path: Path, kind: str) -> None:
    said = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    found = read(save_gguf(tmp_path / "model.gguf", SIZE, 2, rope=said))
    assert found["rope_type"] == kind and found["factor"] == 4.0
    assert (frequencies(found) <= PLAIN * 1.001).all()


def described(file: Path, architecture: str, layers: int = 1, **said: float | str) -> Any:
    """The configuration of a file with these metadata and one norm per layer; heads have 64 channels."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(512)
    writer.add_block_count(layers)
    writer.add_head_count(4)
    writer.add_rope_freq_base(5e5)
    writer.add_key_length(64)
    for key, value in said.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](name, value)
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(512, np.float32))
    finish_gguf(writer)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    scale_rotary(config, file, read_gguf_header(file))
    return config


@pytest.mark.parametrize(
    ("architecture", "said", "found"),
    [
        *((name, {}, {"rope_theta": 5e5}) for name in ("starcoder2", "stablelm", "qwen2")),  # the base is the file's
        ("phi3", {"rope__dimension_count": 96}, {"partial_rotary_factor": 0.75}),  # of heads with 128, in Phi-4-mini
        ("qwen2", {"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("qwen2", {"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_rotary_parameters_are_the_file_s(architecture: str, said: Any, found: dict[str, Any], tmp_path: Path) -> None:
    assert found.items() <= described(tmp_path / "model.gguf", architecture, **said).rope_parameters.items()


def test_layers_of_gemma_3_that_see_everything_are_scaled(tmp_path: Path) -> None:
    said = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    found = described(tmp_path / "model.gguf", "gemma3", **said).rope_parameters
    assert found["full_attention"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    assert found["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match="some layers by 'yarn'; linear is known"):
        described(tmp_path / "other.gguf", "gemma3", **said | {"rope__scaling__type": "yarn"})


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"), [("gemma2", 1, 64), ("gemma2", 46, 128), ("gemma3", 62, 128)]
)
def test_queries_of_the_largest_gemmas_are_scaled_by_hidden_size(architecture, layers, scale, tmp_path) -> None:
    assert described(tmp_path / "model.gguf", architecture, layers).query_pre_attn_scalar == scale


def test_queries_see_the_window_of_the_file(tmp_path: Path) -> None:
    for name in ("phi3", "starcoder2", "gpt-oss", "gemma2", "gemma3"):
        assert described(tmp_path / f"{name}.gguf", name, attention__sliding_window=2047).sliding_window == 2047
    wide = described(tmp_path / "wide.gguf", "phi3", attention__sliding_window=262144)  # bounds nothing
    assert wide.sliding_window is None and described(tmp_path / "none.gguf", "phi3").sliding_window is None
    with pytest.warns(UserWarning, match="sliding window of 512 tokens, but transformers' qwen2 has none"):
        described(tmp_path / "model.gguf", "qwen2", attention__sliding_window=512)


def test_a_model_that_does_not_turn_is_left_alone(tmp_path: Path) -> None:
    assert described(tmp_path / "model.gguf", "mamba").model_type == "mamba"


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"rope_freqs.weight": np.zeros(HEAD // 2, np.float32)}, "above 0"),
        ({"rope_freqs.weight": np.ones(HEAD // 2, np.float16)}, "row of float32"),
    ],
)
def test_unknown_rope_scaling_is_refused(tmp_path: Path, rope: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        read(save_gguf(tmp_path / "model.gguf", SIZE, 2, rope=rope))
