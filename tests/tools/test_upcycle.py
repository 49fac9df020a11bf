"""The script that makes a mixture of experts out of a dense model."""

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

FILE = Path(__file__).parents[2] / "scripts" / "upcycle.py"


@pytest.fixture
def upcycle() -> Any:
    spec = importlib.util.spec_from_file_location("upcycle", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_parent_than_a_llama_is_refused(
    upcycle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MixtralConfig().save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["upcycle.py", str(tmp_path), "text", "folder"])
    with pytest.raises(SystemExit):
        upcycle.main()
    assert "must be a Llama" in capsys.readouterr().err


def test_upcycle_begins_at_the_parent_spreads_tokens_and_learns(upcycle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    parent = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **shape)).eval()
    text = list(torch.randint(128, (64, 32)))
    tokens = torch.stack(text[:16])

    def distance(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float((model(input_ids=tokens).logits - parent(input_ids=tokens).logits).norm())

    monkeypatch.setattr(upcycle, "NOISE", 0.0)
    assert distance(upcycle.upcycled(parent, tokens, 4, 2)) < 1e-3  # equal experts, weights that sum to 1

    monkeypatch.setattr(upcycle, "NOISE", 1.0)
    model = upcycle.upcycled(parent, tokens, 4, 2)
    assert not torch.equal(*model.model.layers[0].mlp.experts.down_proj[:2])
    routed = model(input_ids=tokens, output_router_logits=True).router_logits
    for logits in routed:
        assert (logits.topk(2).indices.flatten().bincount(minlength=4) > len(logits) // 8).all()
    before, router = distance(model), model.model.layers[0].mlp.gate.weight.clone()
    clock = itertools.count()  # a second each time it is asked: twice a step
    monkeypatch.setattr(upcycle, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    upcycle.learn(model, parent, text, 160.0, print)
    assert distance(model) < 0.8 * before
    assert not torch.equal(router, model.model.layers[0].mlp.gate.weight)
