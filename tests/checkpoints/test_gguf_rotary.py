"""Rotary embeddings turn as the GGUF file says: kept or dequantized, by factors or by metadata."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases_damage import save_gguf
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anybit.checkpoints.formats.gguf_file import open_gguf
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
def test_metadata(tmp_path: Path, kind: str) -> None:
    said = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    found = read(save_gguf(tmp_path / "model.gguf", SIZE, 2, rope=said))
    assert found["rope_type"] == kind and found["factor"] == 4.0
    assert (frequencies(found) <= PLAIN * 1.001).all()


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"rope_freqs.weight": np.zeros(HEAD // 2, np.float32)}, "above 0"),
        ({"rope_freqs.weight": np.ones(HEAD // 2, np.float16)}, "row of float32"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, rope: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        read(save_gguf(tmp_path / "model.gguf", SIZE, 2, rope=rope))
