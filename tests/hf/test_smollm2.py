"""A real model, as users run it: quantized into a folder, prompted, run over a quantized cache, and evaluated."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anybit import AnyBitCache
from anybit.hf import evaluate
from anybit.hf.loading import Loaded, load_model
from anybit.layers.linear import QuantLinear
from anybit.quantization.methods.registry import quantize_folder

pytestmark = pytest.mark.model


def said(loaded: Loaded, prompt: str, **options: Any) -> str:
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        tokens = loaded.model.generate(**inputs, max_new_tokens=2, do_sample=False, **options)
    return loaded.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Loaded:
    return load_model(smollm2, device="cpu")


def test_four_bits_still_speak(smollm2: Path, plain: Loaded, wikipedia: Path, tmp_path: Path) -> None:
    saved = quantize_folder(smollm2, tmp_path / "w4", "w4a16g128")
    assert saved.layers == 210
    assert saved.bits_per_weight == pytest.approx(4.1357, abs=1e-3)
    ours = load_model(tmp_path / "w4", device="cpu")
    question = "The capital of France is"
    assert "Paris" in said(plain, question)
    assert "Paris" in said(ours, question)
    ids = ours.tokenizer(evaluate.read_text(wikipedia)[:8000], add_special_tokens=False)["input_ids"]
    windows = evaluate.windows_of(ids, 128, 1)
    before, after = (evaluate.perplexity(loaded.model, windows).perplexity for loaded in (plain, ours))
    assert before < after < 1.6 * before
    ours.model.set_attn_implementation("anybit")
    assert "Paris" in said(ours, question, past_key_values=AnyBitCache("kv4", config=ours.model.config))


def test_its_gguf_keeps_its_quantization(smollm2: Path, plain: Loaded, wikipedia: Path) -> None:
    file = smollm2.parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    ours = load_model(file, device="cpu")
    assert str(ours.scheme) == "w4a16g32min"
    assert sum(isinstance(module, QuantLinear) for module in ours.model.modules()) == 210
    ids = ours.tokenizer(evaluate.read_text(wikipedia)[:4000], add_special_tokens=False)["input_ids"]
    windows = evaluate.windows_of(ids, 128, 1)
    dequantized, native = (evaluate.perplexity(loaded.model, windows).perplexity for loaded in (plain, ours))
    assert native == pytest.approx(dequantized, rel=1e-3)
